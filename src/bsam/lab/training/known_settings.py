"""All settings by name: their groups, their defaults, and those of stored runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, fields
from pathlib import Path
from typing import Any

from ...common.errors import BsamValueError
from ..tasks import TASKS, task_class
from ..tasks.classification_settings import FINE_TUNING as FINE_TUNING
from ..tasks.classification_settings import QUANTIZED as QUANTIZED
from ..tasks.pose import POSE as POSE
from ..tasks.settings import GROUPS, TaskSettings
from .config import BASE, OWNERS, Run

ADAMW = {"lr": 1e-3, "weight_decay": 0.05, "decay": "weights"}  # usual for transformers trained from scratch
SETTINGS = [*(item.name for item in fields(Run)), *OWNERS]  # the names of all settings
_DEFAULTS = Run(BASE).settings()


def grouped_settings() -> dict[str, list[Field[Any]]]:
    """Return the settings by the heading of their flags; in each group, those of the tasks come last."""
    listed = sorted(fields(Run), key=lambda item: item.name not in Run.__annotations__)
    listed += [item for task in TASKS.values() for item in fields(task.settings_type)]
    return {group: [item for item in listed if item.metadata["group"] == group] for group in GROUPS}


def default_settings(task: TaskSettings) -> dict[str, Any]:
    """Return the defaults by name: of the settings of all runs, and of those of a task."""
    return {**_DEFAULTS, **{item.name: item.default for item in fields(task)}}


def usual_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults that depend on other settings: for pose, quantization, fine-tuning, and AdamW.

    Example:
        >>> usual_settings({"base": "adamw"})
        {'lr': 0.001, 'weight_decay': 0.05, 'decay': 'weights'}
    """
    if settings.get("task") == "pose":
        return dict(POSE)
    of_start = FINE_TUNING if settings.get("weights") is not None else {}
    of_base = ADAMW if str(settings.get("base")).lower() == "adamw" else {}
    return {**(of_start if settings.get("weight_bits") is None else QUANTIZED), **of_base}


def stored_run(settings: Mapping[str, Any], kind: type[TaskSettings] | None = None) -> Run:
    """Return the run with stored settings. Runs stored without ``noise_labels`` drew labels from the other classes;
    older versions stored the settings of all tasks with each run.

    Args:
        settings: from :meth:`Run.settings`.
        kind: the settings of a task of the user; other tasks are known by name.
    """
    if "method" not in settings:
        raise BsamValueError("the method is missing")
    name = settings.get("task", Run.task.name)
    if kind is None or kind.name != name:
        kind = task_class(name).settings_type
    before = {"noise_labels": "other"} if settings.get("label_noise") else {}
    others = OWNERS.keys() - {item.name for item in fields(kind)}
    return Run.of(**{key: value for key, value in {**before, **settings, "task": kind}.items() if key not in others})


def check_settings(folder: Path, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Raise if a folder holds results with other settings."""
    differing = [name for name in {**theirs, **ours} if theirs.get(name) != ours.get(name)]
    if differing:
        differences = "; ".join(f"{name} {theirs.get(name)} there, {ours.get(name)} here" for name in differing)
        raise BsamValueError(
            f"{folder} holds results with other settings ({differences}): use the same settings, choose another "
            "folder, or remove that one"
        )
