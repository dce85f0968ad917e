"""``bsam export``: the quantized network of a run as a file for other programs."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

from .run_flags import CACHE_HELP

DESCRIPTION = """\
Write the quantized network of a run (bsam train --weight-bits) to a file, with two weights of up to 4 bits to a byte:
FILE.onnx (INT4 and INT8 weights, QuantizeLinear and DequantizeLinear; needs the extra onnx) for onnxruntime and other
programs, or FILE.safetensors for bsam.quantization.load_quantized. Then run the file on the test images of the run and
print its accuracy beside that of the trained network, the share of equal predictions, and the size."""


def add(commands: Any) -> None:
    """Add the command."""
    command = commands.add_parser(
        "export", help="write the quantized network of a run to an ONNX file", description=DESCRIPTION
    )
    flag = command.add_argument
    flag("folder", type=Path, help="the directory of a finished run with --weight-bits", metavar="RUN_DIR")
    flag("--out", type=Path, required=True, help="the file to write, .onnx or .safetensors", metavar="FILE")
    flag("--images", type=int, help="run it on N test images (default: all)", metavar="N")
    flag("--data-dir", type=Path, help="folder with the files of the data set of the run", metavar="FOLDER")
    flag("--cache-dir", type=Path, help=CACHE_HELP, metavar="FOLDER")
    device = "of the trained network: cpu, cuda, cuda:1 ...; auto takes a GPU if there is one (default: auto)"
    flag("--device", default="auto", help=device, metavar="NAME")
    command.set_defaults(run=_export, needs={"safetensors": "train"})


def _export(arguments: argparse.Namespace) -> None:
    from ..common.progress import ProgressLine
    from ..inference.export import export_run

    with ProgressLine() as line:
        found = export_run(
            arguments.folder,
            arguments.out,
            arguments.images,
            arguments.device,
            data_dir=arguments.data_dir,
            cache_dir=arguments.cache_dir,
            progress=partial(line.reach, "images"),
        )
    result = found.comparison
    network, file = (f"{100 * accuracy:.2f}%" for accuracy in result.accuracies)
    print(f"Accuracy on {result.images} {found.split} images: {network} by the trained network, {file} by the file.")
    print(f"Equal predictions: {100 * result.equal:.2f}%.")
    size, float_size = found.size / 1e6, found.float_size / 1e6
    ratio = found.size / found.float_size
    print(f"Written: {found.path} ({size:.3f} MB, {ratio:.3f} of the float32 weights, {float_size:.3f} MB).")
