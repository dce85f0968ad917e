"""``bsam run``: train all runs of an experiment and write its table, figures and page."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ...common.checks import check_number
from ...common.errors import BsamValueError
from ..data import check_data
from ..recipes import RECIPES, recipe_of
from ..recipes.choices import (
    base_choice,
    base_tuning_runs,
    choices,
    choices_of,
    tuned,
    tuning_runs,
    untuned,
    with_tuned_base,
    with_tuned_settings,
)
from ..recipes.experiments import MAX_SEEDS, Recipe
from ..recipes.initial_weights import check_weights_given, with_weights
from ..recipes.scales import SCALES, Scale
from ..recipes.selection import select, with_initial_runs
from ..recipes.states import states_of
from ..recipes.summaries import table_info
from ..running.executors import RUNS_PER_GPU, Executor, InProcess, LocalProcesses, default_slots
from ..running.ray_tasks import ray_tasks
from ..running.runner import RunsFailed, run_all
from ..training.config import Run
from ..training.environment import pick_device
from ..training.run_dir import run_dir_name
from .downloads import download_all
from .run_flags import CACHE_HELP, DEVICE_HELP, FlagGroups, add_checkpoint_flag
from .signals import terminable

DESCRIPTION = """\
Train the missing runs of an experiment, then write table.md, results.json, figures and report.html, a page with all of
them, to --out. `bsam list recipes` describes the experiments. Each run has a directory below --out, like those of
`bsam train`. Finished runs are not trained again, interrupted ones continue, and several processes may work on the same
--out."""
NEEDS = dict.fromkeys(("rich", "safetensors", "matplotlib"), "demo")  # the extra that installs all three


def add(commands: Any) -> None:
    """Add the command."""
    command = commands.add_parser(
        "run",
        help="run an experiment: train all its runs, write a table with the published numbers, figures and a page",
        description=DESCRIPTION,
    )
    groups = FlagGroups(command)
    flag = groups["Runs"].add_argument
    command.add_argument(
        "recipe", help=f"experiment: {', '.join(RECIPES)}; or MODULE:RECIPE for your own", metavar="RECIPE"
    )
    scales = "; ".join(f"{scale.name} ({scale.about})" for scale in SCALES.values())
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
    files = (
        "files from tools/convert_weights.py. The transfer recipe trains the networks of these files instead of "
        "downloading weights; the pose recipe needs a file for resnet50 at the scales short and paper"
    )
    flag("--weights", nargs="+", default=[], help=files, metavar="FILE")
    out = "folder of the experiment (default: runs/RECIPE-SCALE, or runs/RECIPE-SCALE-tuned with --tune)"
    add_running_flags(groups, out, f"on a CPU 1, or {SCALES['demo'].workers} for demo")
    command.set_defaults(run=_run, saved_items="epochs", needs=NEEDS)


def add_running_flags(groups: FlagGroups, out: str, on_cpu: str) -> None:
    """Add the flags for where data and results are, and how the runs of an experiment are trained.

    Args:
        groups: the headings of the command's flags.
        out: the help of ``--out``.
        on_cpu: the default of ``--jobs`` on a CPU, in words.
    """
    flag = groups["Data"].add_argument
    flag(
        "--data-dir",
        type=Path,
        help="folder with the files of the data sets (not needed for digits and stick figures)",
        metavar="FOLDER",
    )
    flag("--cache-dir", type=Path, help=CACHE_HELP, metavar="FOLDER")
    first = "first download the CIFAR and Fashion-MNIST data that the runs need into --data-dir, if it is not there yet"
    flag("--download", action="store_true", help=first)
    flag = groups["Precision and speed"].add_argument
    flag("--device", default="auto", help=DEVICE_HELP, metavar="NAME")
    jobs = "train N runs at a time on this machine, spread over its GPUs; extra jobs share the GPUs"
    default = f"{RUNS_PER_GPU} per GPU if NVIDIA MPS is installed, otherwise 1 per GPU"
    flag("--jobs", type=int, help=f"{jobs} (default: {default}; {on_cpu})", metavar="N")
    ray = (
        "train the runs as Ray tasks, on the cluster whose head node is at HOST:PORT (auto: the cluster that runs on "
        "this machine), or on this machine alone if no address is given. All nodes need bsam, --out and --data-dir"
    )
    flag("--ray", nargs="?", const="", help=ray, metavar="HOST:PORT")
    share = "with --ray: GPUs per run, for example 0.33 for three runs on one GPU (default: 1 if there are GPUs)"
    flag("--gpus-per-run", type=float, help=share, metavar="SHARE")
    flag = groups["Output"].add_argument
    flag("--out", type=Path, help=out, metavar="FOLDER")
    plan = "print every run, its state and the time left, without training"
    flag("--dry-run", action="store_true", help=plan)
    flag("--report", action="store_true", help="write table, figures and page of the finished runs, without training")
    add_checkpoint_flag(groups["Output"])


def refuse_torchrun(command: str) -> None:
    """Raise if torchrun started this process."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise BsamValueError(
            f"`bsam {command}` trains each run on one device and does not work with torchrun: use --jobs, or start it "
            "several times with the same --out and different --device"
        )


