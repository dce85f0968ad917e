"""Observing which modules a closure calls."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn


@contextlib.contextmanager
def calls_seen(hook: Callable[[nn.Module], Any]) -> Iterator[None]:
    """Call ``hook`` with every module before its forward pass, except inside compiled modules."""

    def before_forward(module: nn.Module, args: Any) -> None:
        if not torch.compiler.is_compiling():
            hook(module)

    with warnings.catch_warnings():
        # torch.compile warns about hooks that are called twice; that does no harm here
        warnings.filterwarnings("ignore", "Using `torch.compile\\(module\\)` when there are global hooks")
        handle = nn.modules.module.register_module_forward_pre_hook(before_forward)
        try:
            yield
        finally:
            handle.remove()
