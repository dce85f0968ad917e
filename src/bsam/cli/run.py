"""``bsam run``: an experiment, all its runs, into one folder."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..common.errors import BsamValueError
from ..data import check_data
from ..recipes import RECIPES, recipe_of
from ..recipes.choices import choices, tuned, tuning_runs, untuned, with_tuned_settings
from ..recipes.experiments import MAX_SEEDS, Recipe
from ..recipes.initial_weights import check_weights_given, with_weights
from ..recipes.scales import SCALES, Scale
from ..recipes.selection import select, with_initial_runs
from ..recipes.states import states_of
from ..recipes.summaries import table_info
from ..running.executors import Executor, InProcess, LocalProcesses
from ..running.ray_tasks import ray_tasks
from ..running.runner import RunsFailed, run_all
from ..training.config import Run
from ..training.run_dir import run_dir_name
from .downloads import download_all
from .run_flags import CACHE_HELP
from .signals import terminable

DESCRIPTION = """\
Run what is missing of an experiment. Recipes: {recipes}. Scales: {scales}. Each run has a directory of its own below
--out, as `bsam train` writes it: finished runs are not run again, interrupted ones continue, and several processes
may work on one --out. At the end, table.md, results.json and figures are written there."""
NEEDS = dict.fromkeys(("rich", "safetensors", "matplotlib"), "demo")  # one extra that has all


def add(commands: Any) -> None:
    """Add the command."""
    recipes = "; ".join(f"{name} ({recipe.title})" for name, recipe in RECIPES.items())
    scales = "; ".join(f"{scale.name}: {scale.about}" for scale in SCALES.values())
    command = commands.add_parser(
        "run",
        help="an experiment: all its runs, its table beside the published numbers, its figures",
        description=DESCRIPTION.format(recipes=recipes, scales=scales),
    )
    flag = command.add_argument
    flag("recipe", help=f"which: {', '.join(RECIPES)}; or MODULE:RECIPE of your own", metavar="RECIPE")
    flag("--scale", help=f"how much: {', '.join(SCALES)} (default: smoke; of demo: demo)", metavar="SCALE")
    seeds = f"how many, from 0 on, at most {MAX_SEEDS} (default: 1; of demo: {RECIPES['demo'].seeds})"
    flag("--seeds", type=int, help=seeds, metavar="N")
    all_of_it = "run these {} only; the table has all that is there"
    flag("--only", nargs="+", default=[], help=all_of_it.format("methods"), metavar="METHOD")
    flag("--models", nargs="+", default=[], help=all_of_it.format("networks"), metavar="MODEL")
    flag("--data", nargs="+", default=[], help=all_of_it.format("data sets"), metavar="DATA")
    radii = (
        "choose each method's radius first: 1/2, 1, 2 or 4 times the paper's, by the score on a tenth of the training "
        "samples, which the tuning runs do not train on; never on test samples"
    )
    flag("--tune", action="store_true", help=radii)
    files = (
        "of transfer: train the networks of these files, of tools/convert_weights.py, instead of downloading weights; "
        "of pose: a file for resnet50, which short and paper need"
    )
    flag("--weights", nargs="+", default=[], help=files, metavar="FILE")
    flag(
        "--data-dir",
        type=Path,
        help="folder with the files of the data sets; digits and stick figures need none",
        metavar="FOLDER",
    )
    flag("--cache-dir", type=Path, help=CACHE_HELP, metavar="FOLDER")
    first = "get CIFAR and Fashion-MNIST from their authors into --data-dir first, unless they are there"
    flag("--download", action="store_true", help=first)
    flag(
        "--out",
        type=Path,
        help="folder of the experiment (default: runs/RECIPE-SCALE, with --tune runs/RECIPE-SCALE-tuned)",
        metavar="FOLDER",
    )
    device = "cpu, cuda, cuda:1 ...; auto takes a GPU if there is one (default: auto)"
    flag("--device", default="auto", help=device, metavar="NAME")
    jobs = "train N runs at a time on this machine, spread over its GPUs; more of them than GPUs share these"
    flag("--jobs", type=int, help=f"{jobs} (default: 1; of demo: 2)", metavar="N")
    ray = (
        "train the runs as tasks of Ray: on the cluster whose head node listens at HOST:PORT (auto: the one that runs "
        "on this machine), or without an address on this machine alone. All nodes need bsam, --out and --data-dir"
    )
    flag("--ray", nargs="?", const="", help=ray, metavar="HOST:PORT")
    share = "with --ray: how much of a GPU a run takes, 0.33 for three on one (default: 1 where there are GPUs)"
    flag("--gpus-per-run", type=float, help=share, metavar="SHARE")
    plan = "print the plan: every run, its state, how long it will take; train nothing"
    flag("--dry-run", action="store_true", help=plan)
    flag("--report", action="store_true", help="write table and figures of what is finished; train nothing")
    command.set_defaults(run=_run, saved_items="epochs", needs=NEEDS)


def _run(arguments: argparse.Namespace) -> None:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise BsamValueError(
            "`bsam run` trains each run on one device: instead of torchrun, start it several times on one --out, each "
            "with a --device"
        )
    recipe = recipe_of(arguments.recipe)
    if arguments.tune:
        recipe = tuned(recipe)
    runs = recipe.runs(arguments.scale, recipe.seeds if arguments.seeds is None else arguments.seeds)
    if arguments.weights:
        runs = with_weights(runs, arguments.weights, arguments.data_dir)
    elif not arguments.dry_run:
        check_weights_given(runs)
    chosen = select(runs, arguments.only, arguments.models, arguments.data)
    run_recipe(arguments, recipe, runs, with_initial_runs(chosen, runs))


def run_recipe(arguments: argparse.Namespace, recipe: Recipe, runs: Sequence[Run], chosen: Sequence[Run]) -> None:
    """Run the chosen runs of a recipe and write the results of all; or print the plan, or write the results alone.

    Args:
        arguments: of the command: ``scale``, ``out``, ``device``, ``data_dir``, ``download``, ``dry_run``, ``report``.
        recipe: the experiment.
        runs: all its runs, before tuning.
        chosen: those to train.
    """
    from rich.console import Console

    from ..report.plan import plan_table, totals
    from ..report.results import check_folder, text_below, write_results
    from ..report.tables import rich_tables, sections_info
    from ..report.tuning import tuning_sections

    scale = arguments.scale or recipe.scale_names[0]
    recipe = recipe.at(scale)
    name = recipe.name if recipe.name == scale else f"{recipe.name}-{scale}" + "-tuned" * arguments.tune
    arguments.out = out = arguments.out or Path("runs") / name
    if arguments.dry_run or arguments.report:
        del arguments.saved_items  # nothing is trained
    console = Console(markup=False)
    failed: Mapping[str, str] = {}
    check_folder(out, recipe)
    states = states_of([*tuning_runs(recipe, chosen), *with_tuned_settings(recipe, chosen, out)], out)
    if arguments.dry_run:
        console.print(plan_table(recipe, states))
        console.print(totals(states), highlight=False)
        return
    if not arguments.report:
        console.print(f"{recipe.title}. {totals(states)}", highlight=False)
        failed = _train(arguments, recipe, scale, chosen, console)
    finals = states_of(with_tuned_settings(recipe, runs, out), out)
    tuning = states_of(tuning_runs(recipe, runs), out)
    chosen_settings = choices(recipe, runs, out)
    selected = {run_dir_name(run) for run in with_tuned_settings(recipe, chosen, out)}
    # written before it is shown: the reader of a pipe may be gone
    written = write_results(out, recipe, scale, finals, tuning, chosen_settings, selected)
    summaries = table_info(recipe, finals)
    for table in rich_tables([*sections_info(recipe, summaries), *tuning_sections(recipe, chosen_settings)]):
        console.print(table)
        console.print()
    below = text_below(recipe, summaries, finals, chosen_settings, selected)
    console.print("\n".join(below), highlight=False)
    console.print(f"Written: {', '.join(map(str, written))}", soft_wrap=True)
    if failed:
        raise RunsFailed(failed, len(states))


def _train(
    arguments: argparse.Namespace, recipe: Recipe, scale: str, chosen: Sequence[Run], console: Any
) -> Mapping[str, str]:
    """Train; returns why runs failed or diverged, by the names of their directories."""
    from ..report.plan import show_runs

    out, how = arguments.out, recipe.scale(scale)
    if arguments.download:
        download_all((run.data for run in chosen), arguments.data_dir)
    if how.threads is not None:
        torch.set_num_threads(how.threads)
    options = {"data_dir": arguments.data_dir, "device": arguments.device, "cache_dir": arguments.cache_dir}
    make_executor = _executor(arguments, how, console.print)
    check_data({run.data for run in chosen}, arguments.data_dir)
    failed: dict[str, str] = {}

    def run(runs: Sequence[Run], stage: str) -> None:
        try:
            with show_runs(recipe, len(runs), stage) as callbacks:
                run_all(runs, out, callbacks, executor, **options)
        except RunsFailed as error:
            failed.update(error.failed)
        except KeyboardInterrupt:
            console.print("Stopping.")
            raise

    with terminable(), make_executor as executor:
        if trials := tuning_runs(recipe, chosen):
            run(trials, "tuning")
        waiting = untuned(recipe, chosen, out)
        failed |= {name: "its tuning failed" for name, (_, trials) in waiting.items() if failed.keys() & set(trials)}
        ready = [each for each in with_tuned_settings(recipe, chosen, out) if run_dir_name(each) not in waiting]
        run(ready, "runs")
    states = states_of([*(each for each, _ in waiting.values()), *ready], out)
    if not all(state.ended or state.path.name in failed for state in states):
        console.print("Some runs are not finished: another process is running them, or what they begin with.")
    return {**failed, **{state.path.name: state.diverged for state in states if state.diverged is not None}}


def _executor(
    arguments: argparse.Namespace, scale: Scale, on_message: Callable[[str], None]
) -> contextlib.AbstractContextManager[Executor]:
    jobs = scale.workers if arguments.jobs is None else arguments.jobs
    if arguments.ray is not None:
        if arguments.jobs is not None:
            raise BsamValueError("--jobs is for processes of this machine, --ray for tasks of Ray: give one of them")
        return ray_tasks(arguments.ray, arguments.gpus_per_run, arguments.device)
    if arguments.gpus_per_run is not None:
        raise BsamValueError("--gpus-per-run is for --ray: --jobs above the number of GPUs lets runs share them")
    return InProcess() if jobs == 1 else LocalProcesses(jobs, arguments.device, scale.threads, on_message)
