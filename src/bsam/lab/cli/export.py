"""``bsam export``: write the network of a run to a file."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from ..common.printing import say
from ..common.progress import ProgressLine
from ..inference.run_export import ExportedNetwork, export_run
from .run_flags import CACHE_HELP, DATA_HELP, DEVICE_HELP, MODEL_HELP, TASK_HELP

DESCRIPTION = """\
Write the network of a run to a file: FILE.onnx for onnxruntime and other programs (needs the extra onnx), or, if the
run was trained with --weight-bits, FILE.safetensors for bsam.lab.quantization.load_quantized. Weights of a quantized
network are stored as integers, those of up to 4 bits two to a byte. An ONNX file takes samples as they are in the data
set and makes the network's inputs itself: a classifier takes pixels (for images uint8 from 0 to 255), a pose network
the pixels of the square around a person's box. Its metadata_props describe the input and the output, such as the range
and the size of the input, mean, std and class names. The command then evaluates the file on the run's evaluation
samples and prints its score, that of the trained network in the precision of its training, the share of equal
predictions or the largest difference between two outputs, the file size, and the input that the file takes."""


def add(command: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    flag = command.add_argument
    flag("folder", type=Path, help="directory of a finished run", metavar="RUN_DIR")
    flag("--out", type=Path, required=True, help="file to write, .onnx or .safetensors", metavar="FILE")
    flag("--images", type=int, help="number of evaluation images to use (default: all)", metavar="N")
    flag("--data", help=DATA_HELP, metavar="MODULE:FUNCTION")
    flag("--model", help=MODEL_HELP, metavar="MODULE:FUNCTION")
    flag("--task", help=TASK_HELP, metavar="MODULE:CLASS")
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
            task=arguments.task,
            data_dir=arguments.data_dir,
            cache_dir=arguments.cache_dir,
            progress=partial(line.reach, "images"),
            on_message=line.say,
        )
    for sentence in comparison_sentences(exported):
        say(sentence)
    size = exported.size / 1e6
    float_size = exported.float_size / 1e6
    ratio = exported.size / exported.float_size
    say(f"Written: {exported.path} ({size:.3f} MB, {ratio:.3f} times the float32 weights' {float_size:.3f} MB).")
    say(f"Input: {exported.metadata['input']}.")


def comparison_sentences(exported: ExportedNetwork) -> list[str]:
    """Return how the network of the run and that of the file compare, in words."""
    comparison = exported.comparison
    trained = "trained network"
    written = "exported file"
    if exported.precision != "fp32":
        trained = f"{trained}, {exported.precision}"
        written = f"{written}, fp32"
    of_network, of_file = comparison.scores
    network = exported.score.factor * of_network
    file = exported.score.factor * of_file
    if comparison.equal is not None:
        images = f"{comparison.samples} {exported.split} images"
        return [
            f"Accuracy on {images}: {network:.2f}% ({trained}), {file:.2f}% ({written}).",
            f"Equal predictions: {100 * comparison.equal:.2f}%.",
        ]
    title = exported.score.title[0].upper() + exported.score.title[1:]
    samples = f"{comparison.samples} {exported.split} samples"
    return [
        f"{title} on {samples}: {network:.4g} ({trained}), {file:.4g} ({written}).",
        f"Largest difference between two outputs: {comparison.difference:.2g}.",
    ]
