"""``bsam compare``: does a method help on this data?"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from ...common.errors import BsamValueError
from ...common.extras import require_packages
from ..recipes.choices import base_choice, choices_of, with_tuned_base, with_tuned_settings
from ..recipes.compare import COMPARE, DEFAULT_METHODS, compare_recipe, compared_runs, tuning_split
from ..recipes.experiments import MAX_SEEDS, Recipe
from ..recipes.states import states_of
from ..recipes.variants import variant_of, variants
from ..report.method_comparison import ComparisonResult, compare_states
from ..running.runner import RunsFailed
from ..tasks.image_inputs import check_weights
from ..training.config import Run
from ..training.initial_run import initial_network
from ..training.names import find_name
from ..training.run_dir import RunState, subject_name
from ..training.run_writer import CHECKPOINT_EVERY
from .run import NEEDS, add_running_flags, refuse_torchrun, run_recipe
from .run_flags import add_run_flags, settings_of

DESCRIPTION = """\
Train a network with several methods and several seeds, and say which methods are better than the first one, by how
much, whether that is more than chance, and at what cost. Takes the settings of `bsam train`, except the method, its
arguments, the seed and the evaluation split; methods have the names and arguments that `bsam run` uses. Writes a
directory for each run, table.md, results.json and report.html to --out. If it is interrupted, the same command
continues; with more --seeds or --methods, only the new runs are trained."""
SEEDS = 3
# compare sets them itself: tuning runs are evaluated on validation or held-out samples, final runs on the test set
LEFT_OUT = ("method", "arguments", "seed", "eval_split")


def add(commands: Any) -> None:
    """Add the command."""
    command = commands.add_parser(
        COMPARE,
        help="compare methods on your data: which is better, by how much, and is it more than chance?",
        description=DESCRIPTION,
    )
    flag = command.add_argument_group("Comparison").add_argument
    names = f"at least two of base, {', '.join(variants())} (default: {' '.join(DEFAULT_METHODS)})"
    flag("--methods", nargs="+", default=list(DEFAULT_METHODS), help=names, metavar="METHOD")
    baseline = "the method that the others are compared with (default: the first of --methods)"
    flag("--baseline", help=baseline, metavar="METHOD")
    seeds = f"number of seeds, starting at 0, at most {MAX_SEEDS} (default: {SEEDS})"
    flag("--seeds", type=int, default=SEEDS, help=seeds, metavar="N")
    tune = (
        "first choose each method's radius: 1/2, 1, 2 or 4 times the default, by the score on the validation set or, "
        "if there is none, on a fifth of the training samples (at least 200, at most half), which the tuning runs do "
        "not train on. Test samples are never used for tuning"
    )
    flag("--tune", action="store_true", help=tune)
    tune_base = (
        "before that, choose learning rate and weight decay in the same way, for the base optimizer alone: 0.3, 1 or 3 "
        "times --lr, each with 0.1, 1, 10 or 100 times --weight-decay. All methods then use them"
    )
    flag("--tune-base", action="store_true", help=tune_base)
    tune_seeds = "number of seeds for each candidate of --tune and --tune-base (default: 1)"
    flag("--tune-seeds", type=int, default=1, help=tune_seeds, metavar="N")
    groups = add_run_flags(command, LEFT_OUT)
    out = (
        "folder for the results (default: runs/compare-MODEL-DATA, followed by -tuned with --tune, and by -base with "
        "--tune-base)"
    )
    add_running_flags(groups, out, "on a CPU 1")
    command.set_defaults(run=_compare, saved_items="epochs", needs=NEEDS, scale=None)


def _compare(arguments: argparse.Namespace) -> None:
    recipe, runs, baseline = _prepare(arguments)
    run_recipe(arguments, recipe, runs, runs, baseline)


def _prepare(arguments: argparse.Namespace) -> tuple[Recipe, list[Run], str]:
    """Return the recipe, its runs and the title of the baseline, and set the default of ``--out``."""
    refuse_torchrun(COMPARE)
    settings = settings_of(arguments)
    if settings.get("init") is not None:
        settings["init"] = str(Path(settings["init"]).expanduser().resolve())  # relative paths are looked up in --out
    compared = compared_runs(arguments.methods, settings)
    first = next(iter(compared.values()))
    if arguments.baseline is not None:
        first = compared[find_name("baseline", arguments.baseline, compared)]
    baseline = variant_of(first).title
    if arguments.tune_seeds != 1 and not (arguments.tune or arguments.tune_base):
        raise BsamValueError("--tune-seeds has no effect without --tune or --tune-base: add one of them")
    tune: dict[str, Any] = {"tune": arguments.tune, "tune_base": arguments.tune_base, "seeds": arguments.tune_seeds}
    if arguments.tune or arguments.tune_base:
        tune["split"] = tuning_split(first.data, arguments.data_dir)
    recipe = compare_recipe(list(compared.values()), **tune)
    runs = recipe.runs(seeds=arguments.seeds)
    recipe = replace(
        recipe, findings=lambda summaries, states: [str(_result(recipe, runs, states, baseline, arguments.out))]
    )
    if not (arguments.dry_run or arguments.report):
        check_weights(first, arguments.data_dir)
        initial_network(first)
    suffix = "-tuned" * arguments.tune + "-base" * arguments.tune_base
    arguments.out = arguments.out or Path("runs") / f"{COMPARE}-{subject_name(first)}{suffix}"
    return recipe, runs, baseline


def _result(
    recipe: Recipe, runs: Sequence[Run], states: Sequence[RunState], baseline: str, out: Path, page: Path | None = None
) -> ComparisonResult:
    """Compare the final runs, whose states are given; ``runs`` are the runs before tuning."""
    base = base_choice(recipe, runs, out)
    return compare_states(states, baseline, choices_of(recipe, with_tuned_base(runs, base), out), base, page)


def compare(
    data: str,
    model: str | None = None,
    methods: Sequence[str] = DEFAULT_METHODS,
    *,
    seeds: int = SEEDS,
    tune: bool = False,
    tune_base: bool = False,
    tune_seeds: int = 1,
    out: str | Path | None = None,
    baseline: str | None = None,
    jobs: int = 1,
    device: str | None = None,
    data_dir: str | Path | None = None,
    cache_dir: str | Path | None = None,
    checkpoint_every: float = CHECKPOINT_EVERY,
    **settings: Any,
) -> ComparisonResult:
    """Train a network with several methods and seeds, and compare them, as ``bsam compare`` does.

    Finished runs in ``out`` are not trained again, and interrupted ones continue.

    Args:
        data: a data set from ``bsam list data``, ``folder:PATH`` or ``MODULE:FUNCTION``.
        model: a network from ``bsam list models``, or ``timm:NAME``; None takes that of the weights or the data set.
        methods: at least two of ``"base"`` and the names in ``bsam.lab.recipes.variants()``.
        seeds: the number of seeds.
        tune: whether to choose each method's radius first, on validation samples or held-out training samples.
        tune_base: whether to choose learning rate and weight decay before that, for the base optimizer alone; all
            methods then use them.
        tune_seeds: the number of seeds of each candidate.
        out: the folder for the results; None is ``runs/compare-MODEL-DATA``, followed by ``-tuned`` if ``tune`` and by
            ``-base`` if ``tune_base``.
        baseline: the method that the others are compared with; None takes the first one.
        jobs: the number of runs to train at a time on this machine. If it is above 1, other processes
            train them, so a script needs ``if __name__ == "__main__":`` around its code, as for ``multiprocessing``.
        device: the device; None uses a GPU if there is one.
        data_dir: the folder with the files of the data set and of the weights.
        cache_dir: the folder for decoded images; None is next to the image files.
        checkpoint_every: the minimum time between two checkpoints of a run, in seconds.
        settings: further settings of :class:`bsam.lab.training.config.Run` for all runs.

    Raises:
        bsam.BsamError: at the end, if any run failed. Runs that diverged are counted in the result instead.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as out:
        ...     result = compare(
        ...         "digits",
        ...         methods=["sgd", "sam"],
        ...         seeds=2,
        ...         out=out,
        ...         epochs=1,
        ...         limit_train=128,
        ...     )  # doctest: +ELLIPSIS
        SGD and SAM: DigitsNet, Digits. 4 runs: 0 finished, ...
        >>> [(row.method, row.n, row.passes) for row in result.methods]
        [('SGD', 2, 1), ('SAM', 2, 2)]
    """
    from ..report.recipe_results import PAGE

    require_packages(NEEDS)
    known = [field.name for field in fields(Run) if field.name not in LEFT_OUT]
    for name in settings:
        find_name("setting", name, known)
    arguments = argparse.Namespace(
        **settings,
        data=data,
        methods=methods,
        seeds=seeds,
        tune=tune,
        tune_base=tune_base,
        tune_seeds=tune_seeds,
        out=None if out is None else Path(out),
        baseline=baseline,
        jobs=jobs,
        device=device or "auto",
        data_dir=None if data_dir is None else Path(data_dir),
        cache_dir=None if cache_dir is None else Path(cache_dir),
        checkpoint_every=checkpoint_every,
        scale=None,
        download=False,
        ray=None,
        gpus_per_run=None,
        dry_run=False,
        report=False,
    )
    if model is not None:
        arguments.model = model
    recipe, runs, title = _prepare(arguments)

    def states() -> list[RunState]:
        based = with_tuned_base(runs, base_choice(recipe, runs, arguments.out))
        return states_of(with_tuned_settings(recipe, based, arguments.out), arguments.out)

    try:
        run_recipe(arguments, recipe, runs, runs, title)
    except RunsFailed:
        if not all(state.ended for state in states()):
            raise
    page = arguments.out / PAGE
    return _result(recipe, runs, states(), title, arguments.out, page if page.exists() else None)
