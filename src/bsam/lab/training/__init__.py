"""Train one network: the settings, the training loop and the run directory."""

from ..config import Run as Run
from .machine import Machine as Machine
from .trainer import Diverged as Diverged
from .trainer import RunCallbacks as RunCallbacks
from .trainer import fit as fit