def _run(arguments: argparse.Namespace) -> None:
    refuse_torchrun("run")
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


def run_recipe(
    arguments: argparse.Namespace,
    recipe: Recipe,
    runs: Sequence[Run],
    chosen: Sequence[Run],
    baseline: str | None = None,
) -> None:
    """Train the chosen runs of a recipe and write the results of all runs.

    With ``--dry-run`` print the plan instead; with ``--report`` only write the results.

    Args:
        arguments: the parsed flags of ``bsam run``.
        recipe: the experiment.
        runs: all its runs, before tuning.
        chosen: the runs to train.
        baseline: the title of the method that the page compares the others with; None takes the base optimizer.
    """
    from rich.console import Console

    from ..report.recipe_results import check_folder, text_below, write_report, write_results
    from ..report.recipe_table import sections_info
    from ..report.tuning_section import how_chosen, tuning_sections
    from .run_console import plan_table, rich_tables, totals

    scale = arguments.scale or recipe.scale_names[0]
    recipe = recipe.at(scale)
    name = recipe.name if recipe.name == scale else f"{recipe.name}-{scale}" + "-tuned" * arguments.tune
    arguments.out = out = arguments.out or Path("runs") / name
    if arguments.dry_run or arguments.report:
        del arguments.saved_items  # nothing is trained: an interrupt must not mention saved epochs
    console = Console(markup=False)
    failed: Mapping[str, str] = {}
    check_folder(out, recipe)
    states = states_of(_planned(recipe, chosen, out), out)
    if arguments.dry_run:
        console.print(plan_table(recipe, states))
        console.print(totals(states), highlight=False)
        return
    if not arguments.report:
        console.print(f"{recipe.title}. {totals(states)}", highlight=False)
        unfinished = sum(not state.ended for state in states)
        failed = _train(arguments, recipe, scale, chosen, unfinished, console)
    base, base_trials = base_choice(recipe, runs, out), base_tuning_runs(recipe, runs)
    runs, chosen = (with_tuned_base(some, base) for some in (runs, chosen))
    finals = states_of(with_tuned_settings(recipe, runs, out), out)
    tuning = states_of([*base_trials, *tuning_runs(recipe, runs)], out)
    chosen_settings, how = choices(recipe, runs, out), how_chosen(finals, choices_of(recipe, runs, out), base)
    selected = {run_dir_name(run) for run in with_tuned_settings(recipe, chosen, out)}
    # write before printing, which raises if the output pipe is closed
    written = write_results(out, recipe, scale, finals, tuning, chosen_settings, selected, base, how)
    pages = write_report(out, recipe, [*finals, *tuning], baseline, how)
    summaries = table_info(recipe, finals)
    for table in rich_tables([*sections_info(recipe, summaries), *tuning_sections(recipe, chosen_settings, base)]):
        console.print(table)
        console.print()
    notes = text_below(recipe, summaries, finals, chosen_settings, selected, base)
    console.print("\n".join(notes), highlight=False)
    console.print(f"Written: {', '.join(map(str, [*written, *pages]))}", soft_wrap=True)
    for page in pages:
        console.print(f"Open {page} in a browser.", soft_wrap=True)
    if failed:
        raise RunsFailed(failed, len(states))


