"""Recipes: functions that return the runs of a study."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from ...common.checks import check_count
from ...common.errors import BsamTypeError, BsamValueError
from ..common.names import find_name, find_object
from ..common.printing import group_by
from ..config import Run, imported
from .choice import Tuning
from .planning import Plan
from .scales import SCALES, Scale
from .study import Study, seed_by_seed
from .tuning import with_tuned_radii
from .variants import baseline_row

MAX_SEEDS = 100  # all runs are listed before the first begins, which would take forever with a million seeds
SMOKE = "smoke: shows that it runs"  # a remark on meaningless numbers
RECIPES: dict[str, Recipe] = {}

Function: TypeAlias = Callable[[Scale], Sequence[Run | Plan]]
Notes: TypeAlias = Sequence[str] | Callable[[Scale], Sequence[str]]


@dataclass(frozen=True)
class Recipe:
    """An experiment by name; :func:`recipe` makes one from a function and describes the arguments."""

    name: str
    title: str
    function: Function
    scales: tuple[Scale, ...]
    tunable: bool = False
    tuning: Tuning | None = None
    seeds: int = 1
    published: str = ""
    notes: Notes = ()
    baseline: str | None = None
    at_equal_radii: bool = False
    timed: bool = False

    def scale(self, name: str | None = None) -> Scale:
        """Return one of its scales by name; the first by default."""
        scales = {scale.name: scale for scale in self.scales}
        if name is not None and name not in scales:
            raise BsamValueError(f"scale must be one of {', '.join(scales)}; got {name!r}")
        return self.scales[0] if name is None else scales[name]

    def study(
        self,
        scale: str | Scale | None = None,
        seeds: int | None = None,
        first_seed: int = 0,
        tune: bool = False,
        tune_full: bool = False,
    ) -> Study:
        """Return its runs, seed by seed: the first seed of every run comes before the second of any.

        A loss surface is computed for the first seed only.

        Args:
            scale: the scale, or its name.
            seeds: the number of seeds.
            first_seed: the first of them.
            tune: whether the radii are chosen first, on held-out training samples.
            tune_full: whether this trains every candidate to the end instead of halving their number on the way.
        """
        if tune_full and not tune:
            raise BsamValueError("--tune-full has no effect without --tune: add it")
        if tune and not self.tunable:
            raise BsamValueError(
                f"the recipe {self.name} is not tunable, as it sets its radii itself: leave --tune out"
            )
        scale = scale if isinstance(scale, Scale) else self.scale(scale)
        count = check_count("seeds", self.seeds if seeds is None else seeds, high=MAX_SEEDS)
        check_count("seed", first_seed, low=0)
        plans = self._plans(scale)
        if tune:  # SAM's candidates contain SAM at the sum of both radii
            plans = with_tuned_radii(plan for plan in plans if plan.about["variant"] != "sam-sum")
        is_smoke = scale.settings is SCALES["smoke"].settings
        return Study(
            name=self.name,
            title=f"{self.title} ({SMOKE})" if is_smoke else self.title,
            plans=seed_by_seed(plans, count, first_seed),
            scale=scale.name,
            settings=scale.settings,
            weights=scale.weights,
            tuning=Tuning("holdout", radii=True, halving=not tune_full) if tune else self.tuning,
            published=self.published,
            notes=self.notes(scale) if callable(self.notes) else self.notes,
            baseline=self.baseline,
            at_equal_radii=self.at_equal_radii,
            timed=self.timed,
            threads=scale.threads,
            workers=scale.workers,
        )

    def _plans(self, scale: Scale) -> list[Plan]:
        """Return the plans of one seed; raise if two of them share a cell, whose number would be a mean over both."""
        listed = self.function(scale)
        is_list = isinstance(listed, Sequence) and len(listed) > 0
        if not is_list or not all(isinstance(item, Run | Plan) for item in listed):
            raise BsamTypeError(f"the recipe {self.name} must return a list of Run or Plan, got {listed!r:.80}")
        plans = [item if isinstance(item, Plan) else Plan(item) for item in listed]
        plans = [replace(plan, run=imported(plan.run)) for plan in plans]
        if scale.weights and not any(plan.run.weights in scale.weights.values() for plan in plans):
            raise BsamValueError("the runs begin with random weights: leave --weights out")
        for names in (("section", "row", "column"), ("experiment", "row")):
            cells = [tuple(plan.about[name] for name in names) for plan in plans]
            if doubles := [cell for cell in cells if cells.count(cell) > 1]:
                raise BsamValueError(
                    f"two runs of the recipe {self.name} share the {', '.join(names)} {doubles[0]}: give them "
                    "different rows, Plan(run, row=...)"
                )
        experiments = group_by(plans, lambda plan: plan.about["experiment"]).values()
        rows_of = [dict.fromkeys(plan.about["row"] for plan in group) for group in experiments]
        if self.baseline is not None and not any(baseline_row(names, self.baseline) for names in rows_of):
            known = "; ".join(dict.fromkeys(plan.about["row"] for plan in plans))
            raise BsamValueError(f"baseline of the recipe {self.name} must be a row ({known}), got {self.baseline!r}")
        if not self.published:
            return plans
        return [replace(plan, published_table=plan.published_table or self.published) for plan in plans]


def recipe(
    title: str,
    *,
    scales: Sequence[str | Scale] = ("smoke", "short", "paper"),
    tunable: bool = False,
    tuning: Tuning | None = None,
    seeds: int = 1,
    published: str = "",
    notes: Notes = (),
    baseline: str | None = None,
    at_equal_radii: bool = False,
    timed: bool = False,
) -> Callable[[Function], Recipe]:
    """Make a recipe of a function that takes a scale and returns the runs of one seed, as ``Run`` or :class:`Plan`.

    Args:
        title: what it shows.
        scales: the scales that it can be run on, by name or as objects; the first is the default.
        tunable: whether ``--tune`` can choose its radii.
        tuning: how the candidates of its runs are chosen.
        seeds: the default number of seeds.
        published: a table of ``published.json``.
        notes: lines below the table, or a function of the scale that returns them.
        baseline: the row that sentences below the table compare the others with.
        at_equal_radii: whether they compare rows of equal total radius with the first of these.
        timed: whether the table has a column with the seconds of the training; by default, runs then share no device.

    Example:
        >>> @recipe("The radius of SAM", scales=["smoke"])
        ... def radii(scale):
        ...     return [Run("sam", {"rho": rho}, **scale.settings) for rho in (0.1, 0.2)]
        >>> [plan.about["row"] for plan in radii.study().plans]
        ['SAM, rho 0.1', 'SAM, rho 0.2']
    """
    if not scales:
        raise BsamValueError(f"scales of the recipe {title!r} must have at least one scale, got none")

    def make(function: Function) -> Recipe:
        known = tuple(
            scale if isinstance(scale, Scale) else SCALES[find_name("scale", scale, SCALES)] for scale in scales
        )
        name = function.__name__.replace("_", "-")
        made = Recipe(
            name,
            title,
            function,
            known,
            tunable=tunable,
            tuning=tuning,
            seeds=seeds,
            published=published,
            notes=notes,
            baseline=baseline,
            at_equal_radii=at_equal_radii,
            timed=timed,
        )
        is_ours = function.__module__.startswith(f"{__package__}.") and function.__module__ != __name__
        if is_ours and function.__qualname__ == function.__name__:  # no function in a function
            RECIPES[made.name] = made  # users name theirs as MODULE:RECIPE
        return made

    return make


def recipe_of(name: str) -> Recipe:
    """Return a recipe by its name in ``RECIPES``, or the one that ``module:variable`` names."""
    if ":" in name:
        loaded = find_object(name, "recipe")
        if not isinstance(loaded, Recipe):
            raise BsamValueError(
                f"{name} must be a function with @bsam.lab.recipes.recipe, got {type(loaded).__name__}"
            )
        return loaded
    if name not in RECIPES:
        raise BsamValueError(f"recipe must be one of {', '.join(RECIPES)}, or MODULE:RECIPE; got {name!r}")
    return RECIPES[name]
