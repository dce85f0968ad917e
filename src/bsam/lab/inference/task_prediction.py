"""Predictions of a task of the user: its values and pictures for files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ...common.errors import BsamTypeError, BsamValueError
from ..config import to_json_value
from ..tasks import Task, named_task, task_class
from ..training.machine import pick_device
from ..training.run_dir import TASK, RunDir, check_named
from ..training.trainer import as_trained
from .class_prediction import image_paths

REPAIR = "choose another run"


@dataclass(frozen=True)
class TaskPrediction:
    """The values of a file, and its picture if the task draws one.

    Args:
        path: the file.
        values: plain values by name.
        picture: bytes (height, width, 3).
    """

    path: Path
    values: dict[str, Any]
    picture: NDArray[np.uint8] | None = None


def predict_task(
    folder: str | Path,
    files: str | Path | Iterable[str | Path],
    task: str | type[Task] | None = None,
    device: str = "auto",
    *,
    model: str | None = None,
    pictures: bool = False,
) -> list[TaskPrediction]:
    """Apply the trained network of a run to files, which its task reads; the data of the run is not needed.

    Args:
        folder: directory of a finished run.
        files: files or folders.
        task: the task of the run, which is imported only if it is named here.
        device: the name of a device, or ``"auto"``.
        model: the network of the run; needed only if it is ``MODULE:FUNCTION``.
        pictures: whether to draw pictures.
    """
    named = [] if task is None else [named_task(task)]
    run_dir = RunDir(folder)
    run = run_dir.finished_run()
    check_named(run, run_dir.path, None, [] if model is None else [model], named)
    kind: Any = task_class(run.task.name)
    work: Task = kind(run, pick_device(device), facts=run_dir.note(TASK, REPAIR, ["facts"])["facts"])
    needed = {"read": "read(path)", "values": "values(outputs)"} | ({"draw": "draw(x, outputs)"} if pictures else {})
    for member, signature in needed.items():
        if not work.has(member):
            raise BsamValueError(f"{run.task.name} has no {signature}, which bsam predict needs: add it")
    network = run_dir.load_into(work.network()).eval()
    found = []
    for path in image_paths(files):
        with as_trained(run, work.device):
            x = torch.as_tensor(work.read(path))[None].to(work.device)
            outputs = network(work.inputs(x))
        if isinstance(outputs, torch.Tensor):
            outputs = outputs.float()
        values = work.values(outputs)
        if not isinstance(values, Sequence) or len(values) != 1 or not isinstance(values[0], dict):
            raise BsamTypeError(f"values of {run.task.name} must return a list with a dictionary per sample")
        picture = np.asarray(work.draw(x, outputs))[0] if pictures else None
        found.append(TaskPrediction(path, to_json_value(values[0]), picture))
    return found
