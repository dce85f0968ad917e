"""The numbers of runs: their states, their scores, and the cells and columns of a recipe's table."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from ..tasks import TASKS
from ..training.config import Run
from ..training.loop import CURVATURE_SAMPLES
from ..training.run_dir import RunDir, RunState, run_dir_name
from .paper import Published

Value: TypeAlias = Callable[[RunState], float | None]


def state_of(run: Run, out: Path) -> RunState:
    """Return the state of a run, read from its directory below ``out``."""
    return RunDir(out / run_dir_name(run)).state(run)


def states_of(runs: Sequence[Run], out: Path) -> list[RunState]:
    """Return the state of each run."""
    return [state_of(run, out) for run in runs]


def score_of(state: RunState) -> float:
    """Return the score of a finished run as tables show it: after the last epoch, not the best one."""
    return TASKS[state.run.task].measure.shown(state.epochs[-1], state.run.eval_split)


@dataclass(frozen=True)
class SeedStatistics:
    """Mean and sample standard deviation (None for a single value) of n values; n is 0 for a baseline."""

    mean: float
    std: float | None
    n: int

    def __format__(self, spec: str) -> str:
        if not spec:
            return str(self)
        return " ± ".join(format(number, spec) for number in (self.mean, self.std) if number is not None)

    def __str__(self) -> str:
        return f"{self:.2f}" + (f" ({self.n})" if self.n else "")


def seed_statistics(values: Sequence[float]) -> SeedStatistics:
    """Return mean and standard deviation."""
    return SeedStatistics(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None, len(values))


def statistics_of(states: Sequence[RunState], value: Value) -> SeedStatistics | None:
    """Return mean and standard deviation of a value over the runs; None if no run has it."""
    values = [number for state in states if (number := value(state)) is not None]
    return seed_statistics(values) if values else None


@dataclass(frozen=True)
class ExtraColumn:
    """A further column of a table: mean and standard deviation over the finished seeds.

    Args:
        name: its name in ``results.json``.
        header: its header in the table.
        value: called with the state of a finished run; returns None if the run has no such number.
        format: the format of a number.
    """

    name: str
    header: str
    value: Value
    format: str = ".1f"

    def text(self, numbers: SeedStatistics | None) -> str:
        """Return mean and standard deviation as text."""
        return "-" if numbers is None else format(numbers, self.format)


@dataclass(frozen=True)
class TableCell:
    """The position of a run's number in a table."""

    section: str
    row: str
    column: str


@dataclass(frozen=True)
class CellSummary:
    """A cell of the table.

    Args:
        cell: its position.
        ours: the score after the last epoch, over the finished seeds.
        diverged: the number of seeds that diverged.
        missing: the number of seeds that are not finished.
        paper: the published number.
        details: the recipe's further columns, by name.
        chosen: the settings that tuning chose, by name.
    """

    cell: TableCell
    ours: SeedStatistics | None
    diverged: int
    missing: int
    paper: Published | None
    details: Mapping[str, SeedStatistics | None] = field(default_factory=dict)
    chosen: Mapping[str, Any] | None = None


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
    task = TASKS.get(settings.get("task", Run.task))
    count = f"at most {CURVATURE_SAMPLES}" if samples is None else f"{samples:,}"
    return f"{'loss' if task is None else task.loss_title}, {count} training samples"


def _memorised(state: RunState) -> float | None:
    share = state.epochs[-1].get("memorised")
    return None if share is None else 100 * share


MEMORISED = ExtraColumn("memorised", "memorised, %", _memorised)
TOP_EIGENVALUE = ExtraColumn(
    "top_eigenvalue", f"λmax, {measured_on({})}", lambda state: RunDir(state.path).top_eigenvalue()
)
TOP_EIGENVALUE_NOTE = (
    "λmax: the largest eigenvalue of the Hessian of the cross-entropy, without label smoothing, on "
    f"at most {CURVATURE_SAMPLES} training samples, with the labels used in training."
)
