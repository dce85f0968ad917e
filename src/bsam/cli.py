"""The command line."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from . import __version__
from .core.refusal import Refusal
from .recipes.demo import DEFAULT, SHARPNESS_RADIUS, TITLES, Plan, contenders, demo
from .report.catalogue import methods_table

REFUSED, INTERRUPTED = 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``bsam ...``; the exit status."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.command is None:
        parser.print_help()
        return 0
    try:
        arguments.run(arguments)
    except Refusal as refusal:
        print(f"bsam: {refusal}", file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:
        print(f"bsam: interrupted. Finished runs are kept in {arguments.out}; the same command goes on from there.", file=sys.stderr)
        return INTERRUPTED
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bsam", description="Train into flat minima: BSAM (Bilateral Sharpness-Aware Minimization) and its family.")
    parser.add_argument("--version", action="version", version=f"bsam {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command")
    command = commands.add_parser("methods", help="every method: what it costs, what it needs, what it is for", description="List the methods.")
    command.set_defaults(run=_methods)
    command = commands.add_parser(
        "demo",
        help="SGD, SAM and BSAM, or any other methods, on handwritten digits, in about a minute",
        description="Tune and train some methods on scikit-learn's digits, with clean labels and with 40 % of them flipped. "
        "Writes results.json (one row per method, noise rate and seed), about.json (how they came about) and figure.png. "
        "Interrupted, it goes on where it stopped when called again. Called with other methods on the same folder, it trains those that are missing, "
        "and writes the files anew, with the methods asked for last.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    command.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder for the results", metavar="FOLDER")
    command.add_argument("--methods", nargs="+", default=list(DEFAULT), help=f"which: {', '.join(TITLES)}", metavar="NAME")
    command.add_argument("--seed", type=int, default=Plan.seed, help="the first seed; the same seed gives the same numbers", metavar="N")
    command.add_argument("--seeds", type=int, default=Plan.seeds, help="how many seeds", metavar="N")
    command.add_argument("--epochs", type=int, default=Plan.epochs, help="epochs of every run", metavar="N")
    command.set_defaults(run=_demo)
    return parser


def _methods(_: argparse.Namespace) -> None:
    print(methods_table(shutil.get_terminal_size((120, 24)).columns))
    print("\nPasses: forward and backward, a step. Memory: beyond the base optimizer's own peak, in units of the parameters' size.")


def _demo(arguments: argparse.Namespace) -> None:
    from .report.extras import need

    for module, extra in (("rich", "demo"), ("sklearn", "demo"), ("matplotlib", "plot")):
        need(module, extra)  # now, not after a minute of training
    from rich.console import Console

    from .report.figures import curves_info, plot_curves
    from .report.progress import progress
    from .report.results import environment_info, rows_info, write_results
    from .report.tables import summary_info, summary_tables
    from .training.record import Record

    plan = Plan(arguments.seed, arguments.seeds, arguments.epochs, contenders(arguments.methods))
    versions = {name: environment_info()[name] for name in ("bsam", "torch")}
    record = Record(arguments.out, {**plan.settings(), **versions})
    console = Console()
    tuning, training = plan.total
    console.print(
        f"{', '.join(contender.title for contender in plan.contenders)} on digits, {plan.epochs} epochs a run:\n"
        f"{tuning} runs choose learning rate, weight decay and radii on a validation set,\n"
        f"{training} runs over {plan.seeds} seed(s) give the numbers."
    )
    with progress(console, {"tuning": tuning, "training": training}) as advance:
        cells = demo(plan, record, advance)
    figure = arguments.out / "figure.png"
    written = [*write_results(arguments.out, plan, cells), figure]
    plot_curves(curves_info(cells), figure)
    for table in summary_tables(summary_info(rows_info(cells))):
        console.print(table)
        console.print()
    console.print(
        "Accuracy: test set, last epoch, mean ± std (n seeds). Time: of a step, SGD = 1.\n"
        f"Loss, sharpness (radius {SHARPNESS_RADIUS}): training data, labels as trained on.\n"
        f"Tuning: {len(cells[0].tuning)} runs per method and noise rate on one seed, chosen by accuracy\n"
        "after the last epoch on the validation set, whose labels are clean."
    )
    console.print(f"Written: {', '.join(map(str, written))}", soft_wrap=True)
