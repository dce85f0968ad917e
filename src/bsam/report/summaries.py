"""The numbers of a recipe's table: mean and standard deviation over the seeds, and the paper's."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from ..recipes.experiments import Recipe, TableCell
from ..recipes.paper import Published
from ..recipes.tuning import differing
from ..tasks.task import Measure
from ..training.config import Run
from ..training.run_dir import RunDir, RunState


@dataclass(frozen=True)
class SeedStatistics:
    """Mean and sample standard deviation (None for a single value) of n values; n is 0 for what depends on no seed."""

    mean: float
    std: float | None
    n: int

    @property
    def without_n(self) -> str:
        """Mean and standard deviation as text."""
        return f"{self.mean:.2f}" + ("" if self.std is None else f" ± {self.std:.2f}")

    def __str__(self) -> str:
        return self.without_n + (f" ({self.n})" if self.n else "")


def seed_statistics(values: Sequence[float]) -> SeedStatistics:
    """Return mean and standard deviation."""
    return SeedStatistics(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None, len(values))


Value: TypeAlias = Callable[[RunState], float | None]


def statistics_of(states: Sequence[RunState], value: Value) -> SeedStatistics | None:
    """Return mean and standard deviation of a number of these runs; None if none of them has it."""
    values = [number for state in states if (number := value(state)) is not None]
    return seed_statistics(values) if values else None


@dataclass(frozen=True)
class ExtraColumn:
    """A further column of a table: mean and standard deviation over the finished seeds.

    Args:
        header: of the column.
        format: of a number.
        value: called with a finished run; None if that has no such number.
    """

    header: str
    format: str
    value: Value

    def text(self, found: SeedStatistics | None) -> str:
        """Return mean and standard deviation as text."""
        if found is None:
            return "-"
        return " ± ".join(format(value, self.format) for value in (found.mean, found.std) if value is not None)


def _memorised(state: RunState) -> float | None:
    share = state.epochs[-1].get("memorised")
    return None if share is None else 100 * share


DETAILS: dict[str, ExtraColumn] = {
    "memorised": ExtraColumn("memorised, %", ".1f", _memorised),
    "top_eigenvalue": ExtraColumn("λmax", ".1f", lambda state: RunDir(state.path).top_eigenvalue()),
}


@dataclass(frozen=True)
class CellSummary:
    """A cell of the table: the score after the last epoch over the finished seeds, the number of seeds that diverged or
    are not finished, the paper's number, further columns of its row, and the settings that tuning chose, by name.
    """

    cell: TableCell
    ours: SeedStatistics | None
    diverged: int
    missing: int
    paper: Published | None
    details: Mapping[str, SeedStatistics | None] = field(default_factory=dict)
    chosen: Mapping[str, Any] | None = None


def table_info(recipe: Recipe, states: Sequence[RunState]) -> list[CellSummary]:
    """Return the cells of a recipe's table, in the order of the runs; last those of the tasks' baselines."""
    measures: dict[TableCell, Measure] = {}
    cells: dict[TableCell, list[RunState]] = {}
    for state in states:
        for cell, measure in recipe.cells(state.run).items():
            measures[cell] = measure
            cells.setdefault(cell, []).append(state)
    summaries = [_summary(recipe, cell, measures[cell], group) for cell, group in cells.items()]
    return [*summaries, *_baselines(measures, cells)]


def _baselines(measures: Mapping[TableCell, Measure], cells: Mapping[TableCell, list[RunState]]) -> list[CellSummary]:
    """Return what is reached without training, where the task of a finished run has written it."""
    found: dict[TableCell, CellSummary] = {}
    for cell, states in cells.items():
        notes = (RunDir(state.path).note("baseline") for state in states if state.finished)
        if note := next(filter(None, notes), None):
            place, score = replace(cell, row=note["title"]), note["scores"].get(measures[cell].name)
            ours = None if score is None else SeedStatistics(measures[cell].factor * score, None, 0)
            found.setdefault(place, CellSummary(place, ours, 0, 0, None))
    return list(found.values())


def _summary(recipe: Recipe, cell: TableCell, measure: Measure, states: Sequence[RunState]) -> CellSummary:
    finished = [state for state in states if state.finished]
    diverged = sum(state.diverged is not None and not state.finished for state in states)
    details = {name: statistics_of(finished, DETAILS[name].value) for name in recipe.details}
    scores = [
        measure.shown(state.epochs[-1], state.run.eval_split)
        for state in finished
        if measure.metric(state.run.eval_split) in state.epochs[-1]  # a small test set may not have all joints
    ]
    ours = seed_statistics(scores) if scores else None
    missing = len(states) - len(finished) - diverged
    chosen = _chosen(recipe, finished[0].run) if finished else None
    paper = recipe.published(states[0].run, measure)
    return CellSummary(cell, ours, diverged, missing, paper, details, chosen)


def _chosen(recipe: Recipe, run: Run) -> dict[str, Any] | None:
    """Return what tuning chose for a run: the settings, and arguments of its method, in which the candidates differ."""
    names = differing(recipe.tuning.settings(run)) if recipe.tuning is not None else set()
    return {name: value for name, value in {**run.settings(), **run.arguments}.items() if name in names} or None
