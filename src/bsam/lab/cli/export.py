"""``bsam export``: write the network of a run to a file."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from ..common.printing import say
from ..common.progress import ProgressLine
from ..inference.run_export import export_run
from .run_flags import CACHE_HELP, DATA_HELP, DEVICE_HELP, MODEL_HELP

DESCRIPTION = """\
Write the network of a classification run to a file: FILE.onnx for onnxruntime and other programs (needs the extra
onnx), or, if the run was trained with --weight-bits, FILE.safetensors for bsam.lab.quantization.load_quantized. Weights
of a quantized network are stored as integers, those of up to 4 bits two to a byte. An ONNX file takes pixels as they
are in the data set (for images uint8 from 0 to 255) and standardises them itself; its metadata_props hold the range and
the size of the input, mean, std and class names. The command then evaluates the file on the run's evaluation images and
prints its accuracy, that of the trained network in the precision of its training, the share of equal predictions, the
file size, and the input that the file takes."""


def add(command: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    flag = command.add_argument
    flag("folder", type=Path, help="directory of a finished run", metavar="RUN_DIR")
    flag("--out", type=Path, required=True, help="file to write, .onnx or .safetensors", metavar="FILE")
    flag("--images", type=int, help="number of evaluation images to use (default: all)", metavar="N")
    flag("--data", help=DATA_HELP, metavar="MODULE:FUNCTION")
    flag("--model", help=MODEL_HELP, metavar="MODULE:FUNCTION")
    flag("--data-dir", type=Path, help="folder with the files of the run's data set", metavar="FOLDER")
    flag("--cache-dir", type=Path, help=CACHE_HELP, metavar="FOLDER")
    flag("--device", default="auto", help=f"device of the trained network: {DEVICE_HELP}", metavar="NAME")
    command.set_defaults(run=_export, needs={"safetensors": "train"})


def _export(arguments: argparse.Namespace) -> None:
    with ProgressLine() as line:
        exported = export_run(
            arguments.folder,
            arguments.out,
            arguments.images,
            arguments.device,
            data=arguments.data,
            model=arguments.model,
            data_dir=arguments.data_dir,
            cache_dir=arguments.cache_dir,
            progress=partial(line.reach, "images"),
        )
    comparison = exported.comparison
    network, file = (f"{100 * accuracy:.2f}%" for accuracy in comparison.accuracies)
    images = f"{comparison.images} {exported.split} images"
    trained, written = "trained network", "exported file"
    if exported.precision != "fp32":
        trained, written = f"{trained}, {exported.precision}", f"{written}, fp32"
    say(f"Accuracy on {images}: {network} ({trained}), {file} ({written}).")
    say(f"Equal predictions: {100 * comparison.equal:.2f}%.")
    size, float_size = exported.size / 1e6, exported.float_size / 1e6
    ratio = exported.size / exported.float_size
    say(f"Written: {exported.path} ({size:.3f} MB, {ratio:.3f} times the float32 weights' {float_size:.3f} MB).")
    say(f"Input: {exported.metadata['input']}.")
