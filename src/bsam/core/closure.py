"""Calling the user's closure: one mini-batch, micro-batches, or chosen samples."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..common.errors import BsamRuntimeError, BsamTypeError, BsamValueError

Closure: TypeAlias = Callable[..., Any]


def call(closure: Closure, subset: Tensor | None) -> Any:
    """Call the closure, with the indices of the chosen samples if there are any."""
    if subset is None:
        return closure()
    parameters = inspect.signature(closure).parameters.values()
    if not any(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.VAR_POSITIONAL) for p in parameters):
        raise BsamTypeError(
            "this method chooses samples, and the closure takes no argument: let it take their indices, as in "
            "`def closure(indices=slice(None))`"
        )
    return closure(subset)


def as_losses(answer: object) -> Tensor:
    """Return what a closure gave as a tensor of losses: 0-dim, or one per sample."""
    if isinstance(answer, float):  # from a closure that ran backward itself
        return torch.tensor(answer)
    if answer is None:
        raise BsamRuntimeError(
            "the closure returned None: return the loss (also when the closure runs backward itself)"
        )
    if not isinstance(answer, Tensor):
        raise BsamTypeError(
            f"the closure must return the loss as a tensor or yield one per micro-batch, got {type(answer).__name__}"
        )
    if answer.is_complex():
        raise BsamValueError(f"the loss must be real, got {answer.dtype}: return its real part or its absolute value")
    if answer.dim() > 1:
        raise BsamValueError(
            f"the loss must be a scalar, or one value per sample (1-D); it has the shape {tuple(answer.shape)}"
        )
    return answer
