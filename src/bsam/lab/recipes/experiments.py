"""Recipes: the runs of an experiment, and the table and figures that present them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from ...common.checks import check_count
from ...common.errors import BsamTypeError, BsamValueError
from ...methods import METHODS
from ..data import dataset_entry
from ..models import model_entry
from ..tasks import TASKS
from ..tasks.task import Measure
from ..training.config import Run, arguments_of
from ..training.run_dir import RunDir, RunState, run_dir_name
from .candidates import Tuning, differing_names
from .columns import CellSummary, ExtraColumn, SeedStatistics, TableCell, seed_statistics, statistics_of
from .paper import Published, PublishedTable
from .scales import Scale, scale_of
from .variants import BSAMS, variant_of

MAX_SEEDS = 100  # all runs are listed before the first begins, which would take forever with a million seeds
SMOKE = "smoke: shows that it runs"  # a remark on meaningless numbers

Grid: TypeAlias = Callable[[Scale], list[Run]]


@dataclass(frozen=True)
class Axis:
    """The horizontal axis of a figure of scores.

    Args:
        label: the label of the axis.
        value: returns the position of a run on the axis.
        log: whether it is logarithmic.
    """

    label: str
    value: Callable[[Run], float]
    log: bool = False


def by_network(run: Run) -> TableCell:
    """Place a run: a section per network, a row per method, a column per data set."""
    return TableCell(model_entry(run.model).title, variant_of(run).title, dataset_entry(run.data).title)


@dataclass(frozen=True)
class Recipe:
    """An experiment.

    Args:
        name: its name on the command line.
        title: what it shows.
        grid: called with a scale; returns the runs of one seed.
        cell: the position of a run in the table.
        rows: the header of the first column, which says what the rows are.
        published_table: published numbers, shown next to ours.
        figures: names in ``bsam.lab.report.recipe_results.FIGURES``, or functions ``draw(recipe, states, path)``.
        axis: the horizontal axis of the figure ``accuracy_lines``.
        scales: the scales that it can be run on, by name or as objects; the first is the default.
        tuning: how settings are chosen before the final runs; None keeps them as they are.
        base_tuning: how settings are chosen for the base optimizer alone, before that; all runs then use them.
        details: further columns of the table.
        notes: called with one of the runs; returns the lines below the table.
        findings: called with the cells of the table and the states of the runs; returns sentences on what they show.
        measures: metrics of a run; each becomes a column, and these replace all other columns. If empty, the table
            shows the measure of the task.
        tunable: whether ``--tune`` can choose its radii.
        smoke: the name of the scale that ``--scale smoke`` runs.
        seeds: the default number of seeds.
        method_title: returns the name of a run's method in lists of runs.
        remark: a remark on the numbers, added to the titles of tables and figures.
    """

    name: str
    title: str
    grid: Grid
    cell: Callable[[Run], TableCell] = by_network
    rows: str = "method"
    published_table: PublishedTable | None = None
    figures: tuple[str | Callable[[Recipe, Sequence[RunState], Path], None], ...] = ()
    axis: Axis | None = None
    scales: tuple[str | Scale, ...] = ("smoke", "short", "paper")
    tuning: Tuning | None = None
    details: tuple[ExtraColumn, ...] = ()
    notes: Callable[[Run], Sequence[str]] = lambda run: ()
    findings: Callable[[Sequence[CellSummary], Sequence[RunState]], Sequence[str]] = lambda summaries, states: ()
    measures: tuple[Measure, ...] = ()
    tunable: bool = False
    smoke: str = "smoke"
    seeds: int = 1
    method_title: Callable[[Run], str] = lambda run: variant_of(run).title
    remark: str = ""
    base_tuning: Tuning | None = None

    def __post_init__(self) -> None:
        if "accuracy_lines" in self.figures and self.axis is None:
            raise BsamValueError(f"the recipe {self.name} draws accuracy_lines and needs an axis for it, got None")
        if not self.scales:
            raise BsamValueError(f"scales of the recipe {self.name} must have at least one scale, got none")

    @property
    def scale_names(self) -> tuple[str, ...]:
        """The names of its scales."""
        return tuple(scale if isinstance(scale, str) else scale.name for scale in self.scales)

    def cells(self, run: Run) -> dict[TableCell, Measure]:
        """Return the positions of a run's numbers in the table, with the measure shown there."""
        cell = self.cell(run)
        if not self.measures:
            return {cell: TASKS[run.task].measure}
        return {replace(cell, column=measure.title): measure for measure in self.measures}

    def runs(self, scale: str | None = None, seeds: int = 1, first_seed: int = 0) -> list[Run]:
        """Return all runs, seed by seed: the first seed of every run comes before the second of any.

        A loss surface is computed for the first seed only.
        """
        scale = self.scale_names[0] if scale is None else scale
        if scale not in self.scale_names:
            raise BsamValueError(f"scale must be one of {', '.join(self.scale_names)}; got {scale!r}")
        check_count("seeds", seeds, high=MAX_SEEDS)
        check_count("seed", first_seed, low=0)
        grid = self.grid(self.scale(scale))
        self._check(grid)
        later = range(first_seed + 1, first_seed + seeds)
        return with_seed(grid, first_seed) + [run for seed in later for run in with_seed(grid, seed, surface=None)]

    def _check(self, runs: Sequence[Run]) -> None:
        """Raise before anything is trained if the table would be wrong.

        Two runs of one seed in one cell would be shown as a mean over seeds.
        """
        if not isinstance(runs, Sequence) or not all(isinstance(run, Run) for run in runs):
            raise BsamTypeError(f"the grid of the recipe {self.name} must return a list of Run, got {runs!r:.80}")
        cells: set[TableCell] = set()
        for run in runs:
            self.published(run)  # checks the keys of the published numbers
            if (cell := self.cell(run)) in cells:
                position = f"{cell.section!r}, {cell.row!r}, {cell.column!r}"
                raise BsamValueError(
                    f"two runs of the recipe {self.name} share the cell {position} of its table: give the recipe a "
                    "function `cell` that separates them"
                )
            cells.add(cell)

    def at(self, scale: str) -> Recipe:
        """Return the recipe at a scale: at ``smoke``, its title and remark say that the numbers mean nothing."""
        if scale != "smoke" or self.smoke != "smoke":
            return self
        return replace(self, title=f"{self.title} ({SMOKE})", remark=SMOKE)

    def titled(self, text: str) -> str:
        """Return the title of a table or a figure, with the remark if there is one."""
        return f"{text} ({self.remark})" if self.remark else text

    @property
    def tuned(self) -> bool:
        """Whether ``--tune`` chooses its radii."""
        return self.tuning is not None and bool(self.tuning.labels)

    def scale(self, name: str) -> Scale:
        """Return the scale that is run under this name."""
        scale = dict(zip(self.scale_names, self.scales, strict=True)).get(name, name)
        return scale_of(self.smoke if scale == "smoke" else scale)

    def published(self, run: Run, measure: Measure | None = None) -> Published | None:
        """Return the published number for a run, or for one measure of it if the recipe has measures."""
        if self.published_table is None:
            return None
        variant = variant_of(run).name
        defaults = {name: None for method in METHODS for name in arguments_of(method)}
        names = {"method": "bsam" if variant in BSAMS else variant, "measure": measure and measure.name}
        return self.published_table.number({**defaults, **run.arguments, **run.settings(), **names})


