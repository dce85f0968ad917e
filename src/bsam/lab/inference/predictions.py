"""Apply the trained network of a run to files."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from torch import nn

from ...common.errors import BsamValueError
from ..common.printing import say
from ..data.folders import WINDOWS_FILES
from ..tasks import Task, named_task, task_class
from ..tasks.found import Prediction
from ..training.machine import pick_device
from ..training.run_dir import RunDir, check_all_used, check_named
from ..training.trainer import as_trained


def predict(
    folder: str | Path,
    files: str | Path | Iterable[str | Path],
    *,
    task: str | type[Task] | None = None,
    model: str | Callable[..., nn.Module] | None = None,
    device: str = "auto",
    pictures: bool = False,
    on_message: Callable[[str], None] = say,
    **options: Any,
) -> list[Prediction]:
    """Apply the trained network of a run to files, in the precision of its training; its data is not needed.

    Args:
        folder: directory of a finished run. A classifier must have been trained on image files, or on your own arrays
            of bytes.
        files: files, or folders, of which all files are taken; files in folders that are no images are left out.
        task: the task of the run; needed only if it is a class of yours, which runs code of its module.
        model: the network of the run; needed only if it is a function or class of yours, or ``MODULE:FUNCTION``, which
            runs code of that module.
        device: ``"cpu"``, ``"cuda"``, ``"cuda:1"`` ...; ``"auto"`` takes a GPU if there is one.
        pictures: whether a task of yours draws pictures, which ``picture()`` returns; other tasks always can.
        on_message: called with messages for the user.
        options: those of the task, which are also flags of `bsam predict`. Classification has ``top``, the number of
            classes (3). Pose has ``box``, left, top, right and bottom of the person in a single image (the whole
            image), and ``flip_test``, whether to average the probabilities of an image and its mirror image (as in the
            run's evaluation).

    Returns:
        For each file, an object with ``path``, ``values`` (plain values) and ``picture()``. Those of classification are
        :class:`FoundClasses`, those of pose :class:`FoundJoints`, and those of a task of yours :class:`FoundValues`.
    """
    paths = file_paths(files)
    run_dir = RunDir(folder)
    run = run_dir.finished_run()
    models = [] if model is None else [model]
    tasks = [] if task is None else [named_task(task)]
    check_named(run, run_dir.path, None, models, tasks)
    check_all_used({run_dir.path: run}, (), models, tasks)
    kind: Any = task_class(run.task.name)
    for name in options:
        if name not in kind.predict_flags:
            flag = f"--{name.replace('_', '-')}"
            raise BsamValueError(
                f"the run in {folder} has the task {run.task.name}: leave out {name} ({flag}), or choose another run"
            )
    work = kind.trained(run, pick_device(device), run_dir.parsed)
    network = run_dir.load_into(work.network()).eval()
    if (warning := run_dir.stale_code(run)) is not None:
        on_message(warning)
    with as_trained(run, work.device):
        return list(work.predict(network, paths, on_message, pictures, **options))


def file_paths(files: str | Path | Iterable[str | Path]) -> dict[Path, bool]:
    """Return the paths of files without duplicates, with True for those that the caller named directly.

    A folder stands for all files below it, sorted, except hidden ones. Raise if there are none.
    """
    paths: dict[Path, bool] = {}
    for path in map(Path, [files] if isinstance(files, (str, Path)) else files):
        is_named = not path.is_dir()
        expanded = [path] if is_named else _files_below(path)
        if not expanded:
            raise BsamValueError(f"the folder {path} holds no files: give another one")
        paths |= {file: is_named or paths.get(file, False) for file in expanded}
    if not paths:
        raise BsamValueError("there are no images: name files or folders")
    return paths


def _files_below(folder: Path) -> list[Path]:
    files: list[Path] = []
    visited = set()
    for directory, folders, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(directory)
        if real in visited:  # a link may lead back to a folder that contains it
            folders.clear()
            continue
        visited.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        files += [Path(directory, name) for name in names if not name.startswith(".") and name not in WINDOWS_FILES]
    return sorted(files)
