"""Measuring networks that were saved: every instrument in one go, and the function that loads them."""

from __future__ import annotations

import copy
import importlib
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from numbers import Integral
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import torch
from torch import nn
from torch.utils._pytree import tree_map

from ..core.checks import check_count
from ..core.errors import BsamRuntimeError, BsamTypeError, BsamValueError
from ..flatness.dataset_loss import Batches, DatasetLoss, LossFunction
from ..flatness.density import Density, spectral_density
from ..flatness.hessian import HessianOperator
from ..flatness.landscape import Landscape, landscape
from ..flatness.products import Progress
from ..flatness.sharpness import Sharpness, sharpness
from ..flatness.spectrum import Eigenvalues, top_eigenvalues
from ..flatness.trace import Trace, trace
from ..training.config import MOST_SEED

Loaded: TypeAlias = tuple[nn.Module, LossFunction, Batches]
Found = TypeVar("Found")

MOST_POINTS = 1001  # a million losses
_ENOUGH = {"trace_samples": 30, "density_steps": 80, "density_probes": 4}  # to try settings with
STAGES = ("sharpness", "eigenvalues", "trace", "density", "landscape")


@dataclass(frozen=True)
class Instruments:
    """The settings of every instrument. What one of them would refuse is refused here: each is tried on a network of
    two weights.

    Args:
        k: how many eigenvalues.
        which: of them, as in :func:`bsam.flatness.top_eigenvalues`.
        tol: of their residuals, relative.
        trace_samples: products for the trace.
        density_steps: of Lanczos, for the density.
        density_probes: random vectors, for the density.
        span: how far the landscape reaches to either side, in units of the weights' filters.
        points: of each of its axes; odd.
        rho: the radius of sharpness, uphill and downhill.
        mode: ``"eval"`` or ``"train"``: which statistics batch norm uses.
        micro_batch: the most samples at a time; None takes batches as they come.
        max_bytes: memory for recorded Hessian products, as in :meth:`bsam.flatness.HessianOperator.linearized`.
        seed: of all random vectors: the same one gives models of one architecture the same landscape directions, up to
            the lengths of their filters.

    Example:
        >>> Instruments(points=20)
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
                check_count(name, value, low=0 if name == "seed" else 1, high=MOST_SEED)  # torch takes no larger ones
        check_count("points", self.points, high=MOST_POINTS)
        with torch.random.fork_rng(devices=[]):  # the caller's random numbers stay as they were
            model = nn.Linear(2, 1, bias=False)
        toy = copy.copy(self)  # with fewer samples: how many there are is not what an instrument refuses
        for name, most in _ENOUGH.items():
            if isinstance(value := getattr(self, name), Integral) and int(value) > most:
                object.__setattr__(toy, name, most)
        _take(model, nn.functional.mse_loss, [(torch.eye(2), torch.ones(2, 1))], toy, dims=1)

    def settings(self) -> dict[str, Any]:
        """All of it as plain values, for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Measured:
    """What all instruments found on one network."""

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
    instruments: Instruments,
    progress: Callable[[str, int, int], None] | None = None,
) -> Measured:
    """Every instrument on one network, which is afterwards as it was.

    Args:
        model: the network.
        loss_fn: ``loss_fn(model(x), y)`` is the mean loss of a batch.
        data: the batches ``(x, y)``, walked many times, so no generator.
        instruments: their settings.
        progress: called with the name of a stage, what of it is done, and what is expected in all.

    Example:
        >>> data = [(torch.eye(2), torch.zeros(2, 1))]
        >>> found = measure(nn.Linear(2, 1, bias=False), nn.functional.mse_loss, data, Instruments(points=3))  # L = (w1**2 + w2**2) / 2
        >>> found.eigenvalues.values.round(4), round(found.trace.value, 4), found.landscape.loss.shape
        (array([1., 1.]), 2.0, (3, 3))
    """
    return _take(model, loss_fn, data, instruments, dims=2, progress=progress)


def glance(model: nn.Module, loss_fn: LossFunction, data: Batches, instruments: Instruments) -> tuple[float, int]:
    """The mean loss and the number of samples, from one walk forward: what :func:`measure` finds as the centre of the
    landscape and as ``samples``.

    Example:
        >>> model = nn.Linear(1, 1, bias=False)
        >>> _ = nn.init.constant_(model.weight, 2.0)
        >>> glance(model, nn.functional.mse_loss, [(torch.ones(3, 1), torch.zeros(3, 1))], Instruments())
        (4.0, 3)
    """
    L = DatasetLoss(model, loss_fn, data, instruments.micro_batch, instruments.mode)
    with L.measuring():
        loss, _ = L.value()
    assert L.samples is not None  # it was walked
    return loss, L.samples


