"""The numbers of a recipe's table: mean and standard deviation over the seeds, and the published numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..tasks.task import Measure
from ..training.config import Run
from ..training.run_dir import RunDir, RunState
from .cells import CellSummary, TableCell
from .columns import SeedStatistics, seed_statistics, statistics_of
from .experiments import Recipe
from .tuning import differing


def table_info(recipe: Recipe, states: Sequence[RunState]) -> list[CellSummary]:
    """Return the cells of a recipe's table in the order of the runs, then those of the tasks' baselines."""
    measures: dict[TableCell, Measure] = {}
    cells: dict[TableCell, list[RunState]] = {}
    for state in states:
        for cell, measure in recipe.cells(state.run).items():
            measures[cell] = measure
            cells.setdefault(cell, []).append(state)
    summaries = [_summary(recipe, cell, measures[cell], group) for cell, group in cells.items()]
    return [*summaries, *_baselines(measures, cells)]


def _baselines(measures: Mapping[TableCell, Measure], cells: Mapping[TableCell, list[RunState]]) -> list[CellSummary]:
    """Return the baselines, which are scores without training, of the tasks that have them."""
    baselines: dict[TableCell, CellSummary] = {}
    for cell, states in cells.items():
        notes = (RunDir(state.path).note("baseline") for state in states if state.finished)
        if note := next(filter(None, notes), None):
            position, score = replace(cell, row=note["title"]), note["scores"].get(measures[cell].name)
            ours = None if score is None else SeedStatistics(measures[cell].factor * score, None, 0)
            baselines.setdefault(position, CellSummary(position, ours, 0, 0, None))
    return list(baselines.values())


def _summary(recipe: Recipe, cell: TableCell, measure: Measure, states: Sequence[RunState]) -> CellSummary:
    finished = [state for state in states if state.finished]
    diverged = sum(state.diverged is not None and not state.finished for state in states)
    details = {column.name: statistics_of(finished, column.value) for column in recipe.details}
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
    """Return the settings and method arguments that tuning chose for a run: those that differ between candidates."""
    names = differing(recipe.tuning.settings(run)) if recipe.tuning is not None else set()
    return {name: value for name, value in {**run.settings(), **run.arguments}.items() if name in names} or None


def chosen_text(chosen: Mapping[str, Any] | None) -> str:
    """Return the settings that tuning chose as text.

    Example:
        >>> (
        ...     chosen_text({"rho_max": 0.1, "rho_min": 0.1}),
        ...     chosen_text({"weight_decay": 0.1}),
        ...     chosen_text(None),
        ... )
        ('rho_max 0.1, rho_min 0.1', 'weight decay 0.1', '-')
    """
    return ", ".join(f"{settings_text([name])} {value:g}" for name, value in (chosen or {}).items()) or "-"


def settings_text(names: Sequence[str]) -> str:
    """Return the names of settings in words.

    Example:
        >>> settings_text(["lr", "weight_decay"])
        'lr and weight decay'
    """
    return " and ".join(name.replace("weight_decay", "weight decay") for name in names)
