"""Sharpness-aware training with Accelerate."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from ..common.errors import BsamRuntimeError, BsamTypeError
from ..core.objective import Closure
from ..core.optimizer import SharpnessAware

if TYPE_CHECKING:
    from accelerate import Accelerator  # type: ignore[import-untyped]


def backward(accelerator: Accelerator, optimizer: Optimizer, closure: Closure) -> Tensor:
    """Add the method's direction to ``p.grad``, where ``accelerator.backward(loss)`` would add the gradient.

    As there, the loss is divided by ``gradient_accumulation_steps`` and scaled by the accelerator's ``GradScaler``.
    Under ``accelerator.accumulate`` each micro-batch has its own perturbation. Clip and step as usual afterwards. Do
    not use ``optimizer.step(closure)`` under ``accumulate``, where it skips the closure on most micro-batches.

    Args:
        accelerator: the accelerator that prepared the model and the optimizer.
        optimizer: the sharpness-aware optimizer, as returned by ``accelerator.prepare``.
        closure: returns the loss of the micro-batch, as in :meth:`bsam.SharpnessAware.backward`, without calling
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
    method = unwrap_optimizer(optimizer)
    steps = accelerator.gradient_accumulation_steps
    if not callable(closure):
        raise BsamTypeError(f"backward needs a closure that computes the loss, got {type(closure).__name__}")

    @functools.wraps(closure)  # keeps the signature, which says whether the closure takes indices
    def average_loss(*indices: Any) -> Any:
        result = closure(*indices)
        if any(p.grad is not None for p in method.params):
            raise BsamRuntimeError("the closure called backward: let it only return the loss")
        return (divide(loss) for loss in result) if isinstance(result, Iterator) else divide(result)

    def divide(loss: Any) -> Any:  # if it is neither, method.backward raises an error
        if isinstance(loss, tuple) and len(loss) == 2:  # with the outputs
            return divide(loss[0]), loss[1]
        return loss / steps if isinstance(loss, Tensor) else loss

    return method.backward(average_loss, scaler=accelerator.scaler) * steps


def unwrap_optimizer(optimizer: Optimizer | None) -> SharpnessAware:
    """Return the sharpness-aware optimizer that Accelerate wrapped."""
    inner = getattr(optimizer, "optimizer", optimizer)
    if not isinstance(inner, SharpnessAware):
        raise BsamTypeError(
            f"optimizer must be a sharpness-aware optimizer, prepared or not, got {type(inner).__name__}: build one, "
            "such as bsam.BSAM(base, model)"
        )
    return inner


def check_accelerator(accelerator: Accelerator) -> None:
    """Raise an error for settings under which Accelerate runs or changes the passes itself."""
    kind = accelerator.distributed_type.value
    if kind != "NO" and not kind.startswith("MULTI_"):
        raise BsamRuntimeError(
            f"sharpness-aware methods do not work with Accelerate's {kind}, which computes gradients and steps itself: "
            "use one process or DistributedDataParallel, or shard the model with fully_shard in a plain loop"
        )
    if accelerator.parallelism_config is not None:
        raise BsamRuntimeError("sharpness-aware methods do not work with Accelerate's parallelism_config: pass None")
    if accelerator.mixed_precision == "fp8":
        raise BsamRuntimeError(
            "sharpness-aware methods do not work with mixed_precision='fp8', whose scales every pass would change: use "
            "'bf16', 'fp16' or 'no'"
        )