def _take(
    model: nn.Module,
    loss_fn: LossFunction,
    data: Batches,
    its: Instruments,
    dims: int,
    progress: Callable[[str, int, int], None] | None = None,
) -> Measured:
    seconds: dict[str, float] = {}

    def timed(stage: str, instrument: Callable[[Progress], Found]) -> Found:
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

    near = timed(
        "sharpness",
        lambda _: sharpness(model, loss_fn, data, its.rho, its.rho, micro_batch=its.micro_batch, mode=its.mode),
    )
    if not math.isfinite(near.loss):
        raise BsamRuntimeError(f"the loss is {near.loss}: there is nothing to measure")
    H = HessianOperator(model, loss_fn, data, its.micro_batch, its.mode)
    with H.linearized(its.max_bytes):  # one recording for all three
        top = timed("eigenvalues", lambda tell: top_eigenvalues(H, its.k, its.which, its.tol, its.seed, progress=tell))
        total = timed("trace", lambda tell: trace(H, its.trace_samples, its.seed, progress=tell))
        steps, probes = its.density_steps, its.density_probes
        density = timed("density", lambda tell: spectral_density(H, steps, probes, its.seed, progress=tell))
    land = timed(
        "landscape",
        lambda tell: landscape(
            model,
            loss_fn,
            data,
            its.span,
            its.points,
            dims,
            its.seed,
            micro_batch=its.micro_batch,
            mode=its.mode,
            progress=tell,
        ),
    )
    assert H.loss.samples is not None  # it was walked
    return Measured(H.size, H.loss.samples, near, top, total, density, land, seconds)


def loader(name: str) -> Callable[[Path], Any]:
    """The function that ``module:function`` names; the module may lie in the current folder.

    Example:
        >>> loader("math:load")
        Traceback (most recent call last):
        ...
        bsam.core.errors.BsamRuntimeError: the loader's module 'math' has no function 'load'
    """
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name or module_name.startswith("."):  # a relative one: relative to what?
        raise BsamValueError(f"the loader must be named as module:function, got {name!r}")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as missing:
        if missing.name is None or not f"{module_name}.".startswith(f"{missing.name}."):
            raise  # it is there, and lacks something else
        raise BsamRuntimeError(
            f"there is no module {missing.name!r} for the loader {name!r}, neither installed nor in {os.getcwd()}"
        ) from missing
    function = getattr(module, function_name, None)
    if not callable(function):
        raise BsamRuntimeError(f"the loader's module {module_name!r} has no function {function_name!r}")
    return function


def load(function: Callable[[Path], Any], path: Path, device: torch.device) -> Loaded:
    """What ``function(path)`` returns, if it is a model, a loss function and data; all of it on the device, also a loss
    that is a module.
    """
    found = function(path)
    if not isinstance(found, tuple) or len(found) != 3:
        got = f"{len(found)} values" if isinstance(found, tuple) else type(found).__name__
        raise BsamTypeError(f"the loader must return (model, loss_fn, data); for {path} it gave {got}")
    model, loss_fn, data = found
    wrong = {
        "model": not isinstance(model, nn.Module),
        "loss_fn": not callable(loss_fn),
        "data": not isinstance(data, Iterable),
    }
    for (name, is_wrong), value in zip(wrong.items(), found, strict=True):
        if is_wrong:
            raise BsamTypeError(
                "the loader must return (model, loss_fn, data): a torch.nn.Module, a function and batches; for "
                f"{path} it gave {name} as {type(value).__name__}"
            )
    if isinstance(data, Iterator):
        raise BsamRuntimeError(
            f"the loader's data is walked many times, and an iterator can be walked once only; for {path}: return a "
            "list or a DataLoader"
        )
    return model.to(device), loss_fn.to(device) if isinstance(loss_fn, nn.Module) else loss_fn, _Moved(data, device)


class _Moved:
    """Batches on a device, also the tensors inside of tuples, lists and dicts."""

    def __init__(self, data: Batches, device: torch.device) -> None:
        self.data, self.device = data, device

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        for batch in self.data:
            yield tree_map(self._to, batch)

    def _to(self, t: Any) -> Any:
        return t.to(self.device) if hasattr(t, "to") else t
