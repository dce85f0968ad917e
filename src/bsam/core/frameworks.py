"""Frameworks whose own calls of ``step`` would train wrongly."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

from ..common.errors import BsamRuntimeError


def check_closure(closure: Any) -> None:
    """Raise if a framework passes its own closure, or drops closures, so that training would be wrong."""
    given = (closure, *closure.args) if isinstance(closure, partial) else (closure,)
    if any(base.__name__ == "AbstractClosure" for one in given for base in type(one).__mro__):
        raise BsamRuntimeError(
            "Lightning would clip and accumulate the gradients of single passes: put "
            "bsam.integrations.lightning.SharpnessAwareMixin before LightningModule among the base classes, and let "
            "optimizer_step call super().optimizer_step"
        )
    if _is_called_by_accelerate() and (steps := _accumulated_batches()) > 1:
        raise BsamRuntimeError(
            f"Accelerate accumulates {steps} batches, but calls step(closure) for the last one only: call "
            "bsam.integrations.accelerate.backward(accelerator, optimizer, closure), and then optimizer.step()"
        )
    if getattr(closure, "__module__", "") == "skorch.net" and _changes_gradients(closure):
        raise BsamRuntimeError(
            "skorch would call on_grad_computed of its callbacks in every pass: derive the net from "
            "bsam.integrations.skorch.SharpnessAwareMixin"
        )


def _is_called_by_accelerate() -> bool:
    if "accelerate.optimizer" not in sys.modules:
        return False
    frame: Any = sys._getframe()
    for _ in range(8):  # hooks and schedulers may lie between
        if frame is None:
            return False
        if frame.f_globals.get("__name__") == "accelerate.optimizer":
            return True
        frame = frame.f_back
    return False


def _accumulated_batches() -> int:
    return sys.modules["accelerate.state"].GradientState().num_steps


def _changes_gradients(closure: Any) -> bool:
    """Whether a net of skorch has callbacks such as ``GradientNormClipping``."""
    cells = dict(zip(closure.__code__.co_freevars, closure.__closure__ or (), strict=True))
    unused = sys.modules["skorch.callbacks"].Callback.on_grad_computed
    callbacks = cells["self"].cell_contents.callbacks_ if "self" in cells else []
    return any(type(callback).on_grad_computed is not unused for _, callback in callbacks)
