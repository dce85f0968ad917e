"""``bsam flatness``: instruments on saved models."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path
from typing import Any

from ..flatness.spectrum import WHICH
from ..recipes.measure import Instruments
from ..recipes.subjects import IMAGES


def add(commands: Any) -> None:
    """Add the command."""
    command = commands.add_parser(
        "flatness",
        help="eigenvalues of the Hessian, sharpness and landscapes of trained networks",
        description="Measure networks of runs of bsam train, or saved models: the top eigenvalues of the Hessian, its trace and spectral density, sharpness "
        "(MaxS, MinS, BilS), and the loss on a plane. A folder of a run is measured on the run's training samples, "
        "not augmented, with the labels as "
        "trained on and without label smoothing. A file needs a loader, a function of yours, FUNCTION in MODULE, "
        "which may lie in the current folder: "
        "function(path), with the path of a file as a pathlib.Path, returns (model, loss_fn, data): the network, "
        "loss_fn(model(x), y) giving the mean "
        "loss of a batch, and the batches (x, y), as a list or a DataLoader that gives the same ones on every walk. "
        "Writes flatness.json (all "
        "numbers), spectrum.png, density.png, contours.png, surfaces.png and surfaces.html (to turn by hand), and for "
        "each run of bsam train "
        "--probe probe_RUN.png, its sharpness and cosine over the training. Models of one architecture share "
        "directions and scales. Interrupted, it goes on with the model it was at when called again.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    its = Instruments
    command.add_argument(
        "files", nargs="+", type=Path, help="the folders of finished runs, or files", metavar="RUN_DIR|FILE"
    )
    command.add_argument(
        "--loader", help="what loads files: function(path) -> (model, loss_fn, data)", metavar="MODULE:FUNCTION"
    )
    command.add_argument(
        "--images", type=int, help=f"measure a run on its first N training samples; None: {IMAGES}", metavar="N"
    )
    command.add_argument(
        "--data-dir", type=Path, help="folder with the files of the data set of a run", metavar="FOLDER"
    )
    command.add_argument(
        "--out", type=Path, default=Path("runs/flatness"), help="folder for the results", metavar="FOLDER"
    )
    command.add_argument("--k", type=int, default=its.k, help="how many eigenvalues", metavar="N")
    command.add_argument("--which", default=its.which, help=f"of them: {', '.join(WHICH)}", metavar="END")
    command.add_argument("--tol", type=float, default=its.tol, help="of their residuals, relative", metavar="X")
    command.add_argument(
        "--trace-samples", type=int, default=its.trace_samples, help="Hessian products for the trace", metavar="N"
    )
    command.add_argument(
        "--density-steps",
        type=int,
        default=its.density_steps,
        help="of Lanczos for the density, from each random vector",
        metavar="N",
    )
    command.add_argument(
        "--density-probes", type=int, default=its.density_probes, help="random vectors for the density", metavar="N"
    )
    command.add_argument(
        "--span",
        type=float,
        default=its.span,
        help="of the landscape to either side, 1 being the length of the weights",
        metavar="X",
    )
    command.add_argument(
        "--points", type=int, default=its.points, help="of each axis of the landscape; odd", metavar="N"
    )
    command.add_argument("--rho", type=float, default=its.rho, help="radius of the sharpness", metavar="X")
    command.add_argument(
        "--mode",
        default=its.mode,
        help="batch norm: eval takes its running statistics, train those of each batch",
        metavar="MODE",
    )
    command.add_argument(
        "--micro-batch",
        type=int,
        default=its.micro_batch,
        help="the most samples at a time, to save memory",
        metavar="N",
    )
    command.add_argument(
        "--max-bytes",
        type=int,
        default=its.max_bytes,
        help="memory for recorded Hessian products, which take half the time; None: some of what is free; 0: none",
        metavar="N",
    )
    command.add_argument("--seed", type=int, default=its.seed, help="of all random vectors", metavar="N")
    command.add_argument(
        "--device", default="auto", help="cpu, cuda, cuda:1 ...; auto takes a GPU if there is one", metavar="NAME"
    )
    command.set_defaults(run=_flatness, kept="models")


def _flatness(arguments: argparse.Namespace) -> None:
    from ..core.extras import need

    for module, extra in (("rich", "train"), ("matplotlib", "plot"), ("plotly", "plot")):
        need(module, extra)  # now, not after the measurements
    from rich.console import Console

    from ..report.measurements import flatness_report

    instruments = Instruments(**{field.name: getattr(arguments, field.name) for field in fields(Instruments)})
    console = Console()
    written = flatness_report(
        arguments.files,
        arguments.loader,
        instruments,
        arguments.out,
        arguments.device,
        console,
        arguments.images,
        arguments.data_dir,
    )
    console.print(f"Written: {', '.join(map(str, written))}", soft_wrap=True)
