"""The frameworks, each imported by the first test that needs it: their imports take seconds."""

from __future__ import annotations

import gc
import importlib
import runpy
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from bsam.common.timm_import import import_torchvision
from processes import Script

ROOT = Path(__file__).parents[2]
collect_ignore = ["hugging_face.py"]  # or every worker would import it at collection, for doctests


@pytest.fixture(scope="session")
def hf() -> ModuleType:
    """The module ``hugging_face``, which imports Transformers and Accelerate."""
    return import_framework("integrations.hugging_face")


@pytest.fixture
def example(capsys, monkeypatch) -> Callable[..., tuple[dict[str, Any], Any, str]]:
    """A function that runs ``main`` of an example on the CPU and returns its globals, its result and its output."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def run(name: str, **arguments: Any) -> tuple[dict[str, Any], Any, str]:
        names = runpy.run_path(str(ROOT / "examples" / f"{name}.py"))
        return names, names["main"](**arguments), capsys.readouterr().out

    return run


@pytest.fixture(autouse=True)
def _reset_accelerate() -> Iterator[None]:
    yield
    if "accelerate.state" in sys.modules:
        state = sys.modules["accelerate.state"]
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()


@pytest.fixture(scope="session")
def hf_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """The results of the two processes of hugging_face.py."""
    folder = tmp_path_factory.mktemp("ranks")
    script = Script(Path(__file__).with_name("hugging_face.py"), folder, output=folder / "printed.txt")
    assert script.wait(300) == 0, (folder / "printed.txt").read_text()
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


def import_framework(name: str) -> ModuleType:
    """Import a framework that imports torchvision, which may not fit a CPU build of torch.

    Its many objects stay: the garbage collector, which Accelerate calls after each training, passes over them.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings that a framework emits when it is imported
        import_torchvision()
        module = importlib.import_module(name)
    gc.freeze()
    return module


@pytest.fixture(scope="session")
def lightning() -> ModuleType:
    import_framework("lightning.pytorch")
    return import_framework("lightning")


@pytest.fixture(scope="session")
def timm() -> ModuleType:
    for part in ("data", "loss", "models", "optim", "scheduler", "utils"):
        import_framework(f"timm.{part}")
    return import_framework("timm")
