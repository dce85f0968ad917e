"""Export the network of a run to a file, and compare the file's network with the run's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from ...common.checks import check_count
from ...common.errors import BsamValueError
from ...common.extras import require_package
from ..quantization import OnnxNetwork, convert, export_onnx, load_quantized, save_quantized
from ..quantization.int_files import check_place
from ..tasks.classification import Classification
from ..tasks.classifiers import build_float_network
from ..training.environment import pick_device
from ..training.run_dir import NETWORK, RunDir
from .preprocessing import Preprocessing, example, metadata

PACKAGES = {".onnx": ("onnx", "onnxscript", "onnxruntime"), ".safetensors": ()}  # besides those for training


@dataclass(frozen=True)
class Comparison:
    """How two networks classify the same images.

    Args:
        images: number of images.
        accuracies: share of the images that each network classifies correctly.
        equal: share of the images for which the networks predict the same class.
    """

    images: int
    accuracies: tuple[float, float]
    equal: float


@dataclass(frozen=True)
class ExportedNetwork:
    """A file that :func:`export_run` wrote.

    Args:
        path: path of the file.
        size: size in bytes.
        float_size: size of the float32 weights of the float network, in bytes.
        comparison: the run's network and the network of the file, on images that the run is evaluated on.
        split: the split of these images.
        metadata: the entries that the file's metadata has: task, input, its range and size, mean, std, class names ...
    """

    path: Path
    size: int
    float_size: int
    comparison: Comparison
    split: str
    metadata: Mapping[str, str]


def export_run(
    folder: str | Path,
    out: str | Path,
    images: int | None = None,
    device: str = "auto",
    *,
    data_dir: Path | None = None,
    cache_dir: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> ExportedNetwork:
    """Write the network of a run to a file, and compare the network of the file with that of the run.

    The network of an ONNX file takes pixels as they are in the data set: uint8 from 0 to 255 for images, or float32 if
    the data set has floating-point numbers. It standardises them itself. The network of a safetensors file takes
    standardised pixels. The metadata of both describes the input and the classes.

    Args:
        folder: directory of a finished run that classifies images.
        out: the file. Its suffix determines the format: ``.onnx`` (:func:`~bsam.lab.quantization.export_onnx`), or, for
            a run with ``weight_bits``, ``.safetensors`` (:func:`~bsam.lab.quantization.save_quantized`). An existing
            file is overwritten only if the export succeeds.
        images: number of evaluation images to compare the networks on; None: all.
        device: device of the run's network; the network of an ONNX file runs on the CPU.
        data_dir, cache_dir: folders of the data, if it is read from files, and of decoded images.
        progress: called with the numbers of finished images and of all images.
    """
    out = Path(out)
    suffix = out.suffix.lower()
    if suffix not in PACKAGES:
        raise BsamValueError(f"the file must end in {' or '.join(PACKAGES)}, got {out}")
    for package in PACKAGES[suffix]:
        require_package(package, "onnx")
    if images is not None:
        check_count("images", images)
    check_place(out)
    run_dir = RunDir(folder)
    run = run_dir.finished_run()
    if run.task != "classification":
        raise BsamValueError(f"the run in {folder} is of the task {run.task}: only classification runs can be exported")
    if suffix == ".safetensors" and run.weight_bits is None:
        raise BsamValueError(
            f"the run in {folder} has no quantized network, and its weights are in {run_dir.path / NETWORK}: export it "
            "to .onnx, or give a run trained with --weight-bits"
        )
    task = Classification(run, pick_device(device), data_dir, cache_dir=cache_dir)
    network = run_dir.load_into(task.network()).eval()
    float_network = build_float_network(run, task.inputs, task.classes)
    is_onnx = suffix == ".onnx"
    about = metadata(task, in_file=is_onnx)
    total = task.eval_samples if images is None else min(images, task.eval_samples)
    report = progress if progress is not None else lambda done, total: None
    draft = out.with_name(f"{out.name}.draft")
    try:
        if is_onnx:
            size = export_onnx(nn.Sequential(Preprocessing(task), network), draft, example(task), metadata=about)
            written: nn.Module = OnnxNetwork(draft)
        else:
            size = save_quantized(convert(network), draft, metadata=about)
            written = load_quantized(draft, float_network).to(task.device)
        batches = _batches(task, total, takes_pixels=is_onnx)
        comparison = compare(network, written, batches, lambda done: report(done, total))
        draft.replace(out)
    finally:
        draft.unlink(missing_ok=True)
    float_size = sum(4 * tensor.numel() for tensor in float_network.state_dict().values() if tensor.is_floating_point())
    return ExportedNetwork(out, size, float_size, comparison, run.eval_split, about)


def _batches(task: Classification, images: int, takes_pixels: bool) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield the inputs of the run's network, those of the file's network, and the true classes."""
    for x, y in task.eval_images(images):
        inputs = task.inputs(x)
        pixels = x if task.pixels is None else task.pixels.restored(x)
        yield inputs, pixels if takes_pixels else inputs, y


@torch.no_grad()
def compare(
    first: nn.Module,
    second: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor, Tensor]],
    progress: Callable[[int], None] = lambda done: None,
) -> Comparison:
    """Compare the classes that two networks predict.

    Args:
        first, second: the networks, in eval mode.
        batches: inputs of the first network, inputs of the second one for the same images, and the true classes.
        progress: called with the number of finished images.
    """
    images, right, equal = 0, [0, 0], 0
    for x, also_x, y in batches:
        predicted = first(x).argmax(1), second(also_x).argmax(1)
        images += len(y)
        right = [count + int((classes == y).sum()) for count, classes in zip(right, predicted, strict=True)]
        equal += int((predicted[0] == predicted[1]).sum())
        progress(images)
    return Comparison(images, (right[0] / images, right[1] / images), equal / images)
