"""``bsam run``: train all runs of an experiment and write its table and page."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from ..common.printing import say, terminal_width, wrapped
from ..common.termination import SAVED, resumable
from ..recipes import RECIPES, recipe_of
from ..recipes.paper_recipes import SCALES
from ..recipes.plan import select
from ..recipes.recipe import MAX_SEEDS
from ..recipes.start import check_weights_given, weights_by_network
from ..recipes.study import Study
from ..running.executors import RUNS_PER_GPU
from ..running.runner import RunsFailed
from ..study_run import STUDY_NEEDS, plan_study, refuse_torchrun, run_study
from ..training.machine import Machine
from ..training.run_dir import CHECKPOINT, RunState
from .run_console import plan_table, show_runs, totals
from .run_flags import CACHE_HELP, DEVICE_HELP, FlagGroups, add_checkpoint_flag, machine_of

if TYPE_CHECKING:  # `bsam list` works without pandas
    from ..report.recipe_results import StudyResult

DESCRIPTION = """\
Train the missing runs of an experiment, then write table.md, results.json and report.html, a page with tables and
figures, to --out. `bsam list recipes` describes the experiments. Each run has a directory below --out, like those of
`bsam train`. Finished runs are not trained again, interrupted ones continue, and several processes may work on the same
--out."""
TUNE_FULL_HELP = (
    "train every candidate to the end. By default, all are trained for a third of the epochs, only the better half "
    "goes on, and training stops when one is left, which costs about a third"
)


def add(command: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    groups: FlagGroups = cache(command.add_argument_group)
    flag = groups("Runs").add_argument
    recipes = f"experiment: {', '.join(RECIPES)}; or MODULE:RECIPE for your own"
    command.add_argument("recipe", help=recipes, metavar="RECIPE")
    scales = "; ".join(f"{name} ({description})" for name, description in SCALES.items())
    flag("--scale", help=f"{scales} (default: smoke, or demo for the demo recipe)".replace("%", "%%"), metavar="SCALE")
    seeds = f"number of seeds, starting at 0, at most {MAX_SEEDS}"
    flag("--seeds", type=int, help=f"{seeds} (default: 1, or {RECIPES['demo'].seeds} for demo)", metavar="N")
    only = "train only {}; the table shows all finished runs"
    flag("--only", nargs="+", default=[], help=only.format("these methods"), metavar="METHOD")
    flag("--models", nargs="+", default=[], help=only.format("these networks"), metavar="MODEL")
    flag("--data", nargs="+", default=[], help=only.format("on these data sets"), metavar="DATA")
    tune = (
        "first choose each method's radius: 1/2, 1, 2 or 4 times the paper's, by the score on a fifth of the training "
        "samples (at least 200, at most half), which the tuning runs do not train on. Test samples are never used for "
        "tuning"
    )
    flag("--tune", action="store_true", help=tune)
    flag("--tune-full", action="store_true", help=TUNE_FULL_HELP)
    files = (
        "files from tools/convert_weights.py. The transfer recipe trains the networks of these files instead of "
        "downloading weights; the pose recipe needs a file for resnet50 at the scales short and paper"
    )
    flag("--weights", nargs="+", default=[], help=files, metavar="FILE")
    out = "folder of the experiment (default: runs/RECIPE-SCALE, or runs/RECIPE-SCALE-tuned with --tune)"
    add_running_flags(groups, out, "on a CPU 1, or 2 for demo")
    command.set_defaults(run=_run, needs=STUDY_NEEDS)


def add_running_flags(groups: FlagGroups, out: str, on_cpu: str) -> None:
    """Add the flags for where data and results are, and how the runs of an experiment are trained.

    Args:
        groups: the headings of the command's flags.
        out: the help of ``--out``.
        on_cpu: the default of ``--jobs`` on a CPU, in words.
    """
    flag = groups("Data").add_argument
    files = "folder with the files of the data sets (not needed for digits and stick figures)"
    flag("--data-dir", type=Path, help=files, metavar="FOLDER")
    flag("--cache-dir", type=Path, help=CACHE_HELP, metavar="FOLDER")
    first = "first download the CIFAR and Fashion-MNIST data that the runs need into --data-dir, if it is not there yet"
    flag("--download", action="store_true", help=first)
    flag = groups("Precision and speed").add_argument
    flag("--device", default="auto", help=DEVICE_HELP, metavar="NAME")
    jobs = "train N runs at a time on this machine, spread over its GPUs; extra jobs share the GPUs"
    default = f"{RUNS_PER_GPU} per GPU if NVIDIA MPS is installed and the recipe is not timed, otherwise 1 per GPU"
    flag("--jobs", type=int, help=f"{jobs} (default: {default}; {on_cpu})", metavar="N")
    ray = (
        "train the runs as Ray tasks, on the cluster whose head node is at HOST:PORT (auto: the cluster that runs on "
        "this machine), or on this machine alone if no address is given. All nodes need bsam, --out and --data-dir"
    )
    flag("--ray", nargs="?", const="", help=ray, metavar="HOST:PORT")
    share = "with --ray: GPUs per run, for example 0.33 for three runs on one GPU (default: 1 if there are GPUs)"
    flag("--gpus-per-run", type=float, help=share, metavar="SHARE")
    flag = groups("Output").add_argument
    flag("--out", type=Path, help=out, metavar="FOLDER")
    plan = "print every run, its state and the time left, without training"
    flag("--dry-run", action="store_true", help=plan)
    flag("--report", action="store_true", help="write table and page of the finished runs, without training")
    add_checkpoint_flag(groups("Output"))


def _run(arguments: argparse.Namespace) -> None:
    refuse_torchrun("run")
    recipe = recipe_of(arguments.recipe)
    study = recipe(
        arguments.scale,
        arguments.seeds,
        tune=arguments.tune,
        tune_full=arguments.tune_full,
        weight_files=weights_by_network(arguments.weights, arguments.data_dir),
    )
    if not arguments.weights and not arguments.dry_run:
        check_weights_given(study.plans)
    selected = select(study.plans, arguments.only, arguments.models, arguments.data)
    folder = f"{recipe.name}-{study.scale}" + ("-tuned" if arguments.tune else "")
    arguments.out = arguments.out or Path("runs") / (recipe.name if recipe.name == study.scale else folder)
    run_command(arguments, replace(study, selected=[plan.name for plan in selected]))


def run_command(arguments: argparse.Namespace, study: Study) -> None:
    """Run a study; with ``--dry-run`` print the plan instead, with ``--report`` only write the results."""
    if arguments.dry_run:
        states = plan_study(study, arguments.out).selected_states
        say(plan_table(study, states).to_text(terminal_width()))
        say(wrapped(totals(states)))
        if failed := {state.path.name: state.unreadable for state in states if state.unreadable is not None}:
            raise RunsFailed(failed, len(states))
        return
    if arguments.report:
        result = show_study(study, arguments.out, train=False)
    else:
        machine = machine_of(arguments)
        with resumable(arguments.out, CHECKPOINT, SAVED):
            result = show_study(study, arguments.out, machine)
    if result.failure is not None:
        raise result.failure


def show_study(study: Study, out: Path, machine: Machine = Machine(), train: bool = True) -> StudyResult:
    """Run a study, and print its progress and its results; the arguments are those of :func:`run_study`."""

    def on_begin(states: Sequence[RunState]) -> None:
        say(wrapped(f"{study.title}. {totals(states)}"))

    with show_runs() as callbacks:
        result = run_study(study, out, machine, replace(callbacks, on_begin=on_begin), train)
    for table in result.tables:
        say(f"{table.to_text(terminal_width())}\n")
    say("\n".join(map(wrapped, result.notes)))
    say(f"Written: {', '.join(map(str, result.files))}")
    if result.page is not None:
        say(f"Open {result.page} in a browser.")
    return result
