"""Train into flat minima: BSAM (*Bilateral* Sharpness-Aware Minimization) and its family, for PyTorch."""

from .core.refusal import Refusal as Refusal
from .methods.bsam import BSAM as BSAM
from .methods.sam import SAM as SAM

__version__ = "0.1.0"
