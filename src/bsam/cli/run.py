"""``bsam run``: an experiment of the paper, run by run, into one folder."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch

from ..core.errors import BsamValueError
from ..core.extras import need
from ..recipes.catalogue import MOST_SEEDS, RECIPES, only, recipe_of
from ..recipes.runner import run_all, state_of
from ..recipes.scales import SCALES, scale_of
from .downloads import download_all
from .signals import terminable


def add(commands: Any) -> None:
    """Add the command."""
    scales = "; ".join(f"{scale.name}: {scale.about}" for scale in SCALES.values())
    command = commands.add_parser(
        "run",
        help="an experiment of the paper: all its runs, its table beside the published numbers, its figures",
        description=f"Run what is missing of an experiment. Recipes: {'; '.join(f'{name} ({recipe.title})' for name, recipe in RECIPES.items())}. "
        f"Scales: {scales}. Each run has a folder of its own below --out, as `bsam train` writes it: finished ones "
        "are not run again, interrupted ones go on, "
        "and several processes may work on one --out. In the end, table.md, results.json and figures are written "
        "there.",
    )
    command.add_argument("recipe", help=f"which: {', '.join(RECIPES)}", metavar="RECIPE")
    command.add_argument(
        "--scale", default="smoke", help=f"how much: {', '.join(SCALES)} (default: smoke)", metavar="SCALE"
    )
    how_many = f"how many, from 0 on, at most {MOST_SEEDS} (default: 1)"
    command.add_argument("--seeds", type=int, default=1, help=how_many, metavar="N")
    command.add_argument(
        "--only",
        nargs="+",
        default=[],
        help="run these methods only; the table has all that is there",
        metavar="METHOD",
    )
    command.add_argument(
        "--data-dir", type=Path, help="folder with the files of CIFAR; the scale smoke needs none", metavar="FOLDER"
    )
    command.add_argument(
        "--download",
        action="store_true",
        help="get the data sets from their authors into --data-dir first, unless they are there",
    )
    command.add_argument(
        "--out", type=Path, help="folder of the experiment (default: runs/RECIPE-SCALE)", metavar="FOLDER"
    )
    command.add_argument(
        "--device",
        default="auto",
        help="cpu, cuda, cuda:1 ...; auto takes a GPU if there is one (default: auto)",
        metavar="NAME",
    )
    command.add_argument(
        "--dry-run",
        action="store_true",
        help="print the plan: every run, how far it is, how long it will take; train nothing",
    )
    command.add_argument(
        "--report", action="store_true", help="write table and figures of what is finished; train nothing"
    )
    command.set_defaults(run=_run_recipe, kept="epochs")


def _run_recipe(arguments: argparse.Namespace) -> None:
    for module, extra in (("rich", "train"), ("safetensors", "train"), ("matplotlib", "plot")):
        need(module, extra)  # now, not after the last run
    from rich.console import Console

    from ..report.comparison import caption, comparison_info, comparison_tables
    from ..report.outcome import write_outcome
    from ..report.recipe_progress import plan_table, totals, watching

    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise BsamValueError(
            "`bsam run` trains one run at a time, on one device: instead of torchrun, start it several times on one "
            "--out, each with a --device"
        )
    recipe = recipe_of(arguments.recipe)
    runs = recipe.runs(arguments.scale, arguments.seeds)
    chosen = only(runs, arguments.only) if arguments.only else runs
    out: Path = arguments.out or Path("runs") / f"{recipe.name}-{arguments.scale}"
    arguments.out = out
    if arguments.dry_run or arguments.report:
        del arguments.kept  # nothing is trained
    console = Console()
    states = [state_of(run, out) for run in chosen]
    if arguments.dry_run:
        console.print(plan_table(recipe, states))
        console.print(totals(states), highlight=False)
        return
    if not arguments.report:
        if arguments.download:
            download_all((run.data for run in chosen), arguments.data_dir)
        console.print(f"{recipe.title}. {totals(states)}", highlight=False)
        threads, device = scale_of(arguments.scale).threads, None if arguments.device == "auto" else arguments.device
        if threads is not None:
            torch.set_num_threads(threads)
        with terminable(), watching(console, len(chosen)) as watcher:
            states = run_all(chosen, out, watcher, data_dir=arguments.data_dir, device=device)
        if not all(state.over for state in states):
            console.print("Another process is still at some of the runs.")
    everything = [state_of(run, out) for run in runs]
    written = write_outcome(out, recipe, arguments.scale, everything)  # before it is shown: whoever looks may go away
    entries = comparison_info(recipe, everything)
    for table in comparison_tables(recipe, entries):
        console.print(table)
        console.print()
    console.print("\n".join(caption(entries, runs[0])), highlight=False)
    console.print(f"Written: {', '.join(map(str, written))}", soft_wrap=True)
