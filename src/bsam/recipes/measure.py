"""Measure the flatness of a network, with every instrument."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from numbers import Integral
from typing import Any, TypeVar

import torch
from torch import nn

from ..core.checks import check_count
from ..core.errors import BsamRuntimeError
from ..flatness.dataset_loss import Batches, DatasetLoss, LossFunction
from ..flatness.density import Density, spectral_density
from ..flatness.hessian import HessianOperator
from ..flatness.landscape import Landscape, landscape
from ..flatness.products import Progress
from ..flatness.sharpness import Sharpness, sharpness
from ..flatness.spectrum import Eigenvalues, top_eigenvalues
from ..flatness.trace import Trace, trace
from ..training.config import MAX_SEED

T = TypeVar("T")
ProgressOfStage = Callable[[str, int, int], None]

MAX_POINTS = 1001  # a million losses
_ENOUGH = {"trace_samples": 30, "density_steps": 80, "density_probes": 4}  # to try settings with
STAGES = ("sharpness", "eigenvalues", "trace", "density", "landscape")


@dataclass(frozen=True)
class FlatnessSettings:
    """The settings of every instrument. Invalid ones are refused here: each instrument is tried on a small network.

    Args:
        k: the number of eigenvalues.
        which: of them, as in :func:`bsam.flatness.top_eigenvalues`.
        tol: the relative tolerance of their residuals.
        trace_samples: Hessian products for the trace.
        density_steps: Lanczos steps for the density, from each random vector.
        density_probes: random vectors for the density.
        span: how far the landscape reaches to either side, 1 being the length of the weights.
        points: along each axis of the landscape; odd.
        rho: the radius of sharpness, uphill and downhill.
        mode: ``"eval"`` or ``"train"``: which statistics batch norm uses.
        micro_batch: the largest number of samples at a time; None takes batches as they are.
        max_bytes: memory for recorded Hessian products, as in :meth:`bsam.flatness.HessianOperator.linearized`.
        seed: of all random vectors. Models of one architecture get the same landscape directions, up to the lengths of
            their filters.

    Example:
        >>> FlatnessSettings(points=20)
        Traceback (most recent call last):
        ...
        bsam.core.errors.BsamValueError: points must be odd, so that the model is at the centre of the grid; got 20
    """

    k: int = 50
    which: str = "largest"
    tol: float = 1e-4
    trace_samples: int = 30
    density_steps: int = 80
    density_probes: int = 4
    span: float = 1.0
    points: int = 21
    rho: float = 0.05
    mode: str = "eval"
    micro_batch: int | None = None
    max_bytes: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("seed", "micro_batch"):
            if (value := getattr(self, name)) is not None:
                check_count(name, value, low=0 if name == "seed" else 1, high=MAX_SEED)  # torch takes no larger ones
        check_count("points", self.points, high=MAX_POINTS)
        with torch.random.fork_rng(devices=[]):  # the caller's random numbers stay as they were
            model = nn.Linear(2, 1, bias=False)
        toy = copy.copy(self)  # with fewer samples: no instrument refuses a large number of them
        for name, most in _ENOUGH.items():
            if isinstance(value := getattr(self, name), Integral) and int(value) > most:
                object.__setattr__(toy, name, most)
        _take(model, nn.functional.mse_loss, [(torch.eye(2), torch.ones(2, 1))], toy, dims=1)

    def settings(self) -> dict[str, Any]:
        """Return the settings as plain values, for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Measured:
    """The results of all instruments for one network."""

    parameters: int
    samples: int
    sharpness: Sharpness
    eigenvalues: Eigenvalues
    trace: Trace
    density: Density
    landscape: Landscape
    seconds: Mapping[str, float]  # by stage


def measure(
    model: nn.Module,
    loss_fn: LossFunction,
    data: Batches,
    instruments: FlatnessSettings,
    progress: ProgressOfStage | None = None,
) -> Measured:
    """Measure one network with every instrument, and leave it as it was.

    Args:
        model: the network.
        loss_fn: ``loss_fn(model(x), y)`` is the mean loss of a batch.
        data: the batches ``(x, y)``; iterated over many times, so not a generator.
        instruments: their settings.
        progress: called with the name of a stage, the work done in it, and the work expected in all.

    Example:
        >>> data = [(torch.eye(2), torch.zeros(2, 1))]
        >>> model = nn.Linear(2, 1, bias=False)  # L = (w1**2 + w2**2) / 2
        >>> found = measure(model, nn.functional.mse_loss, data, FlatnessSettings(points=3))
        >>> (
        ...     found.eigenvalues.values.round(4),
        ...     round(found.trace.value, 4),
        ...     found.landscape.loss.shape,
        ... )
        (array([1., 1.]), 2.0, (3, 3))
    """
    return _take(model, loss_fn, data, instruments, dims=2, progress=progress)


def loss_and_samples(
    model: nn.Module, loss_fn: LossFunction, data: Batches, instruments: FlatnessSettings
) -> tuple[float, int]:
    """Return the mean loss and the number of samples, from one pass over the data: as :func:`measure` finds them.

    Example:
        >>> model = nn.Linear(1, 1, bias=False)
        >>> _ = nn.init.constant_(model.weight, 2.0)
        >>> loss_and_samples(
        ...     model,
        ...     nn.functional.mse_loss,
        ...     [(torch.ones(3, 1), torch.zeros(3, 1))],
        ...     FlatnessSettings(),
        ... )
        (4.0, 3)
    """
    L = DatasetLoss(model, loss_fn, data, instruments.micro_batch, instruments.mode)
    with L.measuring():
        loss, _ = L.value()
    assert L.num_samples is not None  # they were counted
    return loss, L.num_samples


def _take(
    model: nn.Module,
    loss_fn: LossFunction,
    data: Batches,
    its: FlatnessSettings,
    dims: int,
    progress: ProgressOfStage | None = None,
) -> Measured:
    seconds: dict[str, float] = {}
    common: Any = {"micro_batch": its.micro_batch, "mode": its.mode}

    def timed(stage: str, instrument: Callable[[Progress], T]) -> T:
        expected = 1

        def tell(done: int, total: int) -> None:
            nonlocal expected
            expected = total
            if progress is not None:
                progress(stage, done, total)

        start = time.perf_counter()
        found = instrument(tell)
        seconds[stage] = time.perf_counter() - start
        tell(expected, expected)
        return found

    near = timed("sharpness", lambda _: sharpness(model, loss_fn, data, its.rho, its.rho, **common))
    if not math.isfinite(near.loss):
        raise BsamRuntimeError(f"the loss is {near.loss}: there is nothing to measure")
    H = HessianOperator(model, loss_fn, data, **common)
    with H.linearized(its.max_bytes):  # one recording for all three
        top = timed("eigenvalues", lambda tell: top_eigenvalues(H, its.k, its.which, its.tol, its.seed, progress=tell))
        total = timed("trace", lambda tell: trace(H, its.trace_samples, its.seed, progress=tell))
        steps, probes = its.density_steps, its.density_probes
        density = timed("density", lambda tell: spectral_density(H, steps, probes, its.seed, progress=tell))
    where = (its.span, its.points, dims, its.seed)
    land = timed("landscape", lambda tell: landscape(model, loss_fn, data, *where, progress=tell, **common))
    assert H.loss.num_samples is not None  # they were counted
    return Measured(H.size, H.loss.num_samples, near, top, total, density, land, seconds)
