"""Networks to measure: files that a loader reads, or folders that ``bsam train`` left behind."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..core.checks import check_count
from ..core.errors import BsamError, BsamRuntimeError, BsamValueError
from ..core.extras import need
from ..training.folder import ANEW, NETWORK, has_network, last_metrics, read_metrics, read_network, read_run
from ..training.loop import TASKS
from .measure import Loaded, load, loader

IMAGES = 1000  # of a run's training samples, unless more are asked for: what a Hessian product costs grows with them


@dataclass(frozen=True)
class Subjects:
    """What is to be measured, and how to get at it.

    Args:
        paths: of files or of folders, each once.
        settings: what makes the numbers of two of them comparable, as plain values.
        load: the network, its loss and its data, on a device.
        weights: the file whose content tells whether a subject has changed.
        title: short, for a table.
        about: what else to note beside its numbers.
    """

    paths: Sequence[Path]
    settings: Mapping[str, Any]
    load: Callable[[Path, torch.device], Loaded]
    weights: Callable[[Path], Path]
    title: Callable[[Path], str]
    about: Callable[[Path], dict[str, Any]]


def subjects(
    paths: Sequence[Path], loader_name: str | None = None, images: int | None = None, data_dir: Path | None = None
) -> Subjects:
    """Files with a loader, or run folders without one; all of them are checked here, before the first is measured.

    Args:
        paths: of files, or of folders.
        loader_name: for files: ``module:function``; ``function(path)`` returns ``(model, loss_fn, data)``.
        images: for folders: measure on the first so many training samples; None takes 1000.
        data_dir: for folders: where the data is, if it is read from files.

    Example:
        >>> subjects([Path("nowhere.pt")], "math:sqrt")
        Traceback (most recent call last):
        ...
        bsam.core.errors.BsamValueError: there is no file nowhere.pt
    """
    paths = list(dict.fromkeys(_named(path) for path in paths))
    folders = [path for path in paths if path.is_dir()]
    if folders and len(folders) < len(paths):
        other = next(path for path in paths if path not in folders)
        raise BsamValueError(
            f"{folders[0]} is a folder and {other} is not: measure run folders and files one after the other"
        )
    return _runs(paths, loader_name, images, data_dir) if folders else _files(paths, loader_name, images, data_dir)


def _files(paths: Sequence[Path], loader_name: str | None, images: int | None, data_dir: Path | None) -> Subjects:
    missing = [path for path in paths if not path.is_file()]
    if missing:
        raise BsamValueError(f"there is no file {missing[0]}")
    if loader_name is None:
        raise BsamValueError(
            f"{paths[0]} is a file: name what loads it with --loader MODULE:FUNCTION, or give the folder of a run of "
            "bsam train"
        )
    if images is not None or data_dir is not None:
        raise BsamValueError("the loader decides which data a file is measured on: leave --images and --data-dir out")
    function = loader(loader_name)
    alike = len({path.stem for path in paths}) < len(paths)
    return Subjects(
        paths,
        {"loader": loader_name},
        load=lambda path, device: load(function, path, device),
        weights=lambda path: path,
        title=lambda path: str(path) if alike else path.stem,
        about=lambda path: {},
    )


def _runs(paths: Sequence[Path], loader_name: str | None, images: int | None, data_dir: Path | None) -> Subjects:
    if loader_name is not None:
        raise BsamValueError(f"{paths[0]} is a folder, and a run needs no loader: leave --loader out, or name files")
    images = check_count("images", IMAGES if images is None else images)
    need("safetensors", "train")
    for path in paths:
        if not (path / "config.json").exists():
            raise BsamValueError(f"{path} is no folder of a run of bsam train: it has no config.json")
        run = read_run(path)
        if run.task not in TASKS:
            raise BsamValueError(f"{path} holds a run of the task {run.task!r}, which is none of {', '.join(TASKS)}")
        if (path / NETWORK).exists() and not has_network(path):
            raise BsamRuntimeError(f"{path / NETWORK} is damaged; {ANEW}")
        if not (path / NETWORK).exists():
            raise BsamRuntimeError(
                f"the run in {path} is not finished ({len(read_metrics(path))} of {run.epochs} epochs are): the "
                "command that started it goes on with it"
            )
    alike = len({path.name for path in paths}) < len(paths)
    return Subjects(
        paths,
        {"images": images},
        load=lambda path, device: load_run(path, images, data_dir, device),
        weights=lambda path: path / NETWORK,
        title=lambda path: str(path) if alike else path.name,
        about=lambda path: {"run": read_run(path).settings(), "metrics": last_metrics(path)},
    )


def load_run(folder: Path, images: int, data_dir: Path | None, device: torch.device) -> Loaded:
    """The trained network of a run, its loss without label smoothing, and its first training samples: not augmented,
    labels as trained on.
    """
    run = read_run(folder)
    task = TASKS[run.task](run, device, data_dir)
    try:
        network = read_network(folder, task.network())
    except BsamError:
        raise
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        trouble = f"is not of the network that config.json names ({reason})"
        raise BsamValueError(f"{folder / NETWORK} {trouble}: remove it, and {ANEW}") from error
    return network, task.loss, task.examples(images)


def _named(path: Path) -> Path:
    """The path, or the whole of it where it ends in no name: the current folder is called ``.``."""
    return path if path.name not in ("", "..") else path.resolve()
