"""Trained networks in files for other programs: what is written with them, and how they compare with the network."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn

from ..data.persons import MARGIN
from ..quantization import OnnxNetwork, convert, export_onnx, load_quantized, save_quantized

if TYPE_CHECKING:
    from .classification import Classification
    from .pose import Pose
    from .task import Task

Network: TypeAlias = Callable[[Tensor], Tensor]
Progress: TypeAlias = Callable[[int, int], None]
ONNX = ".onnx"


@dataclass(frozen=True)
class Comparison:
    """How a trained network and the network of its file do on the same samples.

    Args:
        samples: number of samples.
        scores: the score of each network.
        equal: share of the samples for which both predict the same class; None if outputs are no classes.
        difference: the largest difference between two outputs; None if outputs are classes.
    """

    samples: int
    scores: tuple[float, float]
    equal: float | None = None
    difference: float | None = None


@torch.no_grad()
def compare_scores(task: Any, network: Network, written: Network) -> Comparison:
    """Compare two networks by the task's score and by their outputs.

    Args:
        task: a task, whose ``evaluate`` calls a network.
        network: the trained network, in eval mode.
        written: the network of the file, which gets the same inputs.
    """
    largest = 0.0

    def compared(x: Tensor) -> Tensor:
        nonlocal largest
        outputs = written(x)
        largest = max(largest, float((outputs - network(x)).abs().max()))
        return outputs

    metric = task.score.metric(task.run.eval_split)
    scores = task.evaluate(network)[metric], task.evaluate(compared)[metric]
    return Comparison(task.eval_samples, scores, difference=largest)


@torch.no_grad()
def compare_classes(
    task: Classification,
    network: Network,
    written: Network,
    takes_pixels: bool,
    progress: Progress | None = None,
) -> Comparison:
    """Compare the classes that two networks predict for images that the run is evaluated on.

    Args:
        task: the run's task, with its data.
        network: the trained network, in eval mode.
        written: the network of the file.
        takes_pixels: whether the network of the file takes pixels instead of standardised images.
        progress: called with the numbers of finished images and of all images.
    """
    done = 0
    equal = 0
    right = 0
    right_in_file = 0
    for x, y in task.eval_images():
        inputs = task.inputs(x)
        pixels = x if task.pixels is None else task.pixels.restore(x)
        classes = network(inputs).argmax(1)
        classes_of_file = written(pixels if takes_pixels else inputs).argmax(1)
        done += len(y)
        right += int((classes == y).sum())
        right_in_file += int((classes_of_file == y).sum())
        equal += int((classes == classes_of_file).sum())
        if progress is not None:
            progress(done, task.eval_samples)
    return Comparison(done, (right / done, right_in_file / done), equal / done)


def precision_text(precision: str) -> str:
    """Return the precision of a file's network, and that of the training if it is another one."""
    return "float32" + ("" if precision == "fp32" else f"; the run was trained and evaluated in {precision}")


# ---- classification


def export_classifier(task: Classification, network: nn.Module, path: Path, suffix: str) -> dict[str, str]:
    """Write a network to an ONNX file, or a quantized one to a safetensors file; return the file's metadata."""
    is_onnx = suffix == ONNX
    about = metadata(task, is_onnx)
    if is_onnx:
        export_onnx(nn.Sequential(Preprocessing(task), network), path, example(task), metadata=about)
    else:
        save_quantized(convert(network), path, metadata=about)
    return about


def compare_classifier(
    task: Classification, network: Network, path: Path, suffix: str, progress: Progress | None
) -> Comparison:
    """Compare a trained network with that of a file."""
    if suffix == ONNX:
        return compare_classes(task, network, OnnxNetwork(path), True, progress)
    written = load_quantized(path, task.float_network()).to(task.device)
    return compare_classes(task, network, written, False, progress)


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
        self._inputs = inputs
        unit = 255.0 if inputs.in_bytes else 1.0
        self._is_identity = unit == 1.0 and not any(inputs.mean) and all(std == 1.0 for std in inputs.std)
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
        return self._inputs.resize(x, self._inputs.size)


def example(task: Classification) -> Tensor:
    """Return a batch of one black image, with the shape and the dtype of the pixels of a run's data set."""
    inputs = task.inputs
    shape = 1, inputs.channels, inputs.side, inputs.side
    return torch.zeros(shape, dtype=torch.uint8 if inputs.in_bytes else torch.float32)


