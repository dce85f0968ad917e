"""Load the benchmarks, which are scripts, by their paths."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", BENCHMARKS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(BENCHMARKS))  # as `python benchmarks/name.py` has it
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(BENCHMARKS))
    return module


@pytest.fixture(autouse=True)
def one_thread():
    """The models are too small for several threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def step_time() -> ModuleType:
    return _load("step_time")


@pytest.fixture(scope="session")
def memory() -> ModuleType:
    return _load("memory")


@pytest.fixture(scope="session")
def hessian() -> ModuleType:
    return _load("hessian")


@pytest.fixture(scope="session")
def whole_run() -> ModuleType:
    return _load("whole_run")


@pytest.fixture(scope="session")
def throughput() -> ModuleType:
    return _load("throughput")


@pytest.fixture(scope="session")
def lora_memory() -> ModuleType:
    return _load("lora_memory")


@pytest.fixture(scope="session")
def augmentation() -> ModuleType:
    return _load("augmentation")
