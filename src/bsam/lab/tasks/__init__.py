"""Tasks: the data, losses and scores of a kind of training: ours, and those of the user."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...common.errors import BsamValueError
from ..common.names import find_object, is_own, known_object, name_of
from ..config import settings_of_task, store_settings
from .classification import Classification
from .own_task import Splits as Splits
from .own_task import Task as Task
from .own_task import check_members
from .own_task import load_splits as load_splits
from .pose import Pose
from .task import BaseTask as BaseTask
from .task import Score as Score

TASKS: dict[str, type[BaseTask]] = {task.settings_type.name: task for task in (Classification, Pose)}


@dataclass(frozen=True)
class StoredTask:
    """What tables need of a task of the user whose module is not imported, from the files of a run."""

    score: Score
    groups: Sequence[Score]
    loss_title: str


_STORED: dict[str, StoredTask] = {}


def task_class(name: str) -> type[BaseTask] | StoredTask:
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
    return _STORED[name] if name in _STORED else TASKS[settings_of_task(name).name]


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


def describe_task(name: str, note: Mapping[str, Any]) -> None:
    """Make a task of the user known from ``task.json``; its module is not imported."""
    if is_own(name) and note and known_object(name) is None:
        store_settings(name, note["settings"])
        groups = tuple(Score(**group) for group in note["groups"])
        _STORED[name] = StoredTask(Score(**note["score"]), groups, note["loss_title"])
