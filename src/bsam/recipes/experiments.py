"""The experiments on CIFAR, as functions that return runs, and what a recipe is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from ..common.checks import check_count
from ..common.errors import BsamValueError
from ..data import dataset_entry
from ..models import model_entry
from ..tasks import TASKS
from ..tasks.task import Measure
from ..training.config import Run
from ..training.run_dir import run_dir_name
from .paper import NOISE_RATES, RHO_MIN_STUDY, TABLE_KEYS, Published, published
from .scales import Scale, scale_of
from .tuning import Tuning
from .variants import BSAMS, MATCHED, variant_of, variants

CURVES = ("sgd", "sam", *BSAMS)  # the paper's, of which it draws curves
COMPARED = ("sgd", "sam", *MATCHED, *BSAMS)  # those and SAM at BSAM's total radius
CONFLICT_TOP = 0.1  # rho_min at the start, in the figure of the gradient conflict ...
CONFLICT_FLOORS = (0.1, 0.05, 0.0)  # ... and at the end: fixed, halved, the paper's choice
MAIN = "resnet18"
MAX_SEEDS = 100  # all runs are listed before the first begins
SMOKE = "smoke: shows that it runs"  # a remark on numbers that mean nothing

Grid: TypeAlias = Callable[[Scale | str], list[Run]]


@dataclass(frozen=True)
class TableCell:
    """The position of a run's number in a table."""

    section: str
    row: str
    column: str


def classification(scale: Scale | str) -> list[Run]:
    """Return every method on every network and data set."""
    scale = scale_of(scale)
    pairs = [(network, data) for network in scale.networks for data in scale.data]
    return [scale.run(variant, network, data) for network, data in pairs for variant in variants().values()]


def rho_min_study(scale: Scale | str) -> list[Run]:
    """Return BSAM with rho_min from small to large, rho_max at its default."""
    scale = scale_of(scale)
    return [
        scale.run(variants()[name], MAIN, data, arguments={"rho_min": rho_min})
        for data in scale.data
        for rho_min in RHO_MIN_STUDY
        for name in BSAMS
    ]


def label_noise(scale: Scale | str) -> list[Run]:
    """Return runs in which a part of the training labels is flipped."""
    scale = scale_of(scale)
    return [
        scale.run(variants()[name], MAIN, data, label_noise=rate)
        for data in scale.data
        for rate in NOISE_RATES
        for name in COMPARED
    ]


def training_curves(scale: Scale | str) -> list[Run]:
    """Return the runs whose loss and accuracy are drawn over the epochs."""
    scale = scale_of(scale)
    return [scale.run(variants()[name], "wide_resnet28_10", scale.data[-1]) for name in CURVES]


def sharpness_curves(scale: Scale | str) -> list[Run]:
    """Return runs with a probe, which records MaxS, MinS and BilS over the steps."""
    scale = scale_of(scale)
    return [scale.run(variants()[name], MAIN, scale.data[-1], probe=scale.probe) for name in ("sam", *BSAMS)]


def gradient_conflict(scale: Scale | str) -> list[Run]:
    """Return runs with a probe under three schedules of rho_min: the cosine of g and g_min over the steps."""
    scale = scale_of(scale)
    schedules = [{"rho_min": CONFLICT_TOP, "rho_min_floor": floor} for floor in CONFLICT_FLOORS]
    return [
        scale.run(variants()[name], MAIN, scale.data[-1], probe=scale.probe, arguments=schedule)
        for schedule in schedules
        for name in BSAMS
    ]


def by_network(run: Run) -> TableCell:
    """A section for each network, a row for each method, a column for each data set."""
    return TableCell(model_entry(run.model).title, variant_of(run).title, dataset_entry(run.data).title)


def by_rho_min(run: Run) -> TableCell:
    """A section for each form of BSAM, a row for each rho_min, a column for each data set."""
    section = f"{model_entry(run.model).title}, {variant_of(run).title}"
    return TableCell(section, f"{run.arguments['rho_min']:g}", dataset_entry(run.data).title)


def by_noise(run: Run) -> TableCell:
    """A section for each data set, a row for each method, a column for each rate of label noise."""
    section = f"{model_entry(run.model).title}, {dataset_entry(run.data).title}"
    return TableCell(section, variant_of(run).title, f"{run.label_noise:.0%}")


def by_schedule(run: Run) -> TableCell:
    """A section for each form of BSAM, a row for each schedule of rho_min."""
    section = f"{model_entry(run.model).title}, {variant_of(run).title}"
    return TableCell(section, schedule_of(run), dataset_entry(run.data).title)


