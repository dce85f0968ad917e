"""Compare methods on one network and one data set: the recipe of ``bsam compare``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...common.checks import check_count
from ...common.errors import BsamValueError
from ..common.names import find_name
from ..data import dataset_entry
from ..models import model_entry
from ..tasks.settings import Split
from ..training.config import BASE, Run
from ..training.run_dir import subject_name
from .candidates import Tuning, base_candidates, radius_tuning
from .experiments import MAX_SEEDS, PlannedRuns, Recipe
from .scales import Scale
from .variants import arguments, variant_of, variants

COMPARE = "compare"
DEFAULT_METHODS = (BASE, "sam", "bsam")
SEEDS = 3
# set by the comparison: tuning runs are evaluated on validation or held-out samples, final runs on the test set
LEFT_OUT = ("method", "arguments", "seed", "eval_split")


def compared_runs(methods: Sequence[str], settings: Mapping[str, Any]) -> dict[str, Run]:
    """Return the run of each method, by name, in the order of ``methods``.

    Args:
        methods: names of :func:`~bsam.lab.recipes.variants.variants`, or ``"base"``; at least two different ones.
        settings: settings of :class:`~bsam.lab.training.config.Run` that all methods share.

    Example:
        >>> runs = compared_runs(["sgd", "bsam-2"], {"epochs": 10})
        >>> [(name, run.method, run.arguments) for name, run in runs.items()]
        [('sgd', 'base', {}), ('bsam-2', 'bsam', {'passes': 2})]
    """
    if isinstance(methods, str):
        raise BsamValueError(f"methods must be a list of names, got {methods!r}: pass [{methods!r}, ...]")
    runs: dict[str, Run] = {}
    for method in methods:
        name = find_name("method", method, (BASE, *variants()))
        if name in (BASE, "sgd"):
            run = Run(name, **settings)  # raises if sgd is combined with another base
        else:
            variant = variants()[name]
            run = Run(variant.method, arguments(variant, settings.get("data", Run.data)), **settings)
        if run not in runs.values():  # sgd and base may be the same
            runs[name] = run
    if len(runs) < 2:
        raise BsamValueError(f"methods must name at least two different methods to compare, got {list(methods)!r}")
    return runs


def tuning_split(data: str, data_dir: Path | None = None) -> Split:
    """Return the split to tune on: the data set's validation set, or held-out training samples if it has none.

    Example:
        >>> tuning_split("digits"), tuning_split("cifar10")
        ('validation', 'holdout')
    """
    return "validation" if dataset_entry(data).resolve(data_dir).has_validation(data_dir) else "holdout"


def plan_comparison(
    methods: Sequence[str],
    settings: Mapping[str, Any],
    *,
    seeds: int = SEEDS,
    baseline: str | None = None,
    tune: bool = False,
    tune_base: bool = False,
    tune_seeds: int = 1,
    data_dir: Path | None = None,
) -> PlannedRuns:
    """Return the runs of a comparison.

    ``methods`` and ``settings`` are those of :func:`compared_runs`, the other arguments those of ``bsam.lab.compare``.
    """
    if settings.get("init") is not None:
        # relative paths would be looked up in the folder of the experiment
        settings = {**settings, "init": str(Path(settings["init"]).expanduser().resolve())}
    compared = compared_runs(methods, settings)
    first = next(iter(compared.values()))
    if baseline is not None:
        first = compared[find_name("baseline", baseline, compared)]
    if tune_seeds != 1 and not (tune or tune_base):
        raise BsamValueError("--tune-seeds has no effect without --tune or --tune-base: add one of them")
    split = tuning_split(first.data, data_dir) if tune or tune_base else "holdout"
    check_count("tune_seeds", tune_seeds, high=MAX_SEEDS)
    titles = [variant_of(run).title for run in compared.values()]
    subject = f"{model_entry(first.model).title}, {dataset_entry(first.data).title}"
    recipe = Recipe(
        COMPARE,
        f"{', '.join(titles[:-1])} and {titles[-1]}: {subject}",
        lambda scale: list(compared.values()),
        scales=(Scale(COMPARE, "the network and the data set of the command"),),
        tuning=radius_tuning(split, tune_seeds) if tune else None,
        base_tuning=Tuning(base_candidates, split, seeds=tune_seeds) if tune_base else None,
    )
    runs = recipe.runs(seeds=seeds)
    return PlannedRuns(recipe, COMPARE, runs, runs, variant_of(first).title)


def comparison_folder(runs: PlannedRuns) -> Path:
    """Return the default folder of a comparison."""
    tuned = "" if runs.recipe.tuning is None else "-tuned"
    base = "" if runs.recipe.base_tuning is None else "-base"
    return Path("runs") / f"{COMPARE}-{subject_name(runs.runs[0])}{tuned}{base}"
