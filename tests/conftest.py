"""Fixtures of all tests: a small network with a batch, base optimizers, and a function that starts two ranks."""

from __future__ import annotations

import copy
import functools
import gc
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # here and in the processes that tests start: pytest-xdist fills the cores

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch.nn import functional as F

from helpers import search_roughly
from processes import Script

gc.disable()  # until all tests are collected
torch.set_num_threads(1)
# While a graph is traced, torch formats the whole stack for each value, for messages of its own: a third of the time.
fake_tensor.traceback = SimpleNamespace(extract_stack=list, format_list=list)
# So does each manual_seed, three times, for devices that are not there.
torch.cuda.traceback = torch.xpu.traceback = torch.mtia.traceback = SimpleNamespace(format_stack=list)
os.fsync = lambda descriptor: None  # it waits for the disk, and no test cuts the power
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs, and their children, ignore it


@dataclass
class Problem:
    """A network, a batch and loss closures."""

    model: nn.Module
    x: Tensor
    y: Tensor

    def loss(self) -> Tensor:
        return F.cross_entropy(self.model(self.x), self.y)

    def loss_and_outputs(self) -> tuple[Tensor, Tensor]:
        outputs = self.model(self.x)
        return F.cross_entropy(outputs, self.y), outputs

    def losses(self, indices: Any = slice(None)) -> Tensor:
        """Return the loss of each sample at ``indices``, for methods that select samples."""
        return F.cross_entropy(self.model(self.x[indices]), self.y[indices], reduction="none")

    def clone(self) -> Problem:
        return copy.deepcopy(self)

    def weights(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]

    def buffers(self) -> list[Tensor]:
        return [b.detach().clone() for b in self.model.buffers()]


def network(dtype: torch.dtype = torch.float64) -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Tanh(), nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 3)
    ).to(dtype)


@pytest.fixture
def problem() -> Problem:
    torch.manual_seed(7)
    return Problem(network(), torch.randn(24, 6, dtype=torch.float64), torch.randint(0, 3, (24,)))


@pytest.fixture
def plain(problem: Problem) -> Problem:
    """The same without batch norm: the loss of a sample does not depend on the others."""
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    return Problem(model, problem.x, problem.y)


def evenly(labels: Tensor, n: int) -> list[int]:
    """Return the sorted indices of ``n`` samples: the first of each class, then the second of each, and so on."""
    seen: dict[int, int] = {}
    turns = []
    for place, label in enumerate(labels.tolist()):
        seen[label] = seen.get(label, -1) + 1
        turns.append((seen[label], place))
    return sorted(place for _, place in sorted(turns)[:n])


@pytest.fixture(name="evenly", scope="session")
def evenly_fixture() -> Callable[[Tensor, int], list[int]]:
    return evenly


@pytest.fixture(scope="session")
def two_ranks_of() -> Callable[[Path, Path], list[Any]]:
    """A function that starts ``SCRIPT RANK FOLDER`` as two processes and returns what each saved as ``RANK.pt``."""
    return run_ranks


def run_ranks(script: Path, folder: Path) -> list[Any]:
    files = [folder / f"{rank}.txt" for rank in range(2)]
    processes = [Script(script, rank, folder, output=file) for rank, file in enumerate(files)]
    try:
        codes = [process.wait(timeout=300) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert codes == [0, 0], "\n".join(file.read_text() for file in files)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


BASES: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=1e-2),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2, weight_decay=1e-2),
}


@pytest.fixture(params=sorted(BASES))
def make_base(request: pytest.FixtureRequest) -> Callable[[Any], torch.optim.Optimizer]:
    return BASES[request.param]


FIRST = (  # files with the longest tests, that fork processes, or that import large frameworks
    "test_site.py",
    "test_distributed.py",
    "test_ranks.py",
    "test_demo.py",
    "test_executors.py",
    "test_ray_tasks.py",
    "test_compare.py",
    "test_own_names.py",
    "test_own_recipe.py",
    "test_own_tasks.py",
    "test_study.py",
    "test_resume.py",
    "test_machine.py",
    "test_runner.py",
    "test_scripts.py",
    "test_losses.py",
    "test_flatness.py",
    "test_train.py",
    "test_run.py",
    "test_images.py",
    "test_accelerate.py",
    "test_lightning.py",
    "test_framework_ranks.py",
    "test_guides.py",
    "test_main.py",
    "test_frameworks.py",
    "test_transformers.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run some files first, and so in one process of pytest-xdist.

    No process then waits for another at the end, and one of them starts the process that others are forked from.
    """
    items.sort(key=lambda item: item.path.name not in FIRST)


def pytest_collection_finish() -> None:
    """Let the garbage collector pass over modules and tests, which stay: a collection is then fast."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)
    gc.enable()
    trace_without_shapes()


def trace_without_shapes() -> None:
    """Keep torch from noting the shape of each value where it traces real tensors, which takes a fifth of the time.

    Nothing here reads these shapes.
    """
    if tracing := sys.modules.get("torch.fx.experimental.proxy_tensor"):  # importing it takes a second
        note = tracing.set_meta
        tracing.set_meta = lambda proxy, value: (
            proxy if isinstance(value, Tensor) and not fake_tensor.is_fake(value) else note(proxy, value)
        )


@pytest.fixture
def rough_eigenvalues(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of what uses eigenvalues; those of the search are in tests/flatness."""
    search_roughly(monkeypatch)


@pytest.fixture(scope="session")
def operators_once():
    """Torch builds the table of all operators for each ONNX file; build it once."""
    from torch.onnx._internal._lazy_import import onnxscript_apis

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(onnxscript_apis, "get_torchlib_ops", functools.cache(onnxscript_apis.get_torchlib_ops))
        yield
