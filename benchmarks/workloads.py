"""The models that step_time.py trains, with their batches and base optimizers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from bsam.lab.models import build

CLASSES = 10


@dataclass(frozen=True)
class Workload:
    """A model, its batch, and its training settings.

    The learning rate is tiny, so that hundreds of steps of several optimizers on one model hardly change it.
    """

    name: str
    model: Callable[[], nn.Module]
    batch: tuple[int, ...]  # shape of the input
    repeats: dict[str, int]  # default number of repetitions on each device
    base: type[torch.optim.Optimizer] = torch.optim.SGD
    settings: dict[str, Any] = field(default_factory=lambda: {"lr": 1e-6, "momentum": 0.9, "weight_decay": 5e-4})
    threads: int | None = None  # CPU threads; None means torch's default
    rival: bool = False  # whether to time pytorch_optimizer's SAM too


def tiny() -> nn.Module:
    """Return a small perceptron, whose steps are dominated by Python overhead."""
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, CLASSES))


def deep_linear() -> nn.Module:
    """Return 40 layers of Linear 256 + batch norm; at batch 32, weight-space arithmetic costs as much as the passes."""
    layers = [layer for _ in range(40) for layer in (nn.Linear(256, 256), nn.BatchNorm1d(256), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(256, CLASSES))


class Residual(nn.Module):
    """The perceptron of a transformer block, with norm and shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Add the block's output to its input."""
        return x + self.body(x)


def wide() -> nn.Module:
    """Return 100 million parameters; at batch 1 a pass reads each weight once, as a foreach operation does."""
    return nn.Sequential(*(Residual(1024) for _ in range(12)), nn.Linear(1024, CLASSES))


WORKLOADS: dict[str, Workload] = {
    workload.name: workload
    for workload in (
        Workload("tiny", tiny, (32, 64), {"cpu": 100, "cuda": 30}, threads=1),
        Workload("resnet8", lambda: build("resnet8"), (128, 3, 32, 32), {"cpu": 20, "cuda": 30}),
        Workload("resnet18", lambda: build("resnet18"), (128, 3, 32, 32), {"cpu": 5, "cuda": 20}),
        Workload("deep-linear", deep_linear, (32, 256), {"cpu": 60, "cuda": 30}, threads=1, rival=True),
        Workload(
            "wide-100m",
            wide,
            (1, 1024),
            {"cpu": 5, "cuda": 20},
            base=torch.optim.AdamW,
            settings={"lr": 1e-8, "weight_decay": 5e-4},
            rival=True,
        ),
    )
}
DEFAULT = {
    "cpu": ["tiny", "resnet8", "deep-linear"],
    "cuda": list(WORKLOADS),
}  # ResNet-18 would take a quarter of an hour on two cores