@dataclass(frozen=True)
class PlannedRuns:
    """The runs of an experiment.

    Args:
        recipe: the experiment.
        scale: the name of its scale.
        runs: all its runs, before tuning.
        selected: the runs to train.
        baseline: the title of the method that the others are compared with; None compares only on the page, with the
            base optimizer.
    """

    recipe: Recipe
    scale: str
    runs: Sequence[Run]
    selected: Sequence[Run]
    baseline: str | None = None


def with_seed(runs: Sequence[Run], seed: int, **more: Any) -> list[Run]:
    """Return the runs with another seed.

    If ``init`` of a run names another of these runs, it then names that run with the new seed. Other values of ``init``
    stay as they are.

    Args:
        runs: the runs, with any seed.
        seed: the new seed.
        more: other settings to replace.
    """
    new = [replace(run, seed=seed, **more) for run in runs]
    if all(run.init is None for run in runs):
        return new
    names = dict(zip(map(run_dir_name, runs), map(run_dir_name, new), strict=True))
    return [run if run.init is None else replace(run, init=names.get(run.init, run.init)) for run in new]


def table_info(recipe: Recipe, states: Sequence[RunState]) -> list[CellSummary]:
    """Return the cells of a recipe's table in the order of the runs, then those of the tasks' baselines."""
    measures: dict[TableCell, Measure] = {}
    cells: dict[TableCell, list[RunState]] = {}
    for state in states:
        for cell, measure in recipe.cells(state.run).items():
            measures[cell] = measure
            cells.setdefault(cell, []).append(state)
    summaries = [_summary(recipe, cell, measures[cell], group) for cell, group in cells.items()]
    baselines: dict[TableCell, CellSummary] = {}  # scores without training
    for cell, group in cells.items():
        notes = (RunDir(state.path).note("baseline") for state in group if state.finished)
        if note := next(filter(None, notes), None):
            position, score = replace(cell, row=note["title"]), note["scores"].get(measures[cell].name)
            ours = None if score is None else SeedStatistics(measures[cell].factor * score, None, 0)
            baselines.setdefault(position, CellSummary(position, ours, 0, 0, None))
    return [*summaries, *baselines.values()]


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
    chosen = None
    if finished and recipe.tuning is not None:
        run = finished[0].run
        names = differing_names(recipe.tuning.settings(run))
        chosen = {name: value for name, value in {**run.settings(), **run.arguments}.items() if name in names} or None
    paper = recipe.published(states[0].run, measure)
    return CellSummary(cell, ours, diverged, missing, paper, details, chosen)
