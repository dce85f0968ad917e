"""Observing which modules a closure calls."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..common.errors import BsamValueError
from .undo import Undo


def observe_calls(undo: Undo, hook: Callable[[nn.Module], Any]) -> None:
    """Call ``hook`` with every module before its forward pass, except inside compiled modules, until ``undo``."""

    def before_forward(module: nn.Module, args: Any) -> None:
        if not torch.compiler.is_compiling():
            hook(module)

    undo.catch_warnings()
    # torch.compile warns about hooks that are called twice; that does no harm here
    warnings.filterwarnings("ignore", "Using `torch.compile\\(module\\)` when there are global hooks")
    undo.callback(_remove_global_hook, before_forward)
    nn.modules.module.register_module_forward_pre_hook(before_forward)


def _remove_global_hook(hook: Callable[..., Any]) -> None:
    hooks = nn.modules.module._global_forward_pre_hooks
    for key in [key for key, registered in hooks.items() if registered is hook]:
        hooks.pop(key, None)


def refuse_batch_norm(called: nn.Module) -> None:
    """Raise if a module is batch norm, which would be updated in every pass because the optimizer has no model."""
    # calls inside a compiled module are not seen
    for module in called.modules() if hasattr(called, "_orig_mod") else (called,):
        if isinstance(module, _BatchNorm) and module.training and module.track_running_stats:
            raise BsamValueError(
                "the closure runs batch norm, whose statistics would be updated in every pass because model is None: "
                "pass the network, as in BSAM(base, model=network)"
            )
