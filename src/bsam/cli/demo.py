"""``bsam demo``: a first look, in about a minute."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..recipes import RECIPES
from ..recipes.digits_demo import DEFAULT, demo_recipe
from ..recipes.scales import SCALES
from ..recipes.variants import variants
from .run import NEEDS, run_recipe

DESCRIPTION = """\
Train some methods on scikit-learn's digits with 40 % of the training labels flipped: which of them memorise the
flipped labels? Only radii are chosen, on the validation set. Writes a directory for each run, table.md, results.json
(all numbers, tuning included) and the picture demo.png. Interrupted, it continues when called again. Called with other
methods on the same folder, it trains those that are missing, and writes the files again with the methods asked for
last. The same as bsam run demo, with the methods to choose and on the CPU."""


def add(commands: Any) -> None:
    """Add the command."""
    command = commands.add_parser(
        "demo",
        help="SGD, SAM and BSAM, or any other methods, on digits with flipped labels, in about a minute",
        description=DESCRIPTION,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    flag = command.add_argument
    flag("--out", type=Path, default=Path("runs/demo"), help="folder for the results", metavar="FOLDER")
    flag("--methods", nargs="+", default=list(DEFAULT), help=f"which: {', '.join(variants())}", metavar="NAME")
    same = "the first seed; the same seed gives the same numbers"
    flag("--seed", type=int, default=0, help=same, metavar="N")
    flag("--seeds", type=int, default=RECIPES["demo"].seeds, help="how many seeds", metavar="N")
    epochs = SCALES["demo"].settings["epochs"]
    flag("--epochs", type=int, default=epochs, help="epochs of every run", metavar="N")
    others = ("scale", "data_dir", "cache_dir", "jobs", "ray", "gpus_per_run", "download", "dry_run", "report", "tune")
    unset = dict.fromkeys(others)  # the flags of `bsam run` that this command does not have
    command.set_defaults(run=_demo, saved_items="runs", needs={**NEEDS, "sklearn": "demo"}, device="cpu", **unset)


def _demo(arguments: argparse.Namespace) -> None:
    recipe = demo_recipe(arguments.methods)
    runs = recipe.runs(seeds=arguments.seeds, first_seed=arguments.seed)
    epochs = arguments.epochs
    runs = [replace(run, epochs=epochs, warmup=max(0, min(run.warmup, epochs))) for run in runs]
    run_recipe(arguments, recipe, runs, runs)
