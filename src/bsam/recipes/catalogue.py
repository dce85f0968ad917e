"""The paper's experiments on CIFAR, as functions that return runs, and the list of them all."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TypeAlias

from ..core.checks import check_count
from ..core.errors import BsamValueError
from ..data import DATASETS
from ..models import MODELS
from ..training.config import Run
from .paper import NOISE_RATES, RHO_MIN_STUDY, Published, published
from .scales import Scale, scale_of
from .variants import BSAMS, variant_of, variants

BASELINES = ("sgd", "sam", *BSAMS)
CONFLICT_TOP = 0.1  # where rho_min starts in the figure of the gradient conflict ...
CONFLICT_FLOORS = (0.1, 0.05, 0.0)  # ... and where it ends: fixed, halved, the paper's choice
MAIN = "resnet18"
MOST_SEEDS = 100  # all runs are listed before the first begins: with a million seeds that would not end

Grid: TypeAlias = Callable[[Scale | str], list[Run]]


@dataclass(frozen=True)
class TableCell:
    """Where a run's number stands in a table: which part of it, which row, which column."""

    part: str
    row: str
    column: str


def classification(scale: Scale | str) -> list[Run]:
    """Every method on every network and data set."""
    scale = scale_of(scale)
    return [
        scale.run(column, network, data)
        for network in scale.networks
        for data in scale.data
        for column in variants().values()
    ]


def rho_min_study(scale: Scale | str) -> list[Run]:
    """BSAM with rho_min from small to large, rho_max as ever."""
    scale = scale_of(scale)
    return [
        scale.run(variants()[name], MAIN, data, arguments={"rho_min": rho_min})
        for data in scale.data
        for rho_min in RHO_MIN_STUDY
        for name in BSAMS
    ]


def label_noise(scale: Scale | str) -> list[Run]:
    """A part of the training labels flipped."""
    scale = scale_of(scale)
    return [
        scale.run(variants()[name], MAIN, data, label_noise=rate)
        for data in scale.data
        for rate in NOISE_RATES
        for name in BASELINES
    ]


def training_curves(scale: Scale | str) -> list[Run]:
    """Loss and accuracy over the epochs."""
    scale = scale_of(scale)
    return [scale.run(variants()[name], "wide_resnet28_10", scale.largest()) for name in BASELINES]


def sharpness_curves(scale: Scale | str) -> list[Run]:
    """MaxS, MinS and BilS over the steps, of methods that have radii."""
    scale = scale_of(scale)
    return [scale.run(variants()[name], MAIN, scale.largest(), probe=scale.probe) for name in ("sam", *BSAMS)]


def gradient_conflict(scale: Scale | str) -> list[Run]:
    """Cosine of g and g_min over the steps, under three schedules of rho_min."""
    scale = scale_of(scale)
    return [
        scale.run(
            variants()[name],
            MAIN,
            scale.largest(),
            probe=scale.probe,
            arguments={"rho_min": CONFLICT_TOP, "rho_min_floor": floor},
        )
        for floor in CONFLICT_FLOORS
        for name in BSAMS
    ]


def by_network(run: Run) -> TableCell:
    """A part for each network, a row for each method, a column for each data set."""
    return TableCell(MODELS[run.model].title, variant_of(run).title, DATASETS[run.data].title)


def by_rho_min(run: Run) -> TableCell:
    """A part for each form of BSAM, a row for each rho_min, a column for each data set."""
    return TableCell(
        f"{MODELS[run.model].title}, {variant_of(run).title}", f"{run.arguments['rho_min']:g}", DATASETS[run.data].title
    )


def by_noise(run: Run) -> TableCell:
    """A part for each data set, a row for each method, a column for each rate."""
    return TableCell(
        f"{MODELS[run.model].title}, {DATASETS[run.data].title}", variant_of(run).title, f"{run.label_noise:.0%}"
    )


def by_schedule(run: Run) -> TableCell:
    """A part for each form of BSAM, a row for each schedule of rho_min."""
    return TableCell(f"{MODELS[run.model].title}, {variant_of(run).title}", schedule_of(run), DATASETS[run.data].title)


