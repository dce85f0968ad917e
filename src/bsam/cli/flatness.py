"""``bsam flatness``: measurements of trained networks."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path
from typing import Any

from ..flatness.spectrum import WHICH
from ..recipes.measure import FlatnessSettings
from ..recipes.subjects import IMAGES
from .run import NEEDS
from .run_flags import CACHE_HELP

DESCRIPTION = """\
Measure networks of runs of bsam train, or saved models: the top eigenvalues of the Hessian, its trace and spectral
density, sharpness (MaxS, MinS, BilS), and the loss on a plane. A run directory is measured on the run's training
samples, not augmented, with the labels used in training and without label smoothing. A file needs a loader, a function
of yours, FUNCTION in MODULE, which may lie in the current folder: function(path), with the path of a file as a
pathlib.Path, returns (model, loss_fn, data): the network, loss_fn(model(x), y) giving the mean loss of a batch, and
the batches (x, y), as a list or a DataLoader that gives the same ones every time. Writes flatness.json (all numbers),
spectrum.png, density.png, contours.png, surfaces.png and surfaces.html (to turn by hand; needs plotly), and for each
run of bsam train --probe probe_RUN.png, its sharpness and cosine over the training. Models of one architecture share
directions and scales. Interrupted, it continues with the same model when called again."""
HELP = {
    "k": "how many eigenvalues",
    "which": f"of them: {', '.join(WHICH)}",
    "tol": "relative tolerance of their residuals",
    "trace_samples": "Hessian products for the trace",
    "density_steps": "Lanczos steps for the density, from each random vector",
    "density_probes": "random vectors for the density",
    "span": "of the landscape to either side, 1 being the length of the weights",
    "points": "along each axis of the landscape; odd",
    "rho": "radius of the sharpness",
    "mode": "batch norm: eval takes its running statistics, train those of each batch",
    "micro_batch": "the largest number of samples at a time, to save memory",
    "max_bytes": "memory for recorded Hessian products, which take half the time; 0: none (default: a part of what is "
    "free)",
    "seed": "of all random vectors",
}
KINDS: dict[str, tuple[type, str]] = {"float": (float, "X"), "str": (str, "NAME")}


def add(commands: Any) -> None:
    """Add the command."""
    command = commands.add_parser(
        "flatness",
        help="eigenvalues of the Hessian, sharpness and landscapes of trained networks",
        description=DESCRIPTION,
    )
    flag = command.add_argument
    flag("files", nargs="+", type=Path, help="the directories of finished runs, or files", metavar="RUN_DIR|FILE")
    flag("--loader", help="what loads files: function(path) -> (model, loss_fn, data)", metavar="MODULE:FUNCTION")
    images = "measure a run on N of its training samples, balanced over the classes, those of pose evenly spaced"
    flag("--images", type=int, help=f"{images} (default: {IMAGES}, or all if there are fewer)", metavar="N")
    flag("--data-dir", type=Path, help="folder with the files of the data set of a run", metavar="FOLDER")
    flag("--cache-dir", type=Path, help=CACHE_HELP, metavar="FOLDER")
    out = "folder for the results (default: runs/flatness)"
    flag("--out", type=Path, default=Path("runs/flatness"), help=out, metavar="FOLDER")
    for item in fields(FlatnessSettings):
        kind, metavar = KINDS.get(str(item.type), (int, "N"))
        name = f"--{item.name.replace('_', '-')}"
        shown = "" if item.default is None else f" (default: {item.default})"
        flag(name, type=kind, default=item.default, help=f"{HELP[item.name]}{shown}", metavar=metavar)
    device = "cpu, cuda, cuda:1 ...; auto takes a GPU if there is one (default: auto)"
    flag("--device", default="auto", help=device, metavar="NAME")
    command.set_defaults(run=_flatness, saved_items="models", needs=NEEDS)


def _flatness(arguments: argparse.Namespace) -> None:
    from rich.console import Console

    from ..recipes.subjects import find_models
    from ..report.measurements import flatness_report

    instruments = FlatnessSettings(**{field.name: getattr(arguments, field.name) for field in fields(FlatnessSettings)})
    models = find_models(arguments.files, arguments.loader, arguments.images, arguments.data_dir, arguments.cache_dir)
    console = Console(markup=False)
    written = flatness_report(models, instruments, arguments.out, arguments.device, console)
    console.print(f"Written: {', '.join(map(str, written))}", soft_wrap=True)
