"""Files with the network of a classifier: what it takes, in words and as a module, and the classes that it predicts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor, nn

from ..config import Run
from ..data.arrays import Pixels
from .exported import Comparison, Network, Progress, precision_text
from .images import Inputs


class Classifier(Protocol):
    """What is asked of a task with classes: its run, its inputs and its images."""

    run: Run
    inputs: Inputs
    pixels: Pixels | None
    classes: int
    eval_samples: int

    def eval_images(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Return the images to evaluate on, in batches, as they are stored."""

    def pixel_range(self) -> tuple[float, float]:
        """Return the smallest and the largest pixel."""


@torch.no_grad()
def compare_classes(
    task: Classifier,
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


class Preprocessing(nn.Module):
    """Convert pixels to the inputs of a run's network, as training does: standardise them, and resize them if needed.

    Pixels are those of the data set: bytes, or floating-point numbers if the data set has these.

    Args:
        task: the run's task, with its data.
    """

    shift: Tensor
    scale: Tensor

    def __init__(self, task: Classifier) -> None:
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


def example(task: Classifier) -> Tensor:
    """Return a batch of one black image, with the shape and the dtype of the pixels of a run's data set."""
    inputs = task.inputs
    shape = 1, inputs.channels, inputs.side, inputs.side
    return torch.zeros(shape, dtype=torch.uint8 if inputs.in_bytes else torch.float32)


def metadata(task: Classifier, in_file: bool) -> dict[str, str]:
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