def schedule_of(run: Run) -> str:
    """The course of rho_min in words.

    Example:
        >>> schedule_of(Run("bsam", {"rho_min": 0.1, "rho_min_floor": 0.1})), schedule_of(Run("bsam", {"rho_min": 0.1, "rho_min_floor": 0.05}))
        ('0.1, fixed', '0.1 to 0.05')
    """
    top, floor = run.arguments["rho_min"], run.arguments["rho_min_floor"]
    return f"{top:g}, fixed" if top == floor else f"{top:g} to {floor:g}"


@dataclass(frozen=True)
class Recipe:
    """An experiment.

    Args:
        name: by which it is called on the command line.
        title: what it shows.
        grid: its runs on a scale, of one seed.
        place: where a run stands in the table.
        rows: what the rows of the table are.
        table: of :mod:`bsam.recipes.paper`, whose numbers stand beside ours; empty where the paper has a figure only.
        figures: of :mod:`bsam.report.recipe_figures`, by name.
    """

    name: str
    title: str
    grid: Grid
    place: Callable[[Run], TableCell] = by_network
    rows: str = "method"
    table: str = ""
    figures: tuple[str, ...] = ()

    def runs(self, scale: str, seeds: int = 1) -> list[Run]:
        """All runs, seed by seed: the first seed of everything comes before the second of anything.

        Example:
            >>> [(run.method, run.seed) for run in RECIPES["training-curves"].runs("paper", seeds=2)][3:7]
            [('bsam', 0), ('bsam', 0), ('base', 1), ('sam', 1)]
        """
        check_count("seeds", seeds, high=MOST_SEEDS)
        grid = self.grid(scale)
        return [replace(run, seed=seed) for seed in range(seeds) for run in grid]

    def published(self, run: Run) -> Published | None:
        """What the paper has where this run stands."""
        method = "sgd" if run.method == "base" else run.method
        place = {"model": run.model, "data": run.data, "method": method, "label_noise": run.label_noise}
        match self.table:
            case "classification":
                return published(self.table, **{name: place[name] for name in ("model", "data", "method")})
            case "rho_min_study":
                return published(self.table, data=run.data, rho_min=run.arguments["rho_min"])
            case "label_noise":
                return published(self.table, **{name: place[name] for name in ("data", "method", "label_noise")})
        return None


RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe("classification", "Test accuracy of every method", classification, table="classification"),
        Recipe(
            "rho-min-study",
            "BSAM with different rho_min",
            rho_min_study,
            by_rho_min,
            "rho_min",
            "rho_min_study",
            ("accuracy_lines",),
        ),
        Recipe(
            "label-noise",
            "A part of the training labels flipped",
            label_noise,
            by_noise,
            "method",
            "label_noise",
            ("accuracy_lines",),
        ),
        Recipe(
            "training-curves",
            "Loss and accuracy during training",
            training_curves,
            table="classification",
            figures=("training_curves",),
        ),
        Recipe(
            "sharpness-curves",
            "MaxS, MinS and BilS during training",
            sharpness_curves,
            table="classification",
            figures=("sharpness_curves",),
        ),
        Recipe(
            "gradient-conflict",
            "Cosine of g and g_min under three schedules of rho_min",
            gradient_conflict,
            by_schedule,
            "rho_min",
            figures=("gradient_conflict",),
        ),
    )
}


def recipe_of(name: str) -> Recipe:
    """A recipe by its name.

    Example:
        >>> recipe_of("label-noise").title
        'A part of the training labels flipped'
        >>> recipe_of("labels")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        bsam.core.errors.BsamValueError: recipe must be one of classification, ..., gradient-conflict; got 'labels'
    """
    if name not in RECIPES:
        raise BsamValueError(f"recipe must be one of {', '.join(RECIPES)}; got {name!r}")
    return RECIPES[name]


def only(runs: Iterable[Run], names: Iterable[str]) -> list[Run]:
    """The runs of these columns.

    Example:
        >>> len(only(RECIPES["label-noise"].runs("paper"), ["sgd", "bsam-2"]))
        16
    """
    runs, names = list(runs), list(names)
    there = dict.fromkeys(variant_of(run).name for run in runs)
    for name in names:
        if name not in there:
            raise BsamValueError(f"the recipe has no method {name!r}: choose from {', '.join(there)}")
    return [run for run in runs if variant_of(run).name in names]
