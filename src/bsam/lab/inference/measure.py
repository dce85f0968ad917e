"""Take all flatness measurements of networks, and keep them in ``flatness.json``."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from ...common.checks import check_count, check_number, check_radius
from ...common.errors import BsamError, BsamRuntimeError
from ...core.undo import Undo
from ...flatness.dataset_loss import Batches, DatasetLoss, LossFunction, check_mode
from ...flatness.density import Density, spectral_density
from ...flatness.hessian import HessianOperator
from ...flatness.landscape import Landscape, check_grid, landscape
from ...flatness.products import Progress
from ...flatness.sharpness import Sharpness, sharpness
from ...flatness.spectrum import Eigenvalues, check_which, top_eigenvalues
from ...flatness.trace import LEAST_SAMPLES, Trace, trace
from ..common.files import MAX_TEXT, check_keys, read_bytes, reading, write_json
from ..common.progress import ProgressLine
from ..config import MAX_SEED
from ..training.environment import environment_info
from ..training.flatness_numbers import density_info, landscape_info, read_probe, spectrum_info
from ..training.run_dir import check_settings
from .subjects import MeasuredModels

T = TypeVar("T")
ProgressOfStage = Callable[[str, int, int], None]

MAX_POINTS = 1001  # about a million losses
ENTRY = (  # keys of each model in flatness.json
    *("file", "sha256", "parameters", "samples", "seconds"),
    *("sharpness", "trace", "eigenvalues", "density", "landscape"),
)
HINT = "remove flatness.json to measure again, or choose another folder"
LOSS_RTOL = 1e-6  # relative difference within which two losses count as equal


@dataclass(frozen=True)
class FlatnessSettings:
    """The settings of all measurements, checked before the first one.

    Args:
        k: the number of eigenvalues.
        which: which eigenvalues, as in :func:`bsam.flatness.top_eigenvalues`.
        tol: the relative tolerance of their residuals.
        trace_samples: the number of Hessian products for the trace.
        density_steps: the number of Lanczos steps from each random vector, for the density.
        density_probes: the number of random vectors for the density.
        span: the distance from the centre of the landscape to its edges, in units of the norm of the weights.
        points: the number of points along each axis of the landscape; odd.
        rho: the radius of the sharpness, uphill and downhill.
        mode: ``"eval"`` or ``"train"``: which statistics batch norm uses.
        micro_batch: the largest number of samples at a time; None takes batches as they are.
        max_bytes: memory for recorded Hessian products, as in :meth:`bsam.flatness.HessianOperator.linearized`.
        seed: the seed of all random vectors. Models of one architecture get the same landscape directions, up to the
            lengths of their filters.
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
        check_count("k", self.k)
        check_which(self.which)
        check_number("tol", self.tol, low=0)
        check_count("trace_samples", self.trace_samples, low=LEAST_SAMPLES["hutch++"])
        check_count("density_steps", self.density_steps)
        check_count("density_probes", self.density_probes)
        check_grid(self.span, check_count("points", self.points, high=MAX_POINTS))
        check_radius("rho", self.rho)
        check_mode(self.mode, self.micro_batch)
        if self.max_bytes is not None:
            check_count("max_bytes", self.max_bytes, low=0)
        check_count("seed", self.seed, low=0, high=MAX_SEED)  # as for runs


@dataclass(frozen=True)
class Measured:
    """All measurements of one network."""

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
    settings: FlatnessSettings,
    progress: ProgressOfStage | None = None,
) -> Measured:
    """Take all measurements of a network, and leave it unchanged.

    Args:
        model: the network.
        loss_fn: ``loss_fn(model(x), y)`` is the mean loss of a batch.
        data: the batches ``(x, y)``; iterated over many times, so not a generator.
        settings: what to measure, and how.
        progress: called with the name of a stage, the work done, and the total work expected.
    """
    seconds: dict[str, float] = {}
    common: Any = {"micro_batch": settings.micro_batch, "mode": settings.mode}

    def timed(stage: str, measurement: Callable[[Progress], T]) -> T:
        expected = 1

        def show(done: int, total: int) -> None:
            nonlocal expected
            expected = total
            if progress is not None:
                progress(stage, done, total)

        start = time.perf_counter()
        result = measurement(show)
        seconds[stage] = time.perf_counter() - start
        show(expected, expected)
        return result

    sharpness_values = timed(
        "sharpness", lambda _: sharpness(model, loss_fn, data, settings.rho, settings.rho, **common)
    )
    if not math.isfinite(sharpness_values.loss):
        raise BsamRuntimeError(f"the loss is {sharpness_values.loss}: there is nothing to measure")
    H = HessianOperator(model, loss_fn, data, **common)
    with H.linearized(settings.max_bytes):  # the next three share one recording
        top = timed(
            "eigenvalues",
            lambda show: top_eigenvalues(H, settings.k, settings.which, settings.tol, settings.seed, progress=show),
        )
        total = timed("trace", lambda show: trace(H, settings.trace_samples, settings.seed, progress=show))
        steps, probes = settings.density_steps, settings.density_probes
        density = timed("density", lambda show: spectral_density(H, steps, probes, settings.seed, progress=show))
    grid: Any = {"span": settings.span, "points": settings.points, "seed": settings.seed, **common}
    land = timed("landscape", lambda show: landscape(model, loss_fn, data, progress=show, **grid))
    assert H.loss.num_samples is not None  # they were counted
    return Measured(H.size, H.loss.num_samples, sharpness_values, top, total, density, land, seconds)


