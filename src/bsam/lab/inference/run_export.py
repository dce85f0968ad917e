"""Export the network of a run to a file, and compare the file's network with the run's."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from ...common.checks import check_count
from ...common.errors import BsamValueError
from ...common.extras import require_package
from ..common.files import draft_of
from ..quantization import OnnxNetwork, convert, export_onnx, load_quantized, save_quantized
from ..quantization.int_files import check_place
from ..tasks.classification import Classification, build_float_network
from ..training.environment import pick_device
from ..training.run_dir import NETWORK, RunDir, check_named
from ..training.train_step import as_trained

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
        precision: precision in which the run was trained, and in which its network classifies the images: fp32, bf16 or
            fp16. The network of the file computes in fp32.
    """

    path: Path
    size: int
    float_size: int
    comparison: Comparison
    split: str
    metadata: Mapping[str, str]
    precision: str


def export_run(
    folder: str | Path,
    out: str | Path,
    images: int | None = None,
    device: str = "auto",
    *,
    data: str | None = None,
    model: str | None = None,
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
        data, model: the data set and the network of the run; needed only if they are ``MODULE:FUNCTION``, which runs
            code of that module.
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
    if data not in (None, run.data):
        raise BsamValueError(f"the run in {folder} was trained on {run.data}, got data (--data) {data}: leave it out")
    if model not in (None, run.model):
        raise BsamValueError(f"the run in {folder} trained {run.model}, got model (--model) {model}: leave it out")
    if run.task.is_own:
        raise BsamValueError(
            f"the run in {folder} has the task {run.task.name}, which bsam export cannot write: load its weights from "
            f"{run_dir.path / NETWORK}"
        )
    check_named(run, run_dir.path, [] if data is None else [data], [] if model is None else [model])
    if run.task.name != "classification":
        raise BsamValueError(
            f"the run in {folder} is of the task {run.task.name}: only classification runs can be exported"
        )
    if suffix == ".safetensors" and run.task.weight_bits is None:
        raise BsamValueError(
            f"the run in {folder} has no quantized network, and its weights are in {run_dir.path / NETWORK}: export it "
            "to .onnx, or give a run trained with --weight-bits"
        )
    task = Classification(run, pick_device(device), data_dir, cache_dir=cache_dir)
    network = run_dir.load_into(task.network()).eval()
    float_network = build_float_network(run, task.inputs, task.classes)
    is_onnx = suffix == ".onnx"
    about = metadata(task, is_onnx, run.precision)

    def trained_network(x: Tensor) -> Tensor:
        with as_trained(run, task.device):
            return network(x)

    total = task.eval_samples if images is None else min(images, task.eval_samples)
    with draft_of(out) as draft:
        if is_onnx:
            size = export_onnx(nn.Sequential(Preprocessing(task), network), draft, example(task), metadata=about)
            written: nn.Module = OnnxNetwork(draft)
        else:
            size = save_quantized(convert(network), draft, metadata=about)
            written = load_quantized(draft, float_network).to(task.device)
        comparison = compare(task, trained_network, written, total, is_onnx, progress)
    float_size = sum(4 * tensor.numel() for tensor in float_network.state_dict().values() if tensor.is_floating_point())
    return ExportedNetwork(out, size, float_size, comparison, run.eval_split, about, run.precision)


@torch.no_grad()
def compare(
    task: Classification,
    network: Callable[[Tensor], Tensor],
    written: nn.Module,
    images: int,
    takes_pixels: bool,
    progress: Callable[[int, int], None] | None,
) -> Comparison:
    """Compare the classes that two networks predict for images that the run is evaluated on.

    Args:
        task: the run's task, with its data.
        network: the run's network, in eval mode, or a function that calls it.
        written: the network of the file, in eval mode.
        images: number of images.
        takes_pixels: whether the network of the file takes pixels instead of standardised images.
        progress: called with the numbers of finished images and of all images.
    """
    done = 0
    equal = 0
    right = [0, 0]
    for x, y in task.eval_images(images):
        inputs = task.inputs(x)
        pixels = x if task.pixels is None else task.pixels.restore(x)
        predicted = network(inputs).argmax(1), written(pixels if takes_pixels else inputs).argmax(1)
        done += len(y)
        right = [count + int((classes == y).sum()) for count, classes in zip(right, predicted, strict=True)]
        equal += int((predicted[0] == predicted[1]).sum())
        if progress is not None:
            progress(done, images)
    return Comparison(done, (right[0] / done, right[1] / done), equal / done)


class Preprocessing(nn.Module):
    """Convert pixels to the inputs of a run's network, as training does: standardise them, and resize them if needed.

    Pixels are those of the data set: bytes, or floating-point numbers if the data set has these.

    Args:
        task: the run's task, with its data.
    """

    shift: Tensor
    scale: Tensor

    def __init__(self, task: Classification) -> None:
        super().__init__()
        inputs = task.inputs
        self._pixels = task.pixels
        self._resize = inputs.resize
        unit = 255.0 if inputs.in_bytes else 1.0
        self._is_identity = not any(inputs.mean) and {*inputs.std} == {unit} == {1.0}
        # constants rounded as in training, so that the inputs are the same bit for bit
        shift = torch.tensor([unit * mean for mean in inputs.mean], dtype=torch.float32)
        scale = torch.tensor([1 / (unit * std) for std in inputs.std], dtype=torch.float32)
        self.register_buffer("shift", shift.view(-1, 1, 1))
        self.register_buffer("scale", scale.view(-1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Return the inputs for a batch of pixels (n, channels, side, side)."""
        x = x.float()
        if self._pixels is not None:
            x = (x - self._pixels.mean) / self._pixels.std
        if not self._is_identity:
            x = (x - self.shift) * self.scale
        return self._resize(x)


def example(task: Classification) -> Tensor:
    """Return a batch of one black image, with the shape and the dtype of the pixels of a run's data set."""
    inputs = task.inputs
    shape = 1, inputs.channels, inputs.side, inputs.side
    return torch.zeros(shape, dtype=torch.uint8 if inputs.in_bytes else torch.float32)


def metadata(task: Classification, in_file: bool, precision: str = "fp32") -> dict[str, str]:
    """Return what a user of an exported network must know: lists and dictionaries as JSON, the rest as text.

    ``mean`` and ``std`` are in the unit of the pixels.

    Args:
        task: the run's task, with its data.
        in_file: whether :class:`Preprocessing` is part of the file's network.
        precision: the precision in which the run was trained.
    """
    inputs, (low, high) = task.inputs, task.pixel_range()
    unit, pixels = 255.0 if inputs.in_bytes else 1.0, task.pixels
    mean, std = [unit * value for value in inputs.mean], [unit * value for value in inputs.std]
    if pixels is not None:
        mean, std = [pixels.mean + pixels.std * value for value in mean], [pixels.std * value for value in std]
    side = inputs.side if in_file else inputs.size
    dtype = "uint8" if inputs.in_bytes and in_file else "float32"
    kind = "RGB pixels" if inputs.takes_files and inputs.channels == 3 else "pixels"
    sentence = f"{dtype} (n, {inputs.channels}, {side}, {side}), {kind} from {low:g} to {high:g}"
    if in_file:
        sentence += "; the file standardises them"
    else:
        means, stds = (", ".join(f"{value:.6g}" for value in values) for values in (mean, std))
        sentence += f", standardised with mean {means} and std {stds}"
    resized = f", resized to {inputs.size} x {inputs.size}" if inputs.size != inputs.side else ""
    entries = {
        "task": "classification",
        "model": task.run.model,
        "input": sentence,
        "input_range": json.dumps([low, high]),
        "input_size": json.dumps([inputs.channels, side, side]),
        "mean": json.dumps(mean),
        "std": json.dumps(std),
        "preprocessing": f"{'in the file' if in_file else 'not in the file'}: (pixels - mean) / std{resized}",
        "class_names": json.dumps(inputs.class_names or [str(number) for number in range(task.classes)]),
        "output": "logits, one for each class",
        "precision": "float32" + ("" if precision == "fp32" else f"; the run was trained and evaluated in {precision}"),
    }
    if inputs.takes_files:  # how image files become pixels
        decoding = inputs.decoding
        cut = {"shorter_side": decoding.shorter_side, "centre_crop": decoding.size}
        entries["decoding"] = json.dumps({**cut, "interpolation": decoding.interpolation})
    return entries
