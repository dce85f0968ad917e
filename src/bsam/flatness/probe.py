"""Sharpness during training, from the passes that the method makes anyway."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..core.checks import check_count, check_radius
from ..core.objective import Evaluation, Objective
from ..core.optimizer import SharpnessAware
from ..core.vector import TINY, Coefficient, PerGroup, Vector, ratio

SAME = 1e-4  # relative distance within which two displacements count as one


@dataclass(frozen=True)
class Reading:
    """What was seen in one step, of its mini-batch: the loss, MaxS, MinS, BilS, the three gradient norms, the cosine of
    g and g_min, and the radii.

    Where groups have radii of their own, ``rho_max`` and ``rho_min`` are the lengths of the two displacements that
    follow from them.
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


class Probe:
    """Reads MaxS, MinS, BilS, gradient norms and the cosine of g and g_min every few steps; of a step of several
    ``backward`` calls, each of them.

    BSAM computes all of it anyway, and the probe costs no pass. Where a method lacks a point (SAM never goes downhill),
    the probe evaluates it, on the same batch; random numbers, statistics of batch norm and the step itself stay what
    they would have been without it. Under DDP and FSDP every rank has a probe, and all of them read the batch of all
    ranks; with ``m_sharpness``, where each rank perturbs on its own, their own part of it.

    Args:
        every: how many steps lie between two readings.
        rho_max: the radius uphill; None takes the method's own (0.05 if it has none).
        rho_min: the radius downhill; None takes the method's own, or that of ``rho_max``.

    Example:
        >>> import bsam
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
        self.every, self.rho_max, self.rho_min = check_count("every", every), rho_max, rho_min
        self.readings: list[Reading] = []

    def attach(self, optimizer: SharpnessAware) -> Probe:
        """Let the optimizer show its passes to this probe from now on."""
        optimizer.observers.append(self)
        return self

    def due(self, step: int) -> bool:
        """Whether this step is to be read."""
        return step % self.every == 0

    def observe(self, optimizer: SharpnessAware, L: Objective) -> None:
        """Read a step: called once the method has made its passes, with all that they saw."""
        passes = len(L.evaluations)
        with torch.random.fork_rng(devices=sorted({p.device.index for p in optimizer.params if p.is_cuda})):
            here = next((e for e in L.evaluations if e.at is None), None) or _evaluated(L, None)
            g = here.gradient
            top = self.rho_max if self.rho_max is not None else _own(optimizer, ("rho_max", "rho"), 0.05)
            low = self.rho_min if self.rho_min is not None else _own(optimizer, ("rho_min",), top)
            uphill, downhill = (g * rho / (g.norm() + TINY) for rho in (top, low))
            up, down = (
                _found(L.evaluations, uphill) or _evaluated(L, uphill),
                _found(L.evaluations, -downhill) or _evaluated(L, -downhill),
            )
        loss, loss_max, loss_min = optimizer.mean_losses([float(e.loss) for e in (here, up, down)])
        n, n_max, n_min = (float(e.gradient.norm()) for e in (here, up, down))
        cosine = min(max(float(ratio(g.dot(down.gradient), n * n_min)), -1.0), 1.0)
        sharpness = loss_max - loss, loss - loss_min, loss_max - loss_min
        rho_max, rho_min = (
            float(e.norm()) if isinstance(rho, PerGroup) else float(rho) for rho, e in ((top, uphill), (low, downhill))
        )
        self.readings.append(
            Reading(
                optimizer.t, loss, *sharpness, n, n_max, n_min, cosine, rho_max, rho_min, len(L.evaluations) - passes
            )
        )

    def __iter__(self) -> Iterator[Reading]:
        return iter(self.readings)


def _own(optimizer: SharpnessAware, names: tuple[str, ...], default: Coefficient) -> Coefficient:
    return next((optimizer.radii(name) for name in names if name in optimizer.settings), default)


def _evaluated(L: Objective, at: Vector | None) -> Evaluation:
    L.value_and_grad(at)
    return L.evaluations[-1]


def _found(seen: list[Evaluation], at: Vector) -> Evaluation | None:
    """The evaluation there, if the method made it."""
    return next((e for e in seen if e.at is not None and bool((e.at - at).norm() <= SAME * at.norm())), None)
