"""Calling the user's closure and checking its return value."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Generator, Iterator
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ..common.errors import BsamRuntimeError, BsamTypeError, BsamValueError

Closure: TypeAlias = Callable[..., Any]


class ClosureResult(NamedTuple):
    """The losses of one call, detached."""

    mean: Tensor
    batches: float  # number of micro-batches, in units of the first one's size
    sample_losses: Tensor | None  # None if the closure returns means


def run_closure(
    closure: Closure, subset: Tensor | None, use: Callable[[Tensor, Tensor, bool, bool], object]
) -> ClosureResult:
    """Run the closure for all samples, or for those with the indices ``subset``.

    Args:
        closure: as in :meth:`bsam.SharpnessAware.backward`.
        subset: the indices of selected samples.
        use: called for each micro-batch with its losses, their mean times the micro-batch's size relative to the first
            one, whether it is the first, and whether the closure yields micro-batches.
    """
    answer = call(closure, subset)
    yields = isinstance(answer, Iterator)
    total, batches, size, dim = torch.zeros(()), 0.0, 0, None
    all_losses: list[Tensor] = []
    context = contextlib.closing if isinstance(answer, Generator) else contextlib.nullcontext
    with context(answer):  # do not leave a generator suspended after an error
        for item in answer if yields else (answer,):
            losses = as_losses(item)
            if yields and losses.dim() == 1 and len(losses) == 0:
                continue  # no sample of this micro-batch was selected
            if dim not in (None, losses.dim()):
                raise BsamRuntimeError(
                    "the closure yielded both mean losses (0-dim) and per-sample losses (1-D): yield only one of the "
                    "two"
                )
            if losses.numel() == 0:
                raise BsamRuntimeError("the closure returned an empty tensor of losses: is the batch empty?")
            dim, size = losses.dim(), size or losses.numel()
            share = losses.numel() / size
            all_losses.append(losses.detach())
            mean = losses if dim == 0 else losses.mean()
            use(losses, mean if share == 1 else mean * share, batches == 0, yields)
            total = mean.detach() if batches == 0 else total + mean.detach() * share
            batches += share
    if batches == 0:
        raise BsamRuntimeError("the closure yielded no loss: yield one loss per micro-batch")
    sample_losses = None if dim == 0 else all_losses[0] if len(all_losses) == 1 else torch.cat(all_losses)
    return ClosureResult(total if batches == 1 else total / batches, batches, sample_losses)


def call(closure: Closure, subset: Tensor | None) -> Any:
    """Call the closure, with the indices of selected samples if ``subset`` is given."""
    if subset is None:
        try:
            return closure()
        except TypeError as error:
            if error.__traceback__ is not None and error.__traceback__.tb_next is None:  # raised by the call itself
                raise BsamTypeError(
                    f"the closure is called without arguments, but {error}: take the batch from the loop, as in "
                    "`def closure(): return loss_fn(model(x), y)`"
                ) from error
            raise
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
