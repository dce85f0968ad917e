"""The networks that ``bsam flatness`` measures: files that a user's function loads, or run directories."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.utils._pytree import tree_map

from ...common.checks import check_count
from ...common.errors import BsamError, BsamTypeError, BsamValueError
from ...flatness.dataset_loss import Batches, LossFunction
from ..common.names import find_function, is_own
from ..config import Run, method_title
from ..tasks import TASKS, imported_task, named_task
from ..training.run_dir import CONFIG, NETWORK, OTHER_FOLDER, RunDir, check_named, run_dir_name

Loaded: TypeAlias = tuple[nn.Module, LossFunction, Batches]
IMAGES = 1000  # training samples of a run by default: the cost of a Hessian product is proportional to this


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
    """

    paths: Sequence[Path]
    titles: Sequence[str]
    settings: Mapping[str, Any]
    load: Callable[[Path, torch.device], Loaded]
    weights: Callable[[Path], Path] = lambda path: path
    about: Callable[[Path], dict[str, Any]] = lambda path: {}


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
    loader_name: str | None = None,
    images: int | None = None,
    data_dir: Path | None = None,
    cache_dir: Path | None = None,
    title_of: Callable[[Run], str] = method_title,
    data: Collection[str] = (),
    models: Collection[str] = (),
    tasks: Collection[str] = (),
) -> MeasuredModels:
    """Return the networks in files (with a loader) or in run directories, after checking all of them.

    Args:
        paths: the paths of files or of run directories.
        loader_name: for files: ``module:function``; ``function(path)`` returns ``(model, loss_fn, data)``.
        images: for run directories: number of training samples to measure on (all if fewer); None means 1000.
        data_dir: for run directories: the folder of the data, if it is read from files.
        cache_dir: for run directories: the folder for decoded image files.
        title_of: for run directories: returns the title of a run's method.
        data, models: for run directories: the data sets and networks that are ``MODULE:FUNCTION``, which run code of
            that module.
        tasks: for run directories: the tasks that are ``MODULE:CLASS``, which run code of that module, too.
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
        if loader_name is None:
            raise BsamValueError(
                f"{paths[0]} is a file: name the function that loads it with --loader MODULE:FUNCTION, or give a run "
                "directory of bsam train"
            )
        function = find_function(loader_name, "loader")
        titles = _titles(paths, [path.stem for path in paths])
        return MeasuredModels(paths, titles, {"loader": loader_name}, lambda path, device: load(function, path, device))
    if loader_name is not None:
        raise BsamValueError(f"{paths[0]} is a run directory, which needs no loader: leave --loader out, or give files")
    samples = check_count("images", IMAGES if images is None else images)
    names = []
    tasks = [named_task(task) for task in tasks]
    unused = {*data, *models, *tasks}
    for path in paths:
        task = RunDir(path).note("config", OTHER_FOLDER).get("task", Run.task.name)
        if task not in list(TASKS) and not is_own(task):
            raise BsamValueError(
                f"the task of the run in {path} must be one of {', '.join(TASKS)}; got {task!r}. Give its {NETWORK} "
                "and --loader instead"
            )
        run = RunDir(path).finished_run()
        check_named(run, path, data, models, tasks)
        unused -= {run.data, run.model, run.task.name}
        has_default_name = path.name == run_dir_name(run)  # which is too long for a title
        names.append(f"{title_of(run)}, seed {run.seed}" if has_default_name else path.name)
    if unused:
        what = "was trained on data (--data)" if min(unused) in data else "trained the network (--model)"
        what = "has the task (--task)" if min(unused) in tasks else what
        raise BsamValueError(f"none of the runs {what} {min(unused)}: leave it out")
    options = {"data_dir": data_dir, "cache_dir": cache_dir}
    data_folders = {name: path for name, path in options.items() if path is not None}
    return MeasuredModels(
        paths,
        _titles(paths, names),
        {"images": samples},
        load=lambda path, device: load_run(path, samples, device, data, models, tasks, **data_folders),
        weights=lambda path: path / NETWORK,
        about=_about,
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
    data: Collection[str] = (),
    models: Collection[str] = (),
    tasks: Collection[str] = (),
    **data_folders: Path,
) -> Loaded:
    """Return the trained network of a run, its loss without label smoothing, and at most ``images`` training samples.

    The samples are not augmented and have the labels used in training; they are balanced over the classes, or, for
    pose, evenly spaced in the training data. The scales of a quantized network are fixed.
    """
    run = RunDir(folder).run()
    check_named(run, folder, data, models, tasks)
    kind: Any = imported_task(run)
    task = kind(run, device, **data_folders)
    network = task.measured_network(RunDir(folder).load_into(task.network()))
    return network, task.loss, task.examples(images)


def load(function: Callable[[Path], Any], path: Path, device: torch.device) -> Loaded:
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
        self.data, self.device = data, device

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        for batch in self.data:
            yield tree_map(lambda t: t.to(self.device) if hasattr(t, "to") else t, batch)
