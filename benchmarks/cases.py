"""The methods in the time and memory benchmarks: every entry of METHODS, and BSAM with two passes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from bsam.common.method_info import MethodInfo
from bsam.lab.training.trainer import TrainStep, build_method
from bsam.methods import METHODS

DEFAULT = ("sam", "bsam", "bsam-2")


@dataclass(frozen=True)
class Case:
    """A method as the benchmarks run it.

    Args:
        method: name in METHODS.
        arguments: arguments that differ from the defaults.
        cycle: period of the steps' costs; whole cycles are timed, each starting from step 0.
        label: name in the results; by default the class name.
    """

    method: str
    arguments: dict[str, Any] = field(default_factory=dict)
    cycle: int = 1
    label: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "label", self.label or METHODS[self.method].__name__)

    @property
    def capturable(self) -> bool:
        """Whether one CUDA graph can replay every step."""
        return METHODS[self.method].capturable and self.cycle == 1

    @property
    def passes(self) -> float:
        """The number of forward and backward passes per step that the method states."""
        return METHODS[self.method].passes_with(self.arguments)

    def train_step(
        self, base: torch.optim.Optimizer, model: nn.Module, *, batch: int, samples: int, classes: int
    ) -> TrainStep:
        """Build the method with ``base``; methods that select samples select half of the batch."""
        half = dict.fromkeys(METHODS[self.method].counts_of_batch, max(1, batch // 2))
        known = {"total_steps": self.cycle, "samples": samples, "classes": classes, "start_epoch": 0, "epochs_back": 1}
        optimizer, loss = build_method(self.method, self.arguments, base, model, **half, **known)
        return TrainStep(model, optimizer, loss=loss)


def cases() -> dict[str, Case]:
    """Return the cases by name."""
    special = {
        "bsam": Case("bsam", label="BSAM3"),
        "bsam-2": Case("bsam", {"passes": 2}, label="BSAM2"),
        "looksam": Case("looksam", cycle=5),
        "rst": Case("rst", {"p": 0.5, "seed": 0}, cycle=8),  # four of these eight steps are SAM steps
        "aesam": Case("aesam", cycle=10),  # a whole training run: the threshold falls from the first to the last step
        "esam": Case("esam", cycle=10),
    }
    return {name: special.get(name) or Case(name, cycle=_cycle(METHODS[name])) for name in (*METHODS, "bsam-2")}


def _cycle(method: type[MethodInfo]) -> int:
    """Return 1 for a method whose steps all cost the same, as they do if a CUDA graph of one can replay all of them."""
    return 1 if method.capturable or method.is_loss else 10