def _planned(recipe: Recipe, runs: Sequence[Run], out: Path) -> list[Run]:
    """Return all runs to train, in order: those that tune the base optimizer, those that tune radii, the final ones."""
    based = with_tuned_base(runs, base_choice(recipe, runs, out))
    return [*base_tuning_runs(recipe, runs), *tuning_runs(recipe, based), *with_tuned_settings(recipe, based, out)]


def _train(
    arguments: argparse.Namespace, recipe: Recipe, scale: str, chosen: Sequence[Run], unfinished: int, console: Any
) -> Mapping[str, str]:
    """Train the chosen runs. Return why runs failed or diverged, by the name of the run directory."""
    from .run_console import show_runs

    out, settings = arguments.out, recipe.scale(scale)
    if arguments.download:
        download_all((run.data for run in chosen), arguments.data_dir)
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    options = {
        "data_dir": arguments.data_dir,
        "cache_dir": arguments.cache_dir,
        "device": arguments.device,
        "checkpoint_every": check_number("checkpoint_every", arguments.checkpoint_every, low=0),
    }
    make_executor = _executor(arguments, settings, unfinished, console.print)
    check_data({run.data for run in chosen}, arguments.data_dir)
    failed: dict[str, str] = {}
    told: set[str] = set()

    def run(runs: Sequence[Run], stage: str) -> None:
        try:
            with show_runs(recipe, len(runs), stage, told) as callbacks:
                run_all(runs, out, callbacks, executor, **options)
        except RunsFailed as error:
            failed.update(error.failed)
        except KeyboardInterrupt:
            console.print("Stopping.")
            raise

    with terminable(), make_executor as executor:
        if trials := base_tuning_runs(recipe, chosen):
            run(trials, "tuning the base optimizer")
        base = base_choice(recipe, chosen, out)
        if base is None or base.settings is not None:
            chosen = with_tuned_base(chosen, base)
            if trials := tuning_runs(recipe, chosen):
                run(trials, "tuning")
            waiting = untuned(recipe, chosen, out)
        else:
            waiting = {run_dir_name(final): (final, [state.path.name for state in base.states]) for final in chosen}
        failed |= {name: "its tuning failed" for name, (_, trials) in waiting.items() if failed.keys() & set(trials)}
        ready = [final for final in with_tuned_settings(recipe, chosen, out) if run_dir_name(final) not in waiting]
        run(ready, "runs")
    states = states_of([*(final for final, _ in waiting.values()), *ready], out)
    if not all(state.ended or state.path.name in failed for state in states):
        console.print("Some runs are not finished: another process is training them, or the runs that they start from.")
    return {**failed, **{state.path.name: state.diverged for state in states if state.diverged is not None}}


def _executor(
    arguments: argparse.Namespace, scale: Scale, unfinished: int, on_message: Callable[[str], None]
) -> contextlib.AbstractContextManager[Executor]:
    if arguments.ray is not None:
        if arguments.jobs is not None:
            raise BsamValueError("--jobs starts processes on this machine and --ray starts Ray tasks: use one of them")
        return ray_tasks(arguments.ray, arguments.gpus_per_run, arguments.device)
    if arguments.gpus_per_run is not None:
        raise BsamValueError(
            "--gpus-per-run needs --ray. Without Ray, runs share GPUs if --jobs exceeds the number of GPUs"
        )
    is_default = arguments.jobs is None
    jobs = default_slots(arguments.device, unfinished, scale.workers) if is_default else arguments.jobs
    if jobs == 1:
        pick_device(arguments.device)  # raises before the first run, as the other executors do
        return InProcess()
    return LocalProcesses(jobs, arguments.device, scale.threads, on_message, is_default)
