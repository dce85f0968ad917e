"""Train one network: the settings, the training loop and the run directory."""

from ..tasks import Task as Task
from .config import Run as Run
from .known_settings import FINE_TUNING as FINE_TUNING
from .known_settings import POSE as POSE
from .loop import fit as fit
