"""Train one network: the settings, the training loop and the run directory."""

from ..config import Run as Run
from .loop import fit as fit
