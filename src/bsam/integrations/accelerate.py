"""Sharpness-aware training with Accelerate."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from ..common.errors import BsamRuntimeError, BsamTypeError
from ..core.closure import Closure
from ..core.optimizer import SharpnessAware

if TYPE_CHECKING:
    from accelerate import Accelerator  # type: ignore[import-untyped]


def backward(accelerator: Accelerator, optimizer: Optimizer, closure: Closure) -> Tensor:
    """Add the method's direction to ``p.grad``, where ``accelerator.backward(loss)`` would add the gradient.

    As there, the loss is divided by ``gradient_accumulation_steps`` and scaled by the accelerator's ``GradScaler``, and
    under ``accelerator.accumulate`` each micro-batch is perturbed on its own. Clip and step as usual afterwards;
    ``optimizer.step(closure)`` is not for ``accumulate``, which would not run the closure on most micro-batches.

    Args:
        accelerator: the accelerator that prepared the model and the optimizer.
        optimizer: what ``accelerator.prepare`` returned for a sharpness-aware optimizer.
        closure: returns the loss of the micro-batch, as in :meth:`bsam.SharpnessAware.backward`; it does not call
            ``backward`` itself.

    Returns:
        The loss at ``w``, detached and not divided.

    Example::

        for x, y in loader:
            with accelerator.accumulate(model):
                loss = backward(
                    accelerator, optimizer, lambda: F.cross_entropy(model(x), y)
                )
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    """
    check_accelerator(accelerator)
    method = unwrapped(optimizer)
    steps = accelerator.gradient_accumulation_steps
    if not callable(closure):
        raise BsamTypeError(f"backward needs a closure that computes the loss, got {type(closure).__name__}")

    @functools.wraps(closure)  # with its signature, which says whether it takes indices
    def divided(*indices: Any) -> Any:
        answer = closure(*indices)
        if any(p.grad is not None for p in method.params):
            raise BsamRuntimeError("the closure ran backward, which is called for it: let it only return the loss")
        return (over_steps(loss) for loss in answer) if isinstance(answer, Iterator) else over_steps(answer)

    def over_steps(loss: Any) -> Any:  # what is no loss is refused by the method
        return loss / steps if isinstance(loss, Tensor) else loss

    return method.backward(divided, scaler=accelerator.scaler) * steps


def unwrapped(optimizer: Optimizer | None) -> SharpnessAware:
    """Return the sharpness-aware optimizer that Accelerate wrapped."""
    inner = getattr(optimizer, "optimizer", optimizer)
    if not isinstance(inner, SharpnessAware):
        raise BsamTypeError(
            f"optimizer must be a sharpness-aware optimizer, or what accelerator.prepare made of one, got "
            f"{type(inner).__name__}: build it as bsam.BSAM(base, model)"
        )
    return inner


def check_accelerator(accelerator: Accelerator) -> None:
    """Raise if this kind of training cannot be exact: its engine runs or changes the passes by itself."""
    kind = accelerator.distributed_type.value
    if kind != "NO" and not kind.startswith("MULTI_"):
        raise BsamRuntimeError(
            f"sharpness-aware methods do not work with Accelerate's {kind}, which takes gradients and steps in an "
            "engine of its own: train in one process or with DistributedDataParallel, or shard the model with "
            "fully_shard in a loop of your own"
        )
    if accelerator.parallelism_config is not None:
        raise BsamRuntimeError("sharpness-aware methods do not work with Accelerate's parallelism_config: pass None")
    if accelerator.mixed_precision == "fp8":
        raise BsamRuntimeError(
            "sharpness-aware methods do not work with mixed_precision='fp8', whose scales every pass would move: use "
            "'bf16', 'fp16' or 'no'"
        )
