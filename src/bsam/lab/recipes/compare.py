"""Compare methods on one network and one data set: the runs of ``bsam compare``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...common.checks import check_count, is_number
from ...common.errors import BsamValueError
from ..common.names import OWN_CLASS, find_name, is_own, name_of, with_arguments
from ..config import BASE, RADIUS_SCHEDULE, Method, Run, Split, method_class
from ..tasks import task_of
from ..training.run_dir import subject_name
from .plan import Plan
from .recipe import MAX_SEEDS
from .study import Study, seed_by_seed
from .tuning import Tuning, with_tuned_radii
from .variants import MethodVariant, all_arguments, arguments_on, variant_of, variants

COMPARE = "compare"
DEFAULT_METHODS = (BASE, "sam", "bsam")
SEEDS = 3
# set by the comparison: tuning runs are evaluated on validation or held-out samples, final runs on the test set
LEFT_OUT = ("method", "arguments", "seed", "eval_split")


def compared_runs(methods: Sequence[str | Method], settings: Mapping[str, Any]) -> dict[str, Run]:
    """Return the run of each method, by name, in the order of ``methods``.

    Args:
        methods: names of :func:`~bsam.lab.recipes.variants.variants`, ``"base"``, ``MODULE:CLASS`` or classes; at least
            two different ones. A name may be followed by arguments: ``"sam:rho=0.1"``.
        settings: settings of :class:`~bsam.lab.training.Run` that all methods share; methods without a radius
            leave out its warm-up and its start.

    Example:
        >>> runs = compared_runs(["sgd", "bsam-2"], {"epochs": 10})
        >>> [(name, run.method, run.arguments) for name, run in runs.items()]
        [('sgd', 'base', {}), ('bsam-2', 'bsam', {'passes': 2})]
    """
    if isinstance(methods, str):
        raise BsamValueError(f"methods must be a list of names, got {methods!r}: pass [{methods!r}, ...]")
    chosen = [_chosen(method) for method in methods]
    if any(name == "sgd" for _, name, _ in chosen):  # all share its base optimizer, and what follows from it
        settings = {"base": "sgd", **settings}
    runs: dict[str, Run] = {}
    without_radius = {name: value for name, value in settings.items() if name not in RADIUS_SCHEDULE}
    for text, name, given in chosen:
        if name in (BASE, "sgd"):
            run = Run.of(name, given, **without_radius)  # raises if sgd is combined with another base
        else:
            variant = MethodVariant(name, "", name) if is_own(name) else variants()[name]
            accepted = without_radius if method_class(variant.method).is_loss else settings
            _check_numbers(variant.method, given)
            usual = arguments_on(variant, settings.get("data", Run.data))
            run = Run.of(variant.method, {**usual, **given}, **accepted)
        if run not in runs.values():  # sgd and base may be the same
            runs[text] = run
    set_but_unused = [name for name in RADIUS_SCHEDULE if settings.get(name)]
    if set_but_unused and not any(getattr(run, name) for run in runs.values() for name in set_but_unused):
        raise BsamValueError(f"{set_but_unused[0]} needs a method with a radius, and none is compared: leave it out")
    if len(runs) < 2:
        raise BsamValueError(f"methods must name at least two different methods to compare, got {list(methods)!r}")
    return runs


def _check_numbers(method: str, given: Mapping[str, Any]) -> None:
    """Raise if an argument is no number, but its default is: before other methods are trained."""
    defaults = all_arguments(method, {})
    for name, value in given.items():
        if is_number(defaults.get(name)) and not is_number(value):
            raise BsamValueError(f"{name} of {method} must be a number, got {value!r}")


def _chosen(method: str | Method) -> tuple[str, str, dict[str, Any]]:
    """Return a method that the user chose: what it is called in the comparison, its name and its arguments."""
    text = method if isinstance(method, str) else name_of(method, "method")
    name, given = with_arguments(text)
    if not is_own(name):
        name = find_name("method", name, (BASE, *variants()), OWN_CLASS)
    return text if given else name, name, given


def tuning_split(run: Run, data_dir: Path | None = None) -> Split:
    """Return the split to tune on: the validation set of a run's data, or held-out training samples if it has none.

    Example:
        >>> tuning_split(Run("sam")), tuning_split(Run("sam", data="cifar10"))
        ('validation', 'holdout')
    """
    return "validation" if task_of(run).has_validation(run, data_dir) else "holdout"


def plan_comparison(
    methods: Sequence[str | Method],
    settings: Mapping[str, Any],
    *,
    seeds: int = SEEDS,
    baseline: str | None = None,
    tune: bool = False,
    tune_base: bool = False,
    tune_seeds: int = 1,
    tune_full: bool = False,
    data_dir: Path | None = None,
) -> Study:
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
    for flag, is_given in {"--tune-seeds": tune_seeds != 1, "--tune-full": tune_full}.items():
        if is_given and not (tune or tune_base):
            raise BsamValueError(f"{flag} has no effect without --tune or --tune-base: add one of them")
    check_count("tune_seeds", tune_seeds, high=MAX_SEEDS)
    tuning = None
    if tune or tune_base:
        tuning = Tuning(tuning_split(first, data_dir), tune_seeds, tune, tune_base, not tune_full)
    plans = [Plan(run, order=number) for number, run in enumerate(compared.values())]
    if tune:
        plans = with_tuned_radii(plans)
    titles = [plan.about["row"] for plan in plans]
    shared = {name: value for name, value in first.settings().items() if name not in LEFT_OUT}
    return Study(
        name=COMPARE,
        title=f"{', '.join(titles[:-1])} and {titles[-1]}: {', '.join(task_of(first).titles(first))}",
        plans=seed_by_seed(plans, check_count("seeds", seeds, high=MAX_SEEDS)),
        scale=COMPARE,
        settings=shared | {name: settings.get(name, 0.0) for name in RADIUS_SCHEDULE},
        tuning=tuning,
        baseline=variant_of(first).title,
    )


def comparison_folder(study: Study) -> Path:
    """Return the default folder of a comparison."""
    tuning = study.tuning or Tuning()
    suffix = ("-tuned" if tuning.radii else "") + ("-base" if tuning.base else "")
    return Path("runs") / f"{COMPARE}-{subject_name(study.plans[0].run)}{suffix}"