def metadata(task: Classification, in_file: bool) -> dict[str, str]:
    """Return what a user of an exported network must know: lists and dictionaries as JSON, the rest as text.

    ``mean`` and ``std`` are in the unit of the pixels.

    Args:
        task: the run's task, with its data.
        in_file: whether :class:`Preprocessing` is part of the file's network.
    """
    inputs = task.inputs
    pixels = task.pixels
    low, high = task.pixel_range()
    unit = 255.0 if inputs.in_bytes else 1.0
    mean = [unit * value for value in inputs.mean]
    std = [unit * value for value in inputs.std]
    if pixels is not None:
        mean = [pixels.mean + pixels.std * value for value in mean]
        std = [pixels.std * value for value in std]
    side = inputs.side if in_file else inputs.size
    dtype = "uint8" if inputs.in_bytes and in_file else "float32"
    kind = "RGB pixels" if inputs.takes_files and inputs.channels == 3 else "pixels"
    sentence = f"{dtype} (n, {inputs.channels}, {side}, {side}), {kind} from {low:g} to {high:g}"
    if in_file:
        sentence += "; the file standardises them"
    else:
        means = ", ".join(f"{value:.6g}" for value in mean)
        stds = ", ".join(f"{value:.6g}" for value in std)
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
        "precision": precision_text(task.run.precision),
    }
    if inputs.takes_files:  # how image files become pixels
        decoding = inputs.decoding
        cut = {"shorter_side": decoding.shorter_side, "centre_crop": decoding.size}
        entries["decoding"] = json.dumps({**cut, "interpolation": decoding.interpolation})
    return entries


# ---- pose


class Standardise(nn.Module):
    """Convert pixels from 0 to 255 to the inputs of a network."""

    shift: Tensor
    scale: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        self.register_buffer("shift", 255 * torch.tensor(mean).view(-1, 1, 1))
        self.register_buffer("scale", 255 * torch.tensor(std).view(-1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Return the inputs for a batch of pixels."""
        return (x - self.shift) / self.scale

    def pixels(self, inputs: Tensor) -> Tensor:
        """Return the pixels of inputs."""
        return inputs * self.scale + self.shift


def export_pose(task: Pose, network: nn.Module, path: Path) -> dict[str, str]:
    """Write a pose network to an ONNX file that takes the pixels of the box; return the file's metadata."""
    inputs = task.inputs
    shape = len(inputs.mean), inputs.side, inputs.side
    about = {
        "task": "pose",
        "model": task.run.model,
        "input": f"float32 (n, {', '.join(map(str, shape))}), RGB pixels from 0 to 255 of the square around the box; "
        "the file standardises them",
        "input_range": json.dumps([0.0, 255.0]),
        "input_size": json.dumps(shape),
        "mean": json.dumps([255 * value for value in inputs.mean]),
        "std": json.dumps([255 * value for value in inputs.std]),
        "preprocessing": "in the file: (pixels - mean) / std",
        "square": json.dumps({"margin": MARGIN}),
        "joints": json.dumps(inputs.skeleton.joints),
        "bins_per_pixel": json.dumps(inputs.k),
        "output": "logits (n, joints, 2, bins) of x and of y; bin b is the coordinate b / bins_per_pixel",
        "precision": precision_text(task.run.precision),
    }
    module = nn.Sequential(Standardise(inputs.mean, inputs.std), network)
    export_onnx(module, path, torch.zeros(1, *shape), metadata=about)
    return about


def compare_pose(task: Pose, network: Network, path: Path) -> Comparison:
    """Compare a trained pose network with that of a file."""
    standardise = Standardise(task.inputs.mean, task.inputs.std).to(task.device)
    file = OnnxNetwork(path)
    return compare_scores(task, network, lambda x: file(standardise.pixels(x)))


# ---- tasks of the user


class WithInputs(nn.Module):
    """A network behind the function that makes its inputs."""

    def __init__(self, inputs: Network, network: nn.Module) -> None:
        super().__init__()
        self.inputs = inputs
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs for a batch."""
        outputs: Tensor = self.network(self.inputs(x))
        return outputs


def export_task(task: Task, network: nn.Module, path: Path) -> dict[str, str]:
    """Write a network with the inputs of its task in front to an ONNX file; return the file's metadata."""
    x = task.evaluation[0][:1]
    shape = ", ".join(["n", *map(str, x.shape[1:])])
    about = {
        "task": task.run.task.name,
        "model": task.run.model,
        "input": f"{str(x.dtype).removeprefix('torch.')} ({shape}), samples as they are in the data; the file makes "
        "the network's inputs",
        "facts": json.dumps(task.facts),
        "precision": precision_text(task.run.precision),
    }
    # a function, since a bound method would be copied with the data of its task
    export_onnx(WithInputs(lambda x: task.inputs(x), network), path, x, metadata=about)
    return about


def compare_task(task: Task, network: Network, path: Path) -> Comparison:
    """Compare a trained network with that of a file."""
    of_samples = copy.copy(task)
    of_samples.inputs = lambda x: x  # type: ignore[method-assign]
    return compare_scores(of_samples, lambda x: network(task.inputs(x)), OnnxNetwork(path))
