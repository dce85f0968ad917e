"""Calling the user's closure and checking its return value."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..common.errors import BsamRuntimeError, BsamTypeError, BsamValueError

Closure: TypeAlias = Callable[..., Any]


def call(closure: Closure, subset: Tensor | None) -> Any:
    """Call the closure, with the indices of selected samples if ``subset`` is given."""
    if subset is None:
        return closure()
    parameters = inspect.signature(closure).parameters.values()
    if not any(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.VAR_POSITIONAL) for p in parameters):
        raise BsamTypeError(
            "this method selects samples, but the closure takes no argument: let it take their indices, as in "
            "`def closure(indices=slice(None))`"
        )
    return closure(subset)


def as_losses(answer: object) -> Tensor:
    """Convert the value that a closure returned or yielded to a tensor of losses: 0-dim, or one per sample."""
    if isinstance(answer, float):  # from a closure that ran backward itself
        return torch.tensor(answer)
    if answer is None:
        raise BsamRuntimeError("the closure returned None: return the loss, even if the closure runs backward itself")
    if not isinstance(answer, Tensor):
        raise BsamTypeError(
            f"the closure must return the loss as a tensor or yield one per micro-batch, got {type(answer).__name__}"
        )
    if answer.is_complex():
        raise BsamValueError(f"the loss must be real, got {answer.dtype}: return its real part or its absolute value")
    if answer.dim() > 1:
        raise BsamValueError(
            f"the loss must be a scalar or one value per sample (1-D), got the shape {tuple(answer.shape)}"
        )
    return answer
