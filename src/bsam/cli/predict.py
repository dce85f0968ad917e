"""``bsam predict``: the classes of image files."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..core.errors import BsamValueError
from ..core.extras import require_package

PICTURES = (".png", ".jpg", ".jpeg", ".pdf", ".svg")


def add(commands: Any) -> None:
    """Add the command."""
    command = commands.add_parser(
        "predict",
        help="classes and probabilities of images, by the network of a run on image files",
        description="Print the most probable classes of each image. The data that the network was trained on is not "
        "needed.",
    )
    flag = command.add_argument
    flag("folder", type=Path, help="the directory of a finished run on image files", metavar="RUN_DIR")
    flag("images", nargs="+", type=Path, help="the files", metavar="IMAGE")
    flag("--top", type=int, default=3, help="how many classes (default: 3)", metavar="N")
    flag("--grid", type=Path, help=f"draw images and classes to this file ({', '.join(PICTURES)})", metavar="FILE")
    device = "cpu, cuda, cuda:1 ...; auto takes a GPU if there is one (default: auto)"
    flag("--device", default="auto", help=device, metavar="NAME")
    command.set_defaults(run=_predict, needs={"PIL": "images", "safetensors": "train"})


def _predict(arguments: argparse.Namespace) -> None:
    from ..report.predictions import draw_grid, prediction_lines
    from ..training.prediction import predict

    if arguments.grid is not None:
        require_package("matplotlib", "plot")
        if arguments.grid.suffix.lower() not in PICTURES:
            raise BsamValueError(f"--grid must end in one of {', '.join(PICTURES)}; got {arguments.grid}")
        if not arguments.grid.parent.is_dir():
            raise BsamValueError(f"there is no folder {arguments.grid.parent} for --grid: create it first")
    predictions = predict(arguments.folder, arguments.images, arguments.top, arguments.device)
    print("\n".join(prediction_lines(predictions)))
    if arguments.grid is not None:
        draw_grid(predictions, arguments.grid)
        print(f"Written: {arguments.grid}")
