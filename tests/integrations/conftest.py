"""The frameworks, imported once for all tests of a worker, and their global state, reset after each test."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from bsam.models.timm_import import _import_torchvision

collect_ignore = ["hugging_face.py"]  # or every worker would import it at collection, for doctests


@pytest.fixture(scope="session")
def hf() -> ModuleType:
    """The module ``hugging_face`` beside this file, which imports Transformers and Accelerate."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what a framework warns of at its import is no concern of ours
        _import_torchvision()
        return importlib.import_module("integrations.hugging_face")


@pytest.fixture(autouse=True)
def _reset_accelerate() -> Iterator[None]:
    yield
    if "accelerate.state" in sys.modules:
        state = sys.modules["accelerate.state"]
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()


@pytest.fixture(scope="session")
def hf_ranks(two_ranks_of, tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """What two processes saved; this file's neighbour says what they train."""
    return two_ranks_of(Path(__file__).with_name("hugging_face.py"), tmp_path_factory.mktemp("ranks"))
