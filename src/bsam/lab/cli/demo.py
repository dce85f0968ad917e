"""``bsam demo``: a first look, in about a minute."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..recipes import RECIPES
from ..recipes.demo_recipe import DEFAULT
from ..recipes.paper_recipes import DEMO
from ..recipes.variants import variants
from ..study_run import STUDY_NEEDS
from .run import run_command

DESCRIPTION = """\
Compare methods on scikit-learn's digits with 40 % wrong training labels: which of them memorise the wrong labels? Each
method's radius is chosen on a validation set. Writes a directory for each run, table.md, results.json (all numbers,
including the tuning runs) and report.html (a page with tables and interactive figures). If it is interrupted,
the same command continues. With other --methods and the same --out, it trains only the missing runs and rewrites the
files for the new methods. The same as `bsam run demo`, except that it trains on the CPU and that you can choose the
methods, the first seed and the number of epochs."""


def add(command: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    flag = command.add_argument
    out = "folder for the results (default: runs/demo)"
    flag("--out", type=Path, default=Path("runs/demo"), help=out, metavar="FOLDER")
    methods = f"methods to compare: {', '.join(variants())} (default: {' '.join(DEFAULT)})"
    flag("--methods", nargs="+", default=list(DEFAULT), help=methods, metavar="NAME")
    first = "first seed; the same seed gives the same numbers (default: 0)"
    flag("--seed", type=int, default=0, help=first, metavar="N")
    seeds = RECIPES["demo"].seeds
    flag("--seeds", type=int, default=seeds, help=f"number of seeds (default: {seeds})", metavar="N")
    epochs = f"epochs per run (default: {DEMO['epochs']})"
    flag("--epochs", type=int, default=DEMO["epochs"], help=epochs, metavar="N")
    needs = {**STUDY_NEEDS, "sklearn": "demo"}
    command.set_defaults(run=_demo, needs=needs, device="cpu", dry_run=False, report=False)


def _demo(arguments: argparse.Namespace) -> None:
    chosen = {"methods": arguments.methods, "epochs": arguments.epochs}
    run_command(arguments, RECIPES["demo"](seeds=arguments.seeds, first_seed=arguments.seed, **chosen))
