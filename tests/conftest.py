"""What all tests build on: a small network with batch norm, a batch, and the optimizers to compare."""

from __future__ import annotations

import copy
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass
class Problem:
    """A network, a batch and the loss closures a user might write for them."""

    model: nn.Module
    x: Tensor
    y: Tensor

    def loss(self) -> Tensor:
        return F.cross_entropy(self.model(self.x), self.y)

    def losses(self, indices: Any = slice(None)) -> Tensor:
        """One per sample, of the samples asked for: what methods that choose samples need."""
        return F.cross_entropy(self.model(self.x[indices]), self.y[indices], reduction="none")

    def clone(self) -> Problem:
        return copy.deepcopy(self)

    def weights(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]

    def buffers(self) -> list[Tensor]:
        return [b.detach().clone() for b in self.model.buffers()]


def network(dtype: torch.dtype = torch.float64) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Tanh(), nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)


@pytest.fixture
def problem() -> Problem:
    torch.manual_seed(7)
    return Problem(network(), torch.randn(24, 6, dtype=torch.float64), torch.randint(0, 3, (24,)))


@pytest.fixture
def plain(problem: Problem) -> Problem:
    """The same without batch norm, where every sample stands for itself."""
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    return Problem(model, problem.x, problem.y)


def evenly(labels: Tensor, n: int) -> list[int]:
    """The places of ``n`` samples: the first of each class, the second of each, and so on; in their order."""
    seen: dict[int, int] = {}
    turns = []
    for place, label in enumerate(labels.tolist()):
        seen[label] = seen.get(label, -1) + 1
        turns.append((seen[label], place))
    return sorted(place for _, place in sorted(turns)[:n])


@pytest.fixture(name="evenly", scope="session")
def evenly_fixture() -> Callable[[Tensor, int], list[int]]:
    return evenly


signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts what it runs in the background deaf to it, and so would be what tests start

torch.set_num_threads(1)  # the networks are tiny, and CI has two cores

BASES: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=1e-2),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2, weight_decay=1e-2),
}


@pytest.fixture(params=sorted(BASES))
def make_base(request: pytest.FixtureRequest) -> Callable[[Any], torch.optim.Optimizer]:
    return BASES[request.param]
