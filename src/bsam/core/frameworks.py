"""Frameworks whose own calls of ``step`` would train wrongly."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from ..common.errors import BsamRuntimeError

LIGHTNING = ("lightning.pytorch.loops.optimization.automatic", "pytorch_lightning.loops.optimization.automatic")
ACCELERATE, SKORCH = "accelerate.optimizer", "skorch.net"


def check_callers() -> None:
    """Raise if a framework calls ``step`` with a closure in a way that would train wrongly."""
    if sys.modules.keys().isdisjoint((*LIGHTNING, ACCELERATE, SKORCH)):
        return
    callers = _callers()
    if not callers.keys().isdisjoint(LIGHTNING):
        raise BsamRuntimeError(
            "Lightning would clip and accumulate the gradients of single passes: put "
            "bsam.integrations.lightning.SharpnessAwareMixin before LightningModule among the base classes, and let "
            "optimizer_step call super().optimizer_step"
        )
    if ACCELERATE in callers and (steps := sys.modules["accelerate.state"].GradientState().num_steps) > 1:
        raise BsamRuntimeError(
            f"Accelerate accumulates {steps} batches, but calls step(closure) for the last one only: call "
            "bsam.integrations.accelerate.backward(accelerator, optimizer, closure), and then optimizer.step()"
        )
    if SKORCH in callers and _changes_gradients(callers[SKORCH].f_locals.get("self")):
        raise BsamRuntimeError(
            "skorch would call on_grad_computed in every pass: derive the net from "
            "bsam.integrations.skorch.SharpnessAwareMixin"
        )


def _callers() -> dict[str, FrameType]:
    """Return the innermost frame of each module that is being executed, by the module's name."""
    callers: dict[str, FrameType] = {}
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        callers.setdefault(frame.f_globals.get("__name__", ""), frame)
        frame = frame.f_back
    return callers


def _changes_gradients(net: Any) -> bool:
    """Whether a net of skorch, or one of its callbacks such as ``GradientNormClipping``, changes gradients."""
    if net is None:
        return False
    unused = sys.modules["skorch.callbacks"].Callback.on_grad_computed
    by_callbacks = any(type(callback).on_grad_computed is not unused for _, callback in net.callbacks_)
    return by_callbacks or type(net).on_grad_computed is not sys.modules[SKORCH].NeuralNet.on_grad_computed