def loss_of(model: nn.Module, loss_fn: LossFunction, data: Batches, settings: FlatnessSettings) -> float:
    """Return the mean loss as :func:`measure` computes it, from one pass over the data."""
    L = DatasetLoss(model, loss_fn, data, settings.micro_batch, settings.mode)
    with Undo() as undo, undo:
        L.begin(undo)
        return L.value()[0]


def measured_entries(
    file: Path, settings: Mapping[str, Any], models: MeasuredModels, device: torch.device, options: FlatnessSettings
) -> list[dict[str, Any]]:
    """Return the entry of each model, from the file if the model has not changed, otherwise measured now.

    The file is written after each model, so that an interrupted report can continue.
    """
    known = _known(file, settings)
    entries: list[dict[str, Any]] = []
    with ProgressLine() as line:
        line.reach("models", 0, len(models.paths))
        for path in models.paths:
            with reading(models.weights(path), "give another file"):
                sha256 = hashlib.sha256(read_bytes(models.weights(path))).hexdigest()
            loaded = models.load(path, device)
            entry = next((old for old in known if (old["file"], old["sha256"]) == (str(path), sha256)), None)
            try:
                if entry is not None:
                    before, loss = entry["landscape"]["centre"], loss_of(*loaded, options)
                    if not math.isclose(loss, before, rel_tol=LOSS_RTOL):
                        changed = f"its loss was {before:.6g} and is {loss:.6g} now"
                        line.say(f"Measuring {path} again: {changed}. The loader or its data may have changed.")
                        entry = None
                if entry is None:
                    probe = {"probe": read_probe(path)} if (path / "probe.jsonl").exists() else {}
                    about = {**models.about(path), **probe, "architecture": _architecture(loaded[0])}
                    numbers = _numbers(measure(*loaded, options, line.reach), options.which)
                    entry = {"file": str(path), "sha256": sha256, **about, **numbers}
                    known = [*(old for old in known if old["file"] != str(path)), entry]
                    write_json(file, {"settings": settings, "environment": environment_info(), "models": known})
            except BsamError as error:
                raise BsamRuntimeError(f"{path}: {error}") from error
            entries.append(entry)
            line.reach("models", len(entries), len(models.paths))
    return entries


def _known(file: Path, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the entries of the file; raise if they were measured with other settings."""
    if not file.exists():
        return []
    with reading(file, HINT):
        content = json.loads(read_bytes(file, MAX_TEXT))
        theirs = dict(content["settings"])
    check_settings(file.parent, theirs, settings)
    with reading(file, HINT):
        for entry in content["models"]:
            check_keys(entry, ENTRY)
        return [_with_nan(entry) for entry in content["models"]]


def _with_nan(value: Any) -> Any:
    """Return values read from JSON with NaN for null, which stands for non-finite numbers."""
    if isinstance(value, dict):
        return {k: _with_nan(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_with_nan(v) for v in value]
    return math.nan if value is None else value


def _architecture(model: nn.Module) -> str:
    """Return a text that is equal for models whose class and whose parameters' names and shapes are equal."""
    shapes = [(name, tuple(p.shape)) for name, p in model.named_parameters() if p.requires_grad]
    return f"{type(model).__name__} {hashlib.sha256(repr(shapes).encode()).hexdigest()[:8]}"


def _numbers(measured: Measured, which: str) -> dict[str, Any]:
    """Return all numbers as plain values, from which the figures are drawn."""
    return {
        "parameters": measured.parameters,
        "samples": measured.samples,
        "seconds": dict(measured.seconds),
        "sharpness": asdict(measured.sharpness),
        "trace": asdict(measured.trace),
        "eigenvalues": spectrum_info(measured.eigenvalues, which),
        "density": density_info(measured.density),
        "landscape": landscape_info(measured.landscape),
    }
