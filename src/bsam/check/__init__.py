"""The check behind ``optimizer.check``, which finds silent mistakes in a training loop."""

from ..core.optimizer import SharpnessAware as SharpnessAware
from .loop_check import check_loop

SharpnessAware.check = check_loop
