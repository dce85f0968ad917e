"""Tasks: the data, losses and scores of a kind of training: ours, and those of the user."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...common.errors import BsamValueError
from ..common.names import find_object, is_own, known_object, name_of
from ..config import Run, settings_of_task, store_settings
from ..data import DatasetEntry
from .classification import Classification
from .pose import Pose
from .splits import Splits as Splits
from .task import Score as Score
from .task import Task as Task
from .task import check_members

TASKS: dict[str, type[Task]] = {task.settings_type.name: task for task in (Classification, Pose)}


class StoredTask(Task, stored=True):
    """A task of the user whose module is not imported: what tables need of it, from the files of a run."""

    def __init__(self, run: Run, *_: object, **__: object) -> None:
        raise BsamValueError(f"the task {run.task.name} is not imported: import it, and pass its class to Run.of")


_STORED_TASKS: dict[str, type[StoredTask]] = {}


def task_class(name: str) -> type[Task]:
    """Return the task with this name. Nothing is imported: a task of the user is known as
    :func:`~bsam.lab.config.settings_of_task` says.

    Example:
        >>> task_class("classification").score.name
        'accuracy'
    """
    if name in TASKS:
        return TASKS[name]
    if isinstance(known := known_object(name), type) and issubclass(known, Task):
        return known
    return _STORED_TASKS[name] if name in _STORED_TASKS else TASKS[settings_of_task(name).name]


def task_of(run: Run) -> type[Task]:
    """Return the task of a run, as :func:`task_class` does."""
    return task_class(run.task.name)


def data_of(run: Run) -> DatasetEntry:
    """Return the entry of a run's data, which may be a name that only its task knows."""
    return task_of(run).data_entry(run)


def named_task(task: str | type[Task]) -> str:
    """Return the name of a task that the user gives, after importing it, if it is ``MODULE:CLASS``, and checking it."""
    if isinstance(task, str) and not is_own(task):
        return settings_of_task(task).name
    cls = find_object(task, "task") if isinstance(task, str) else task
    try:
        check_members(cls)
    except TypeError as error:
        raise BsamValueError(f"{task}: {error}" if isinstance(task, str) else str(error)) from error
    return name_of(cls, "task")


def describe_task(name: Any, note: Mapping[str, Any]) -> None:
    """Make a task of the user known from ``task.json``; its module is not imported."""
    if not (is_own(name) and note) or known_object(name) is not None:
        return
    store_settings(name, note["settings"], note["presets"])
    members = {
        "settings_type": settings_of_task(name),
        "score": Score(**note["score"]),
        "groups": tuple(Score(**group) for group in note["groups"]),
        "loss_title": note["loss_title"],
    }
    _STORED_TASKS[name] = type("StoredTask", (StoredTask,), members, stored=True)
