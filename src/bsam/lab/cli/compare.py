"""``bsam compare``: does a method help on this data?"""

from __future__ import annotations

import argparse

from ..recipes.compare import (
    COMPARE,
    DEFAULT_METHODS,
    LEFT_OUT,
    SEEDS,
    comparison_folder,
    plan_comparison,
)
from ..recipes.recipe import MAX_SEEDS
from ..recipes.start import check_start
from ..recipes.variants import variants
from ..study_run import STUDY_NEEDS, refuse_torchrun
from .run import TUNE_FULL_HELP, add_running_flags, run_command
from .run_flags import add_run_flags, settings_of

DESCRIPTION = """\
Train a network with several methods and several seeds, and say which methods are better than the first one, by how
much, whether that is more than chance, and at what cost. Takes the settings of `bsam train`, except the method, its
arguments, the seed and the evaluation split; methods have the names and arguments that `bsam run` uses. Writes a
directory for each run, table.md, results.json and report.html to --out. If it is interrupted, the same command
continues; with more --seeds or --methods, only the new runs are trained."""


def add(command: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    flag = command.add_argument_group("Comparison").add_argument
    names = (
        f"at least two of base, {', '.join(variants())} and MODULE:CLASS for a method of your own; arguments follow a "
        f"name, as in sam:rho=0.1 (default: {' '.join(DEFAULT_METHODS)})"
    )
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
    flag("--tune-full", action="store_true", help=TUNE_FULL_HELP)
    tune_seeds = "number of seeds for each candidate of --tune and --tune-base (default: 1)"
    flag("--tune-seeds", type=int, default=1, help=tune_seeds, metavar="N")
    groups = add_run_flags(command, LEFT_OUT)
    out = (
        "folder for the results (default: runs/compare-MODEL-DATA, followed by -tuned with --tune, and by -base with "
        "--tune-base)"
    )
    add_running_flags(groups, out, "on a CPU 1")
    command.set_defaults(run=_compare, needs=STUDY_NEEDS)


def _compare(arguments: argparse.Namespace) -> None:
    refuse_torchrun(COMPARE)
    study = plan_comparison(
        arguments.methods,
        settings_of(arguments),
        seeds=arguments.seeds,
        baseline=arguments.baseline,
        tune=arguments.tune,
        tune_base=arguments.tune_base,
        tune_seeds=arguments.tune_seeds,
        tune_full=arguments.tune_full,
        data_dir=arguments.data_dir,
    )
    if not (arguments.dry_run or arguments.report):
        check_start(study.plans[0].run, arguments.data_dir)
    arguments.out = arguments.out or comparison_folder(study)
    run_command(arguments, study)
