"""Measure the flatness of a network without changing the network."""

from .density import Density as Density
from .density import spectral_density as spectral_density
from .hessian import HessianOperator as HessianOperator
from .landscape import Landscape as Landscape
from .landscape import Plane as Plane
from .landscape import landscape as landscape
from .landscape import plane_through as plane_through
from .probe import Probe as Probe
from .probe import Reading as Reading
from .sharpness import Sharpness as Sharpness
from .sharpness import sharpness as sharpness
from .spectrum import Eigenvalues as Eigenvalues
from .spectrum import top_eigenvalues as top_eigenvalues
from .trace import Trace as Trace
from .trace import trace as trace
