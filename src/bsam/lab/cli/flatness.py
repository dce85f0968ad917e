"""``bsam flatness``: measure how flat the minima of trained networks are."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path
from typing import Any

from ...flatness.spectrum import WHICH
from ..recipes.measure import FlatnessSettings
from ..recipes.subjects import IMAGES
from ..run_experiment import NEEDS
from .run_flags import CACHE_HELP, DEVICE_HELP

DESCRIPTION = """\
Measure trained networks: the top eigenvalues of the Hessian, its trace and spectral density, sharpness (MaxS, MinS,
BilS), and the loss on a plane. Networks are given as run directories of bsam train or as files. A run is measured on
its training samples, without augmentation and label smoothing, with the labels used in training. For files, write a
function and name it with --loader; its module may be in the current folder. The function takes the pathlib.Path of a
file and returns (model, loss_fn, data), where loss_fn(model(x), y) is the mean loss of a batch and data is a list or
DataLoader that always yields the same batches (x, y). Writes flatness.json (all numbers), spectrum.png, density.png,
contours.png, surfaces.png and surfaces.html (interactive; needs plotly). A run trained with --probe also gets
probe_RUN.png, with sharpness and cosine during training. Models with the same architecture are drawn along the same
random directions and on the same scales. If the command is interrupted, running it again continues with the model it
was measuring."""
HELP = {
    "k": "number of eigenvalues",
    "which": f"which eigenvalues: {', '.join(WHICH)}",
    "tol": "relative tolerance of the eigenvalues' residuals",
    "trace_samples": "number of Hessian-vector products for the trace",
    "density_steps": "number of Lanczos steps per random vector, for the density",
    "density_probes": "number of random vectors for the density",
    "span": "distance from the centre of the landscape to its edges; 1 is the norm of the weights",
    "points": "number of points along each axis of the landscape; must be odd",
    "rho": "radius of the sharpness",
    "mode": "mode of batch norm: eval uses its running statistics, train those of each batch",
    "micro_batch": "largest number of samples per pass, to save memory",
    "max_bytes": "memory for recording Hessian-vector products, which halves their time; 0 disables recording "
    "(default: a part of the free memory)",
    "seed": "seed of all random vectors",
}
KINDS: dict[str, tuple[type, str]] = {"float": (float, "X"), "str": (str, "NAME")}


def add(commands: Any) -> None:
    """Add the command."""
    command = commands.add_parser(
        "flatness",
        help="measure trained networks: eigenvalues of the Hessian, sharpness, loss landscapes",
        description=DESCRIPTION,
    )
    flag = command.add_argument
    flag("files", nargs="+", type=Path, help="directories of finished runs, or files", metavar="RUN_DIR|FILE")
    loader = "function that loads a file: function(path) -> (model, loss_fn, data)"
    flag("--loader", help=loader, metavar="MODULE:FUNCTION")
    images = "measure a run on N training samples, balanced over the classes (for pose, evenly spaced)"
    flag("--images", type=int, help=f"{images} (default: {IMAGES}, or all if there are fewer)", metavar="N")
    flag("--data-dir", type=Path, help="folder with the files of the run's data set", metavar="FOLDER")
    flag("--cache-dir", type=Path, help=CACHE_HELP, metavar="FOLDER")
    out = "folder for the results (default: runs/flatness)"
    flag("--out", type=Path, default=Path("runs/flatness"), help=out, metavar="FOLDER")
    for field in fields(FlatnessSettings):
        kind, metavar = KINDS.get(str(field.type), (int, "N"))
        name = f"--{field.name.replace('_', '-')}"
        default = "" if field.default is None else f" (default: {field.default})"
        flag(name, type=kind, default=field.default, help=f"{HELP[field.name]}{default}", metavar=metavar)
    flag("--device", default="auto", help=DEVICE_HELP, metavar="NAME")
    command.set_defaults(run=_flatness, saved_items="models", needs=NEEDS)


def _flatness(arguments: argparse.Namespace) -> None:
    from rich.console import Console

    from ..recipes.subjects import find_models
    from ..report.measurements import flatness_report

    settings = FlatnessSettings(**{field.name: getattr(arguments, field.name) for field in fields(FlatnessSettings)})
    models = find_models(arguments.files, arguments.loader, arguments.images, arguments.data_dir, arguments.cache_dir)
    console = Console(markup=False)
    written = flatness_report(models, settings, arguments.out, arguments.device, console)
    console.print(f"Written: {', '.join(map(str, written))}", soft_wrap=True)
