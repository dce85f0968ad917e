"""``bsam demo``: a first look, in about a minute."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..recipes.demo import DEFAULT, SHARPNESS_RADIUS, Plan, candidates_of, demo, titles


def add(commands: Any) -> None:
    """Add the command."""
    command = commands.add_parser(
        "demo",
        help="SGD, SAM and BSAM, or any other methods, on handwritten digits, in about a minute",
        description="Tune and train some methods on scikit-learn's digits, with clean labels and with 40 % of them flipped. "
        "Writes results.json (one row per method, noise rate and seed), about.json (how they came about), figure.png "
        "and landscape.png. "
        "Interrupted, it goes on where it stopped when called again. Called with other methods on the same folder, it "
        "trains those that are missing, "
        "and writes the files anew, with the methods asked for last.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    command.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder for the results", metavar="FOLDER")
    command.add_argument(
        "--methods", nargs="+", default=list(DEFAULT), help=f"which: {', '.join(titles())}", metavar="NAME"
    )
    command.add_argument(
        "--seed", type=int, default=Plan.seed, help="the first seed; the same seed gives the same numbers", metavar="N"
    )
    command.add_argument("--seeds", type=int, default=Plan.seeds, help="how many seeds", metavar="N")
    command.add_argument("--epochs", type=int, default=Plan.epochs, help="epochs of every run", metavar="N")
    command.set_defaults(run=_demo, kept="runs")


def _demo(arguments: argparse.Namespace) -> None:
    from ..core.extras import need

    for module, extra in (("rich", "demo"), ("sklearn", "demo"), ("matplotlib", "plot")):
        need(module, extra)  # now, not after a minute of training
    from rich.console import Console

    from ..report.figures import curves_info, plot_curves
    from ..report.landscapes import plot_contours, reliefs_info
    from ..report.progress import progress
    from ..report.results import rows_info, write_results
    from ..report.tables import summary_info, summary_tables
    from ..training.environment import environment_info
    from ..training.lock import locked
    from ..training.loop import CURVATURE_SAMPLES
    from ..training.record import Record

    plan = Plan(arguments.seed, arguments.seeds, arguments.epochs, candidates_of(arguments.methods))
    versions = {name: environment_info()[name] for name in ("bsam", "torch")}
    console = Console()
    tuning, training = plan.total
    with locked(arguments.out, "training"):
        record = Record(arguments.out, {**plan.settings(), **versions})
        console.print(
            f"{', '.join(candidate.title for candidate in plan.candidates_of)} on digits, {plan.epochs} epochs a run:\n"
            f"{tuning} runs choose learning rate, weight decay and radii on a validation set,\n"
            f"{training} runs over {plan.seeds} seed(s) give the numbers."
        )
        with progress(console, {"tuning": tuning, "training": training}) as bars:
            cells = demo(plan, record, bars.advance)
        figure, contours = arguments.out / "figure.png", arguments.out / "landscape.png"
        written = [*write_results(arguments.out, plan, cells), figure, contours]
        plot_curves(curves_info(cells), figure)
        plot_contours(reliefs_info(cells), contours)
    for table in summary_tables(summary_info(rows_info(cells))):
        console.print(table)
        console.print()
    console.print(
        "Accuracy: test set, last epoch, mean ± std of n seeds. Time of a step: SGD = 1.\n"
        f"Loss, sharpness (radius {SHARPNESS_RADIUS}): training data, labels as trained on;\n"
        f"λmax: the largest eigenvalue of the Hessian, on {CURVATURE_SAMPLES} of them.\n"
        f"Tuning: {len(cells[0].tuning)} runs per method and noise rate on one seed, chosen by accuracy\n"
        "after the last epoch on the validation set, whose labels are clean."
    )
    console.print(f"Written: {', '.join(map(str, written))}", soft_wrap=True)
