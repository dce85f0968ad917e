"""Tasks: the data, losses and metrics of a kind of training. To add one, add a module here and an entry in TASKS."""

from __future__ import annotations

from ..config import settings_of_task
from .classification import Classification
from .pose import Pose
from .task import Task as Task

TASKS: dict[str, type[Task]] = {task.settings_type.name: task for task in (Classification, Pose)}


def task_class(name: str) -> type[Task]:
    """Return the task with this name.

    Example:
        >>> task_class("classification").measure.name
        'accuracy'
    """
    return TASKS[settings_of_task(name).name]
