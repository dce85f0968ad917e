"""The frameworks, each imported by the first test that needs it: their imports take seconds."""

from __future__ import annotations

import importlib
import warnings
from types import ModuleType

import pytest

from bsam.models.timm_import import _import_torchvision


def import_framework(name: str) -> ModuleType:
    """Import a framework that imports torchvision, which beside a torch for CPUs needs help."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _import_torchvision()
        return importlib.import_module(name)


@pytest.fixture(scope="session")
def lightning() -> ModuleType:
    import_framework("lightning.pytorch")
    return import_framework("lightning")
