"""Recipes: functions that return the runs of a study."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, TypeAlias

from ...common.checks import check_count
from ...common.errors import BsamError, BsamTypeError, BsamValueError
from ..common.names import describe_error, find_function, is_own
from ..common.printing import group_by
from ..config import Run, imported
from ..tasks import task_of
from .plan import Plan
from .start import with_weights
from .study import Study, seed_by_seed
from .tuning import Tuning, with_tuned_radii
from .variants import baseline_row

MAX_SEEDS = 100  # all runs are listed before the first begins, which would take forever with a million seeds

Function: TypeAlias = Callable[..., Sequence[Run | Plan]]  # takes the arguments of a scale


@dataclass(frozen=True)
class Recipe:
    """A function with :func:`recipe`: called with the name of a scale, it makes a study of the runs that it returns.

    Args:
        name: the name of the function, with hyphens.
        title: what it shows.
        function: the function.
        scales: sets of its arguments, by name; the first is the default.
        seeds: the default number of seeds.
        tunable: whether ``tune`` can choose its radii.
        study_without_runs: returns it, from the name of the scale and the arguments.
    """

    name: str
    title: str
    function: Function
    scales: Mapping[str, Mapping[str, Any]]
    seeds: int
    tunable: bool
    study_without_runs: Callable[[str, Mapping[str, Any]], Study]

    def __call__(
        self,
        scale: str | None = None,
        seeds: int | None = None,
        first_seed: int = 0,
        *,
        tune: bool = False,
        tune_full: bool = False,
        weight_files: Mapping[str, str] | None = None,
        **changes: Any,
    ) -> Study:
        """Return the study of its runs, seed by seed: the first seed of every run comes before the second of any.

        A loss surface is computed for the first seed only.

        Args:
            scale: the name of the scale; None is the first one.
            seeds: the number of seeds; None is that of the recipe.
            first_seed: the first of them.
            tune: whether the radii are chosen first, on held-out training samples.
            tune_full: whether this trains every candidate to the end instead of halving their number on the way.
            weight_files: files with initial weights, by network, for the runs that begin with pretrained weights.
            changes: arguments of the function that differ from those of the scale.

        Example:
            >>> from bsam.lab.recipes import RECIPES
            >>> study = RECIPES["radius"]("smoke", seeds=2, totals=(0.1,))
            >>> [(plan.about["row"], plan.run.seed) for plan in study.plans][:2]
            [('SGD', 0), ('SAM, total radius 0.1', 0)]
        """
        if tune_full and not tune:
            raise BsamValueError("--tune-full has no effect without --tune: add it")
        if tune and not self.tunable:
            raise BsamValueError(
                f"the recipe {self.name} is not tunable, as it sets its radii itself: leave --tune out"
            )
        scale = next(iter(self.scales)) if scale is None else scale
        if scale not in self.scales:
            raise BsamValueError(f"scale must be one of {', '.join(self.scales)}; got {scale!r}")
        check_count("seed", first_seed, low=0)
        count = check_count("seeds", self.seeds if seeds is None else seeds, high=MAX_SEEDS)
        arguments = {**self.scales[scale], **changes}
        try:
            listed = self.function(**arguments)
            study = self.study_without_runs(scale, arguments)
        except BsamError:
            raise
        except Exception as error:
            raise BsamValueError(
                f"the recipe {self.name} cannot be planned: {describe_error(error, self.function.__module__)}. Correct "
                "its function or its scales"
            ) from error
        plans = self._plans(listed)
        settings = plans[0].run.settings()
        # a folder holds the results of one set of settings; lists, such as those of networks, may be extended
        shared = {name: settings[name] for name, value in arguments.items() if name in settings and not _is_list(value)}
        if weight_files:
            plans = with_weights(plans, weight_files)
        if study.published:
            plans = [replace(plan, published_table=plan.published_table or study.published) for plan in plans]
        self._check(plans, study.baseline)
        if tune:  # SAM's candidates contain SAM at the sum of both radii
            plans = with_tuned_radii(plan for plan in plans if plan.about["variant"] != "sam-sum")
            study = replace(study, tuning=Tuning("holdout", radii=True, halving=not tune_full))
        return replace(
            study, plans=seed_by_seed(plans, count, first_seed), settings=shared, weights=dict(weight_files or {})
        )

    def _plans(self, listed: Sequence[Run | Plan]) -> list[Plan]:
        """Return what the function returned as plans."""
        if not _is_list(listed) or not listed or not all(isinstance(item, Run | Plan) for item in listed):
            raise BsamTypeError(f"the recipe {self.name} must return a list of Run or Plan, got {listed!r:.80}")
        plans = [item if isinstance(item, Plan) else Plan(item) for item in listed]
        return [replace(plan, run=imported(plan.run)) if is_own(plan.run.method) else plan for plan in plans]

    def _check(self, plans: Sequence[Plan], baseline: str | None) -> None:
        """Raise if a network does not exist, if two runs share a cell of the table, or if no row is the baseline."""
        for run in {plan.run.model: plan.run for plan in plans}.values():
            if "model" in task_of(run).functions(run):
                find_function(run.model, "model")
        for names in (("section", "row", "column"), ("experiment", "row")):
            cell_of = itemgetter(*names)
            cells = [cell_of(plan.about) for plan in plans]
            if doubles := [cell for cell in cells if cells.count(cell) > 1]:
                raise BsamValueError(
                    f"two runs of the recipe {self.name} share the {', '.join(names)} {doubles[0]}: give them "
                    "different rows, Plan(run, row=...)"
                )
        experiments = group_by(plans, lambda plan: plan.about["experiment"]).values()
        if baseline is not None and not any(baseline_row(_rows(group), baseline) for group in experiments):
            known = "; ".join(_rows(plans))
            raise BsamValueError(f"baseline of the recipe {self.name} must be a row ({known}), got {baseline!r}")


def recipe(
    title: str,
    *,
    scales: Mapping[str, Mapping[str, Any]],
    seeds: int = 1,
    tunable: bool = False,
    tuning: Tuning | None = None,
    published: str = "",
    notes: Sequence[str] | Callable[..., Sequence[str]] = (),
    baseline: str | Callable[..., str] | None = None,
    at_equal_radii: bool = False,
    timed: bool = False,
    remarks: Mapping[str, str] | None = None,
    threads: Mapping[str, int] | None = None,
    workers: Mapping[str, int] | None = None,
) -> Callable[[Function], Recipe]:
    """Make a recipe of a function that takes keyword arguments and returns the runs of one seed.

    The function returns a list of ``Run`` or, for runs with a row or a number of their own, :class:`Plan`.

    Args:
        title: what it shows.
        scales: named sets of the function's arguments, such as settings of all runs; the first is the default.
        seeds: the default number of seeds.
        tunable: whether ``--tune`` can choose its radii.
        tuning: how the candidates of its runs are chosen.
        published: a table of ``published.json``.
        notes: lines below the table, or a function of the same arguments that returns them.
        baseline: the row that sentences below the table compare the others with, or a function of the same arguments
            that returns it.
        at_equal_radii: whether they compare rows of equal total radius with the first of these.
        timed: whether the table has a column with the seconds of the training; by default, runs then share no device.
        remarks: what the title says of a scale, by its name.
        threads: the number of torch's threads on a CPU, by scale; otherwise it is unchanged.
        workers: the number of processes that train at the same time on a CPU, by scale; otherwise 1.

    Example:
        >>> @recipe(
        ...     "The radius of SAM", scales={"small": {"epochs": 2}, "large": {"epochs": 20}}
        ... )
        ... def radii(**settings):
        ...     return [Run("sam", {"rho": rho}, **settings) for rho in (0.1, 0.2)]
        >>> [(plan.about["row"], plan.run.epochs) for plan in radii("large").plans]
        [('SAM, rho 0.1', 20), ('SAM, rho 0.2', 20)]
    """
    is_named = isinstance(scales, Mapping) and all(isinstance(scale, Mapping) for scale in scales.values())
    if not is_named or not scales:
        raise BsamValueError(
            f"scales of the recipe {title!r} must be named sets of arguments, such as "
            f'{{"small": {{"epochs": 8}}}}; got {scales!r:.80}'
        )

    def make(function: Function) -> Recipe:
        name = function.__name__.replace("_", "-")

        def study_without_runs(scale: str, arguments: Mapping[str, Any]) -> Study:
            remark = (remarks or {}).get(scale)
            return Study(
                name=name,
                title=title if remark is None else f"{title} ({scale}: {remark})",
                plans=(),
                scale=scale,
                tuning=tuning,
                published=published,
                notes=notes(**arguments) if callable(notes) else notes,
                baseline=baseline(**arguments) if callable(baseline) else baseline,
                at_equal_radii=at_equal_radii,
                timed=timed,
                threads=(threads or {}).get(scale),
                workers=(workers or {}).get(scale, 1),
            )

        return Recipe(name, title, function, scales, seeds, tunable, study_without_runs)

    return make


def _rows(plans: Iterable[Plan]) -> dict[str, None]:
    """Return the rows of the plans in their order."""
    return dict.fromkeys(plan.about["row"] for plan in plans)


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)
