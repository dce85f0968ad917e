"""The command line."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from . import __version__
from .core.refusal import Refusal
from .flatness.spectrum import WHICH
from .recipes.demo import DEFAULT, SHARPNESS_RADIUS, TITLES, Plan, contenders, demo
from .recipes.flatness import Instruments
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
        print(f"bsam: interrupted. Finished {arguments.kept} are kept in {arguments.out}; the same command goes on from there.", file=sys.stderr)
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
        "Writes results.json (one row per method, noise rate and seed), about.json (how they came about), figure.png and landscape.png. "
        "Interrupted, it goes on where it stopped when called again. Called with other methods on the same folder, it trains those that are missing, "
        "and writes the files anew, with the methods asked for last.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    command.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder for the results", metavar="FOLDER")
    command.add_argument("--methods", nargs="+", default=list(DEFAULT), help=f"which: {', '.join(TITLES)}", metavar="NAME")
    command.add_argument("--seed", type=int, default=Plan.seed, help="the first seed; the same seed gives the same numbers", metavar="N")
    command.add_argument("--seeds", type=int, default=Plan.seeds, help="how many seeds", metavar="N")
    command.add_argument("--epochs", type=int, default=Plan.epochs, help="epochs of every run", metavar="N")
    command.set_defaults(run=_demo, kept="runs")
    _add_flatness(commands)
    return parser


def _add_flatness(commands: Any) -> None:
    command = commands.add_parser(
        "flatness",
        help="eigenvalues of the Hessian, sharpness and landscapes of saved models",
        description="Measure saved models: the top eigenvalues of the Hessian, its trace and spectral density, sharpness (MaxS, MinS, BilS), and the loss on a "
        "plane. The loader is a function of yours, FUNCTION in MODULE, which may lie in the current folder: function(path), with the path of a file as a "
        "pathlib.Path, returns (model, loss_fn, data): the network, loss_fn(model(x), y) giving the mean loss of a batch, and the batches (x, y), as a list or "
        "a DataLoader that gives the same ones on every walk. Writes flatness.json (all numbers), spectrum.png, density.png, contours.png, surfaces.png and "
        "surfaces.html (to turn by hand). Models of one architecture share directions and scales. Interrupted, it goes on with the model it was at when called "
        "again.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    its = Instruments
    command.add_argument("files", nargs="+", type=Path, help="the saved models", metavar="FILE")
    command.add_argument("--loader", required=True, help="what loads them: function(path) -> (model, loss_fn, data)", metavar="MODULE:FUNCTION")
    command.add_argument("--out", type=Path, default=Path("runs/flatness"), help="folder for the results", metavar="FOLDER")
    command.add_argument("--k", type=int, default=its.k, help="how many eigenvalues", metavar="N")
    command.add_argument("--which", default=its.which, help=f"of them: {', '.join(WHICH)}", metavar="END")
    command.add_argument("--tol", type=float, default=its.tol, help="of their residuals, relative", metavar="X")
    command.add_argument("--trace-samples", type=int, default=its.trace_samples, help="Hessian products for the trace", metavar="N")
    command.add_argument("--density-steps", type=int, default=its.density_steps, help="of Lanczos for the density, from each random vector", metavar="N")
    command.add_argument("--density-probes", type=int, default=its.density_probes, help="random vectors for the density", metavar="N")
    command.add_argument("--span", type=float, default=its.span, help="of the landscape to either side, 1 being the length of the weights", metavar="X")
    command.add_argument("--points", type=int, default=its.points, help="of each axis of the landscape; odd", metavar="N")
    command.add_argument("--rho", type=float, default=its.rho, help="radius of the sharpness", metavar="X")
    command.add_argument("--mode", default=its.mode, help="batch norm: eval takes its running statistics, train those of each batch", metavar="MODE")
    command.add_argument("--micro-batch", type=int, default=its.micro_batch, help="the most samples at a time, to save memory", metavar="N")
    command.add_argument("--keep-bytes", type=int, default=its.keep_bytes, help="memory for what all Hessian products share, to save time", metavar="N")
    command.add_argument("--seed", type=int, default=its.seed, help="of all random vectors", metavar="N")
    command.add_argument("--device", default="auto", help="cpu, cuda, cuda:1 ...; auto takes a GPU if there is one", metavar="NAME")
    command.set_defaults(run=_flatness, kept="models")


def _flatness(arguments: argparse.Namespace) -> None:
    from .core.extras import need

    for module, extra in (("rich", "train"), ("matplotlib", "plot"), ("plotly", "plot")):
        need(module, extra)  # now, not after the measurements
    from rich.console import Console

    from .report.measurements import flatness_report

    instruments = Instruments(**{field.name: getattr(arguments, field.name) for field in fields(Instruments)})
    console = Console()
    written = flatness_report(arguments.files, arguments.loader, instruments, arguments.out, arguments.device, console)
    console.print(f"Written: {', '.join(map(str, written))}", soft_wrap=True)


def _methods(_: argparse.Namespace) -> None:
    print(methods_table(shutil.get_terminal_size((120, 24)).columns))
    print("\nPasses: forward and backward, a step. Memory: beyond the base optimizer's own peak, in units of the parameters' size.")


def _demo(arguments: argparse.Namespace) -> None:
    from .core.extras import need

    for module, extra in (("rich", "demo"), ("sklearn", "demo"), ("matplotlib", "plot")):
        need(module, extra)  # now, not after a minute of training
    from rich.console import Console

    from .report.figures import curves_info, plot_curves
    from .report.landscapes import plot_contours, reliefs_info
    from .report.progress import progress
    from .report.results import rows_info, write_results
    from .report.tables import summary_info, summary_tables
    from .training.environment import environment_info
    from .training.loop import CURVATURE_SAMPLES
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
