"""Measure how flat the minima of trained networks are, and keep the numbers in ``flatness.json``."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import torch
from torch import nn
from torch.utils._pytree import tree_map

from ...common.checks import check_count, check_radius
from ...common.errors import BsamError, BsamRuntimeError, BsamTypeError, BsamValueError
from ...core.undo import Undo
from ...flatness.dataset_loss import Batches, DatasetLoss, LossFunction, check_mode
from ...flatness.density import spectral_density
from ...flatness.hessian import HessianOperator
from ...flatness.landscape import check_grid, landscape
from ...flatness.products import Progress
from ...flatness.sharpness import sharpness
from ...flatness.spectrum import WHICH, check_which, top_eigenvalues
from ...flatness.trace import LEAST_SAMPLES, trace
from ..common.files import MAX_TEXT, check_keys, read_bytes, reading, write_json
from ..common.names import find_function, is_own
from ..common.progress import ProgressLine
from ..config import MAX_SEED, NOT_NEGATIVE, Run, Settings, method_title, setting
from ..tasks import TASKS, Task, named_task, task_of
from ..training.flatness_numbers import density_info, landscape_info, read_probe, spectrum_info
from ..training.machine import environment_info
from ..training.run_dir import (
    CONFIG,
    NETWORK,
    OTHER_FOLDER,
    RunDir,
    check_all_used,
    check_named,
    check_settings,
    run_dir_name,
)

T = TypeVar("T")
ProgressOfStage: TypeAlias = Callable[[str, int, int], None]
Loaded: TypeAlias = tuple[nn.Module, LossFunction, Batches]
Loader: TypeAlias = Callable[[Path], Any]

IMAGES = 1000  # training samples of a run by default: the cost of a Hessian product is proportional to this
MAX_SURFACE_POINTS = 1001  # about a million losses
ENTRY = (  # keys of each model in flatness.json
    *("file", "sha256", "parameters", "samples", "seconds"),
    *("sharpness", "trace", "eigenvalues", "density", "landscape"),
)
MEASURE_AGAIN_HINT = "remove flatness.json to measure again, or choose another folder"
EQUAL_LOSS_RTOL = 1e-6  # relative difference within which two losses count as equal


@dataclass(frozen=True)
class FlatnessSettings(Settings):
    """The settings of all measurements, which are flags of `bsam flatness`."""

    k: int = setting(50, "number of eigenvalues")
    which: str = setting(
        "largest", f"which eigenvalues: {', '.join(WHICH)}", check=lambda name, value: check_which(value)
    )
    tol: float = setting(1e-4, "relative tolerance of the eigenvalues' residuals", check=NOT_NEGATIVE)
    trace_samples: int = setting(
        30, "number of Hessian-vector products for the trace", check=partial(check_count, low=LEAST_SAMPLES["hutch++"])
    )
    density_steps: int = setting(80, "number of Lanczos steps per random vector, for the density")
    density_probes: int = setting(4, "number of random vectors for the density")
    span: float = setting(1.0, "distance from the centre of the landscape to its edges; 1 is the norm of the weights")
    points: int = setting(
        21,
        "number of points along each axis of the landscape; must be odd",
        check=partial(check_count, high=MAX_SURFACE_POINTS),
    )
    rho: float = setting(0.05, "radius of the sharpness", check=check_radius)
    mode: str = setting("eval", "mode of batch norm: eval uses its running statistics, train those of each batch")
    micro_batch: int | None = setting(None, "largest number of samples per pass, to save memory")
    max_bytes: int | None = setting(
        None,
        "memory for recording Hessian-vector products, which halves their time; 0 disables recording (default: a part "
        "of the free memory)",
        check=partial(check_count, low=0),
    )
    seed: int = setting(0, "seed of all random vectors", check=partial(check_count, low=0, high=MAX_SEED))

    def __post_init__(self) -> None:
        super().__post_init__()
        check_grid(self.span, self.points)
        check_mode(self.mode, self.micro_batch)


# ---- the networks


@dataclass(frozen=True)
class MeasuredModels:
    """The networks that ``bsam flatness`` measures.

    Args:
        paths: the paths of files or of run directories.
        titles: their titles in tables and figures.
        settings: plain values that must be equal for two measurements to be comparable.
        load: returns the network, its loss and its data, on a device.
        weights: returns the file whose content tells whether a network has changed.
        about: returns further values to record with the numbers.
        warning: returns a sentence if a network that was loaded may not be the trained one.
    """

    paths: Sequence[Path]
    titles: Sequence[str]
    settings: Mapping[str, Any]
    load: Callable[[Path, torch.device], Loaded]
    weights: Callable[[Path], Path] = lambda path: path
    about: Callable[[Path], dict[str, Any]] = lambda path: {}
    warning: Callable[[Path], str | None] = lambda path: None


def runs_in_folders(paths: Sequence[Path], on_message: Callable[[str], None]) -> list[Path]:
    """Return the paths, with the finished runs in each folder of run directories instead of the folder.

    Tuning runs are left out, as in reports.

    Args:
        paths: the paths of files, run directories or folders with run directories at any depth.
        on_message: called with a sentence for each other run that is left out.
    """
    expanded: list[Path] = []
    for path in paths:
        folders = sorted(file.parent for file in path.rglob(CONFIG)) if path.is_dir() else []
        if not folders or path in folders:
            expanded.append(path)
            continue
        finished: list[Path] = []
        for folder in folders:
            try:
                RunDir(folder).finished_run()
                is_trial = (RunDir(folder).about() or {}).get("trial")
            except BsamError as error:
                on_message(f"Left out: {error}.")
                continue
            if not is_trial:
                finished.append(folder)
        if not finished:
            raise BsamValueError(f"{path} has no finished runs: train one first")
        expanded += finished
    return expanded


def find_models(
    paths: Sequence[Path],
    loader: str | Loader | None = None,
    images: int | None = None,
    data_dir: Path | None = None,
    cache_dir: Path | None = None,
    title_of: Callable[[Run], str] = method_title,
    data: Collection[str | Callable[..., Any]] = (),
    models: Collection[str | Callable[..., nn.Module]] = (),
    tasks: Collection[str | type[Task]] = (),
) -> MeasuredModels:
    """Return the networks in files (with a loader) or in run directories, after checking all of them.

    Args:
        paths: the paths of files or of run directories.
        loader: for files: a function, or its name ``module:function``; ``function(path)`` returns ``(model, loss_fn,
            data)``.
        images: for run directories: number of training samples to measure on (all if fewer); None means 1000.
        data_dir: for run directories: the folder of the data, if it is read from files.
        cache_dir: for run directories: the folder for decoded image files.
        title_of: for run directories: returns the title of a run's method.
        data, models: for run directories: the data sets and networks that are functions of yours, or
            ``MODULE:FUNCTION``, which run code of that module.
        tasks: for run directories: the tasks that are classes of yours, or ``MODULE:CLASS``, which run code of that
            module, too.
    """
    paths = list(dict.fromkeys(path if path.name not in ("", "..") else path.resolve() for path in paths))
    missing = [path for path in paths if not path.exists()]
    if missing:
        raise BsamValueError(f"there is no run directory or file {missing[0]}: check its name")
    folders = [path for path in paths if path.is_dir()]
    if folders and len(folders) < len(paths):
        file = next(path for path in paths if path not in folders)
        raise BsamValueError(f"{folders[0]} is a folder, but {file} is not: measure them in two calls")
    if not folders:
        if data or models or tasks or images is not None or data_dir is not None or cache_dir is not None:
            raise BsamValueError(
                "the loader decides which network is measured, and on which data: leave --images, --data, --model, "
                "--task, --data-dir and --cache-dir out"
            )
        if loader is None:
            raise BsamValueError(
                f"{paths[0]} is a file: name the function that loads it with --loader MODULE:FUNCTION, or give a run "
                "directory of bsam train"
            )
        function = find_function(loader, "loader") if isinstance(loader, str) else loader
        name = loader if isinstance(loader, str) else f"{loader.__module__}:{loader.__qualname__}"
        titles = _titles(paths, [path.stem for path in paths])
        return MeasuredModels(paths, titles, {"loader": name}, lambda path, device: load(function, path, device))
    if loader is not None:
        raise BsamValueError(f"{paths[0]} is a run directory, which needs no loader: leave --loader out, or give files")
    samples = check_count("images", IMAGES if images is None else images)
    names = []
    named = [named_task(task) for task in tasks]
    runs: dict[Path, Run] = {}
    for path in paths:
        task = RunDir(path).note("config", OTHER_FOLDER).get("task", Run.task.name)
        if task not in list(TASKS) and not is_own(task):
            raise BsamValueError(
                f"the task of the run in {path} must be one of {', '.join(TASKS)}; got {task!r}. Give its {NETWORK} "
                "and --loader instead"
            )
        run = RunDir(path).finished_run()
        check_named(run, path, data, models, named)
        runs[path] = run
        has_default_name = path.name == run_dir_name(run)  # which is too long for a title
        names.append(f"{title_of(run)}, seed {run.seed}" if has_default_name else path.name)
    check_all_used(runs, data, models, named)
    options = {"data_dir": data_dir, "cache_dir": cache_dir}
    data_folders = {name: path for name, path in options.items() if path is not None}
    return MeasuredModels(
        paths,
        _titles(paths, names),
        {"images": samples},
        load=lambda path, device: load_run(path, samples, device, data, models, named, **data_folders),
        weights=lambda path: path / NETWORK,
        about=_about,
        warning=lambda path: RunDir(path).stale_code(runs[path]),
    )


def _about(path: Path) -> dict[str, Any]:
    """Return what is recorded of a run: the name that its settings give its directory, the settings, its metrics."""
    run = RunDir(path).run()
    return {"run_dir": run_dir_name(run), "run": run.settings(), "metrics": RunDir(path).last_metrics()}


def _titles(paths: Sequence[Path], names: Sequence[str]) -> list[str]:
    """Return the names, or the whole paths if two names are equal."""
    return list(names) if len(set(names)) == len(paths) else list(map(str, paths))


def load_run(
    folder: Path,
    images: int,
    device: torch.device,
    data: Collection[str | Callable[..., Any]] = (),
    models: Collection[str | Callable[..., nn.Module]] = (),
    tasks: Collection[str | type[Task]] = (),
    **data_folders: Path,
) -> Loaded:
    """Return the trained network of a run, its loss without label smoothing, and at most ``images`` training samples.

    The samples are not augmented and have the labels used in training; they are balanced over the classes, or, for
    pose, evenly spaced in the training data. The scales of a quantized network are fixed.
    """
    named = [named_task(task) for task in tasks]
    run = RunDir(folder).run()
    check_named(run, folder, data, models, named)
    kind: Any = task_of(run)
    task = kind(run, device, **data_folders)
    network = task.measured_network(RunDir(folder).load_into(task.network()))
    return network, task.loss, task.examples(images)


def load(function: Loader, path: Path, device: torch.device) -> Loaded:
    """Return the model, the loss function and the data that ``function(path)`` returns, on the device."""
    loaded = function(path)
    if not isinstance(loaded, tuple) or len(loaded) != 3 or not isinstance(loaded[0], nn.Module):
        raise BsamTypeError(
            "the loader must return (model, loss_fn, data): a torch.nn.Module, a function, and a list or DataLoader; "
            f"for {path} it returned {type(loaded).__name__}"
        )
    model, loss_fn, data = loaded
    loss_fn = loss_fn.to(device) if isinstance(loss_fn, nn.Module) else loss_fn
    return model.to(device), loss_fn, _BatchesOnDevice(data, device)


class _BatchesOnDevice:
    """Batches on a device, including tensors inside tuples, lists and dicts."""

    def __init__(self, data: Batches, device: torch.device) -> None:
        self.data = data
        self.device = device

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        for batch in self.data:
            yield tree_map(lambda t: t.to(self.device) if hasattr(t, "to") else t, batch)


# ---- the measurements


def measure(
    model: nn.Module,
    loss_fn: LossFunction,
    data: Batches,
    settings: FlatnessSettings,
    progress: ProgressOfStage | None = None,
) -> dict[str, Any]:
    """Take all measurements of a network, and leave it unchanged; return the numbers of its entry.

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

    near = timed("sharpness", lambda _: sharpness(model, loss_fn, data, settings.rho, settings.rho, **common))
    if not math.isfinite(near.loss):
        raise BsamRuntimeError(f"the loss is {near.loss}: there is nothing to measure")
    H = HessianOperator(model, loss_fn, data, **common)
    with H.linearized(settings.max_bytes):  # the next three share one recording
        top = timed(
            "eigenvalues",
            lambda show: top_eigenvalues(H, settings.k, settings.which, settings.tol, settings.seed, progress=show),
        )
        total = timed("trace", lambda show: trace(H, settings.trace_samples, settings.seed, progress=show))
        steps = settings.density_steps
        probes = settings.density_probes
        density = timed("density", lambda show: spectral_density(H, steps, probes, settings.seed, progress=show))
    grid: Any = {"span": settings.span, "points": settings.points, "seed": settings.seed, **common}
    land = timed("landscape", lambda show: landscape(model, loss_fn, data, progress=show, **grid))
    return {
        "parameters": H.size,
        "samples": H.loss.num_samples,
        "seconds": seconds,
        "sharpness": asdict(near),
        "trace": asdict(total),
        "eigenvalues": spectrum_info(top, settings.which),
        "density": density_info(density),
        "landscape": landscape_info(land),
    }


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
            if (warning := models.warning(path)) is not None:
                line.say(warning)
            entry = next((old for old in known if (old["file"], old["sha256"]) == (str(path), sha256)), None)
            try:
                if entry is not None:
                    before = entry["landscape"]["centre"]
                    loss = loss_of(*loaded, options)
                    if not math.isclose(loss, before, rel_tol=EQUAL_LOSS_RTOL):
                        changed = f"its loss was {before:.6g} and is {loss:.6g} now"
                        line.say(f"Measuring {path} again: {changed}. The loader or its data may have changed.")
                        entry = None
                if entry is None:
                    probe = {"probe": read_probe(path)} if (path / "probe.jsonl").exists() else {}
                    about = {**models.about(path), **probe, "architecture": _architecture(loaded[0])}
                    numbers = measure(*loaded, options, line.reach)
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
    with reading(file, MEASURE_AGAIN_HINT):
        content = json.loads(read_bytes(file, MAX_TEXT))
        theirs = dict(content["settings"])
    check_settings(file.parent, theirs, settings)
    with reading(file, MEASURE_AGAIN_HINT):
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
