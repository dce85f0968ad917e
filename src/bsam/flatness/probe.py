"""Measure sharpness during training, from the passes that the method makes anyway."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..common.checks import check_count, check_radius
from ..core.objective import Evaluation, Objective
from ..core.optimizer import SharpnessAware
from ..core.undo import Undo
from ..core.vector import TINY, Coefficient, PerGroup, Vector, ratio

DISPLACEMENT_RTOL = 1e-4  # relative distance within which two displacements count as equal


@dataclass(frozen=True)
class Reading:
    """Sharpness on one mini-batch, three gradient norms, and the cosine between g and g_min.

    MaxS is the rise of the loss uphill, MinS its fall downhill, and BilS their sum.

    If parameter groups have different radii, ``rho_max`` and ``rho_min`` are the lengths of the two displacements.
    """

    step: int
    loss: float
    max_sharpness: float
    min_sharpness: float
    bilateral: float
    g_norm: float
    g_max_norm: float
    g_min_norm: float
    cosine: float
    rho_max: float
    rho_min: float
    extra_passes: int

    def __repr__(self) -> str:
        sizes = f"MaxS {self.max_sharpness:.4g}, MinS {self.min_sharpness:.4g}, BilS {self.bilateral:.4g}"
        return f"Reading(step {self.step}, loss {self.loss:.4g}, {sizes}, cosine {self.cosine:.4g})"


class Probe:
    """Measures sharpness every few steps of training, at each ``backward`` call in such a step.

    BSAM already evaluates all the points needed, so the probe costs no extra pass. If a method lacks a point (SAM never
    goes downhill), the probe evaluates it on the same batch. Random numbers, batch-norm statistics and the step itself
    are the same as without the probe. Under DDP and FSDP, attach a probe on every rank; each measures the batch of all
    ranks. With ``m_sharpness``, where each rank perturbs separately, each measures its part of the batch.

    Args:
        every: number of steps between readings.
        rho_max: the radius uphill; None uses the method's radius (0.05 if it has none).
        rho_min: the radius downhill; None uses the method's ``rho_min``, or the radius uphill if it has none.

    Example:
        >>> import bsam, torch
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = bsam.BSAM(torch.optim.SGD(model.parameters(), lr=0.1), model)
        >>> probe = Probe(every=5).attach(optimizer)
        >>> x, y = torch.randn(8, 3), torch.randn(8, 1)
        >>> for _ in range(10):
        ...     _ = optimizer.step(lambda: torch.nn.functional.mse_loss(model(x), y))
        >>> [(reading.step, reading.extra_passes) for reading in probe.readings]
        [(0, 0), (5, 0)]
    """

    def __init__(self, every: int = 10, rho_max: float | None = None, rho_min: float | None = None) -> None:
        for name, rho in (("rho_max", rho_max), ("rho_min", rho_min)):
            if rho is not None:
                check_radius(name, rho)
        self.every = check_count("every", every)
        self.rho_max = rho_max
        self.rho_min = rho_min
        self.readings: list[Reading] = []

    def attach(self, optimizer: SharpnessAware) -> Probe:
        """Start measuring the steps of an optimizer, and return the probe."""
        optimizer.observers.append(self)
        return self

    def due(self, step: int) -> bool:
        """Return whether this step is measured."""
        return step % self.every == 0

    def observe(self, optimizer: SharpnessAware, L: Objective) -> None:
        """Measure a step; called after the method's passes, with their evaluations. Steps before ``start`` are not
        measured, since their radii are 0.
        """
        if optimizer.steps_since_start < 0:
            return
        passes = len(L.evaluations)
        with Undo() as undo, undo:
            undo.restore_random_states({p.device for p in optimizer.params})
            here = _evaluation(L, None)
            g = here.gradient
            top = self.rho_max if self.rho_max is not None else _radius(optimizer, ("rho_max", "rho"), 0.05)
            low = self.rho_min if self.rho_min is not None else _radius(optimizer, ("rho_min",), top)
            length = optimizer.counted(g).norm() + TINY
            uphill, downhill = g * top / length, -(g * low / length)
            up, down = (_evaluation(L, at) for at in (uphill, downhill))
        loss, loss_max, loss_min = optimizer.mean_losses([float(e.loss) for e in (here, up, down)])
        n, n_max, n_min = (float(e.gradient.norm()) for e in (here, up, down))
        cosine = min(max(float(ratio(g.dot(down.gradient), n * n_min)), -1.0), 1.0)
        reading = Reading(
            step=optimizer.t,
            loss=loss,
            max_sharpness=loss_max - loss,
            min_sharpness=loss - loss_min,
            bilateral=loss_max - loss_min,
            g_norm=n,
            g_max_norm=n_max,
            g_min_norm=n_min,
            cosine=cosine,
            rho_max=float(uphill.norm() if isinstance(top, PerGroup) else top),
            rho_min=float(downhill.norm() if isinstance(low, PerGroup) else low),
            extra_passes=len(L.evaluations) - passes,
        )
        self.readings.append(reading)

    def __iter__(self) -> Iterator[Reading]:
        return iter(self.readings)

    def __repr__(self) -> str:
        return f"Probe(every={self.every}, {len(self.readings)} readings)"


def _radius(optimizer: SharpnessAware, names: tuple[str, ...], default: Coefficient) -> Coefficient:
    return next((optimizer.radii(name) for name in names if name in optimizer.settings), default)


def _evaluation(L: Objective, at: Vector | None) -> Evaluation:
    """Return the evaluation at this displacement; run a pass if there is none."""
    for past in L.evaluations:
        if past.at is None or at is None:
            same = past.at is at
        else:
            same = bool((past.at - at).norm() <= DISPLACEMENT_RTOL * at.norm())
        if same:
            return past
    L.value_and_grad(at)
    return L.evaluations[-1]
