"""Train one network: the settings, the training loop and the run directory."""

from ..config import Run as Run
from .loop import Diverged as Diverged
from .loop import RunCallbacks as RunCallbacks
from .loop import fit as fit
from .machine import Machine as Machine
