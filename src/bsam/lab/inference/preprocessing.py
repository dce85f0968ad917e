"""The preprocessing of a run's images, as nodes of an exported file and as its metadata."""

from __future__ import annotations

import json

import torch
from torch import Tensor, nn

from ..tasks.classification import Classification


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
        inputs, self._pixels = task.inputs, task.pixels
        self._resized = inputs.resized
        unit = 255.0 if inputs.in_bytes else 1.0
        self._is_identity = not any(inputs.mean) and {*inputs.std} == {unit} == {1.0}
        # constants rounded as in training, so that the inputs are the same bit for bit
        for name, values in (
            ("shift", [unit * mean for mean in inputs.mean]),
            ("scale", [1 / (unit * std) for std in inputs.std]),
        ):
            self.register_buffer(name, torch.tensor(values, dtype=torch.float32).view(-1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Return the inputs for a batch of pixels (n, channels, side, side)."""
        x = x.float()
        if self._pixels is not None:
            x = (x - self._pixels.mean) / self._pixels.std
        if not self._is_identity:
            x = (x - self.shift) * self.scale
        return self._resized(x)


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
    inputs, (low, high) = task.inputs, task.pixel_range()
    unit, before = 255.0 if inputs.in_bytes else 1.0, task.pixels
    mean, std = [unit * value for value in inputs.mean], [unit * value for value in inputs.std]
    if before is not None:
        mean, std = [before.mean + before.std * value for value in mean], [before.std * value for value in std]
    is_rgb = inputs.takes_files and inputs.channels == 3
    pixels = f"{'RGB ' * is_rgb}pixels from {low:g} to {high:g}"
    side = inputs.side if in_file else inputs.size
    shape = f"(n, {inputs.channels}, {side}, {side})"
    dtype = "uint8" if inputs.in_bytes and in_file else "float32"
    how = "(pixels - mean) / std" + (
        f", resized to {inputs.size} x {inputs.size}" if inputs.size != inputs.side else ""
    )
    if in_file:
        sentence = f"{dtype} {shape}, {pixels}; the file standardises them"
    else:
        numbers = (", ".join(f"{value:.6g}" for value in values) for values in (mean, std))
        sentence = f"{dtype} {shape}, {pixels}, standardised with mean {next(numbers)} and std {next(numbers)}"
    written = {
        "task": "classification",
        "model": task.run.model,
        "input": sentence,
        "input_range": json.dumps([low, high]),
        "input_size": json.dumps([inputs.channels, side, side]),
        "mean": json.dumps(mean),
        "std": json.dumps(std),
        "preprocessing": f"{'in the file' if in_file else 'not in the file'}: {how}",
        "class_names": json.dumps(inputs.class_names or [str(number) for number in range(task.classes)]),
        "output": "logits, one for each class",
    }
    if inputs.takes_files:  # how image files become pixels
        decoding = inputs.decoding
        cut = {"shorter_side": decoding.shorter_side, "centre_crop": decoding.size}
        written["decoding"] = json.dumps({**cut, "interpolation": decoding.interpolation})
    return written
