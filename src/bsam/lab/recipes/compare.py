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
from .experiments import MAX_SEEDS, Recipe
from .scales import Scale
from .tuning import base_tuning, radius_tuning
from .variants import arguments, variant_of, variants

COMPARE = "compare"
DEFAULT_METHODS = (BASE, "sam", "bsam")


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


def compare_recipe(
    runs: Sequence[Run], tune: bool = False, *, tune_base: bool = False, seeds: int = 1, split: Split = "holdout"
) -> Recipe:
    """Return a recipe that trains these runs with each seed.

    Args:
        runs: the runs of :func:`compared_runs`.
        tune: whether to choose each method's radius first.
        tune_base: whether to choose the base optimizer's learning rate and weight decay before that, for all methods.
        seeds: the number of tuning seeds.
        split: the split to tune on, from :func:`tuning_split`.
    """
    check_count("tune_seeds", seeds, high=MAX_SEEDS)
    titles = [variant_of(run).title for run in runs]
    subject = f"{model_entry(runs[0].model).title}, {dataset_entry(runs[0].data).title}"
    return Recipe(
        COMPARE,
        f"{', '.join(titles[:-1])} and {titles[-1]}: {subject}",
        lambda scale: list(runs),
        scales=(Scale(COMPARE, "the network and the data set of the command"),),
        tuning=radius_tuning(split, seeds) if tune else None,
        base_tuning=base_tuning(split, seeds) if tune_base else None,
    )
