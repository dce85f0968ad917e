"""Train one network: the settings, the training loop and the run directory."""

from ..tasks import Task as Task
from .config import FINE_TUNING as FINE_TUNING
from .config import POSE as POSE
from .config import Run as Run
from .loop import fit as fit