def schedule_of(run: Run) -> str:
    """Describe the schedule of rho_min."""
    top, floor = run.arguments["rho_min"], run.arguments["rho_min_floor"]
    return f"{top:g}, fixed" if top == floor else f"{top:g} to {floor:g}"


@dataclass(frozen=True)
class Recipe:
    """An experiment.

    Args:
        name: its name on the command line.
        title: what it shows.
        grid: its runs on a scale, of one seed.
        cell: the position of a run in the table.
        rows: what the rows of the table are.
        table: of :mod:`bsam.recipes.paper`, whose numbers stand beside ours; empty where the paper has a figure only.
        figures: names in :data:`bsam.report.results.FIGURES`.
        scales: names of the scales that it can be run on; the first is the default.
        tuning: how settings of the runs are chosen first; None runs them as they are.
        details: more columns of the table, names in :data:`bsam.report.tables.DETAILS`.
        notes: returns the lines below the table of runs like this one.
        measures: metrics of a run, each in a column of its own in place of :attr:`TableCell.column`; empty for the
            measure of its task alone. Such a table has no other columns.
        tunable: whether ``--tune`` can choose its radii.
        smoke: the scale that is run as ``smoke``, if not the one of that name.
        findings: what the numbers show, a name in :data:`bsam.report.results.FINDINGS`; empty for none.
        seeds: how many `bsam run` trains unless the user says how many.
        method_title: returns the name of a run's method in lists of runs.
        remark: on the numbers, in the titles of tables and figures; empty for none.
    """

    name: str
    title: str
    grid: Grid
    cell: Callable[[Run], TableCell] = by_network
    rows: str = "method"
    table: str = ""
    figures: tuple[str, ...] = ()
    scales: tuple[str, ...] = ("smoke", "short", "paper")
    tuning: Tuning | None = None
    details: tuple[str, ...] = ()
    notes: Callable[[Run], Sequence[str]] = lambda run: ()
    findings: str = ""
    measures: tuple[Measure, ...] = ()
    tunable: bool = False
    smoke: str = "smoke"
    seeds: int = 1
    method_title: Callable[[Run], str] = lambda run: variant_of(run).title
    remark: str = ""

    def cells(self, run: Run) -> dict[TableCell, Measure]:
        """Return the positions of a run's numbers in the table, and what is shown there."""
        cell = self.cell(run)
        if not self.measures:
            return {cell: TASKS[run.task].measure}
        return {replace(cell, column=measure.title): measure for measure in self.measures}

    def runs(self, scale: str | None = None, seeds: int = 1, first_seed: int = 0) -> list[Run]:
        """Return all runs, seed by seed: the first seed of every run comes before the second of any.

        A landscape is measured for the first seed only.
        """
        scale = self.scales[0] if scale is None else scale
        if scale not in self.scales:
            raise BsamValueError(f"scale must be one of {', '.join(self.scales)}; got {scale!r}")
        check_count("seeds", seeds, high=MAX_SEEDS)
        check_count("seed", first_seed, low=0)
        grid = self.grid(self.scale(scale))
        later = range(first_seed + 1, first_seed + seeds)
        return with_seed(grid, first_seed) + [run for seed in later for run in with_seed(grid, seed, surface=None)]

    def at(self, scale: str) -> Recipe:
        """Return the recipe with the remark that its numbers have on a scale, in its title too."""
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
        return scale_of(self.smoke if name == "smoke" else name)

    def published(self, run: Run, measure: Measure | None = None) -> Published | None:
        """Return the paper's number for a run, by one of :attr:`measures` where there are any."""
        if not self.table:
            return None
        name = variant_of(run).name
        own = {"method": "bsam" if name in BSAMS else name, "rho_min": run.arguments.get("rho_min")}
        own["measure"] = None if measure is None else measure.name
        known = {**run.settings(), **own}
        return published(self.table, **{name: known[name] for name in TABLE_KEYS[self.table]})


def with_seed(runs: Sequence[Run], seed: int, **more: Any) -> list[Run]:
    """Return the runs with another seed; those that begin with one of them then begin with that of the same seed.

    Args:
        runs: with any seed.
        seed: the new one.
        more: other settings that change.
    """
    new = [replace(run, seed=seed, **more) for run in runs]
    if all(run.init is None for run in runs):
        return new
    names = dict(zip(map(run_dir_name, runs), map(run_dir_name, new), strict=True))
    return [run if run.init is None else replace(run, init=names[run.init]) for run in new]
