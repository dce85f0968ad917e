"""Methods with one radius, which may follow the learning rate."""

from __future__ import annotations

from typing import ClassVar, Unpack

from torch.optim import Optimizer

from .optimizer import Modules, SharpnessAware, StepOptions
from .schedule import LR_MAX, LR_MIN


class RadiusOptions(StepOptions, total=False):
    """The arguments that these methods share; see :class:`bsam.SAM`."""

    rho_floor: float | None
    lr_max: float | None
    lr_min: float


class ScheduledRadius(SharpnessAware):
    """A method with the radius ``rho``, which follows the learning rate if ``rho_floor`` is set."""

    scheduled_radii: ClassVar[dict[str, str]] = {"rho": "rho_floor"}

    def __init__(
        self,
        base: Optimizer,
        model: Modules,
        rho: float,
        *,
        rho_floor: float | None = None,
        lr_max: float | None = None,
        lr_min: float = 0.0,
        **options: Unpack[StepOptions],
    ) -> None:
        super().__init__(base, model, {"rho": rho, "rho_floor": rho_floor, LR_MAX: lr_max, LR_MIN: lr_min}, **options)
