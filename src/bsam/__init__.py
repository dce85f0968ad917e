"""Train into flat minima: BSAM (*Bilateral* Sharpness-Aware Minimization) and its family, for PyTorch."""

from .core.objective import Objective as Objective
from .core.optimizer import SharpnessAware as SharpnessAware
from .core.refusal import Refusal as Refusal
from .core.vector import Vector as Vector
from .methods import METHODS as METHODS
from .methods.bsam import BSAM as BSAM
from .methods.sam import SAM as SAM

__version__ = "0.1.0"
