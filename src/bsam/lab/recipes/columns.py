"""The states of runs, and what their measurements were made on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..tasks import TASKS
from ..training.config import Run
from ..training.loop import CURVATURE_SAMPLES
from ..training.run_dir import RunDir, RunState, run_dir_name


def state_of(run: Run, out: Path) -> RunState:
    """Return the state of a run, read from its directory below ``out``."""
    return RunDir(out / run_dir_name(run)).state(run)


def states_of(runs: Sequence[Run], out: Path) -> list[RunState]:
    """Return the state of each run."""
    return [state_of(run, out) for run in runs]


def measured_on(settings: Mapping[str, Any], samples: int | None = None) -> str:
    """Return which loss of a run is measured, and on which samples: the label of a number such as λmax.

    Args:
        settings: the run's.
        samples: the number of training samples; None for measurements at the end of training, which use fewer than
            :data:`CURVATURE_SAMPLES` only if there are fewer.

    Example:
        >>> measured_on({"task": "classification"}), measured_on({"task": "pose"}, 1000)
        ('cross-entropy, at most 256 training samples', 'SimCC loss, 1,000 training samples')
    """
    task = TASKS.get(settings.get("task", Run.task.name))
    count = f"at most {CURVATURE_SAMPLES}" if samples is None else f"{samples:,}"
    return f"{'loss' if task is None else task.loss_title}, {count} training samples"
