"""What is timed and weighed: every method of METHODS, and BSAM with two passes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from bsam.methods import METHODS
from bsam.training.train_step import TrainStep, build_optimizer

DEFAULT = ("sam", "bsam", "bsam-2")


@dataclass(frozen=True)
class Case:
    """A method as the benchmarks run it.

    Args:
        method: its name in METHODS.
        arguments: those that are not its defaults.
        cycle: steps whose costs differ; whole cycles are timed, and each starts from step 0.
    """

    method: str
    arguments: dict[str, Any] = field(default_factory=dict)
    cycle: int = 1

    @property
    def capturable(self) -> bool:
        """Whether a CUDA graph of one step is as good as the steps."""
        return METHODS[self.method].capturable

    @property
    def passes(self) -> float:
        """The promise: forward+backward passes a step."""
        return self.arguments.get("passes", METHODS[self.method].passes)

    def learner(
        self, base: torch.optim.Optimizer, model: nn.Module, *, batch: int, samples: int, classes: int
    ) -> TrainStep:
        """The method around ``base``; one that chooses samples takes half of a batch."""
        known = {
            "k": max(1, batch // 2),
            "total_steps": self.cycle,
            "samples": samples,
            "classes": classes,
            "start_epoch": 0,
            "epochs_back": 1,
        }
        return build_optimizer(self.method, self.arguments, base, model, **known)


SPECIAL = {
    "bsam-2": Case("bsam", {"passes": 2}),
    "looksam": Case("looksam", {"k": 5}, cycle=5),
    "rst": Case("rst", {"p": 0.5, "seed": 0}, cycle=8),  # these eight bernoulli show heads four times
    "aesam": Case(
        "aesam", cycle=10
    ),  # a whole training in small: its threshold falls from the first step of a cycle to the last
    "esam": Case("esam", cycle=10),
}
CASES = {name: SPECIAL.get(name, Case(name)) for name in (*METHODS, "bsam-2")}
LABELS = {name: METHODS[case.method].cls.__name__ for name, case in CASES.items()} | {
    "bsam": "BSAM3",
    "bsam-2": "BSAM2",
}
