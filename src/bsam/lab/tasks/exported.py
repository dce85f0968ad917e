"""Trained networks in files for other programs: modules in front of them, and how they compare with the network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

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


def precision_text(precision: str) -> str:
    """Return the precision of a file's network, and that of the training if it is another one."""
    return "float32" + ("" if precision == "fp32" else f"; the run was trained and evaluated in {precision}")


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
