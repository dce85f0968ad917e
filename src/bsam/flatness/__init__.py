"""Instruments for flatness: they measure a network and leave it as it was."""

from .hessian import HessianOperator as HessianOperator
from .landscape import Landscape as Landscape
from .landscape import Plane as Plane
from .landscape import landscape as landscape
from .landscape import plane_through as plane_through
from .probe import Probe as Probe
from .probe import Reading as Reading
from .sharpness import Sharpness as Sharpness
from .sharpness import sharpness as sharpness
from .spectrum import Density as Density
from .spectrum import Eigenvalues as Eigenvalues
from .spectrum import Trace as Trace
from .spectrum import spectral_density as spectral_density
from .spectrum import top_eigenvalues as top_eigenvalues
from .spectrum import trace as trace
