"""Mistakes that are visible before the closure runs, or on the loss that it returns."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..core.tensors import Memory


def before_the_passes(optimizer: Any, names: Callable[[Iterable[Tensor]], str]) -> list[str]:
    """Return findings on the model, the parameters and their gradients.

    Args:
        optimizer: the optimizer, with up-to-date parameters.
        names: returns the names of parameters.
    """
    findings = []
    model: nn.Module | None = optimizer.model
    if model is not None and not model.training:
        findings.append("model is in eval mode: call model.train() before training, unless that is intended")
    if optimizer.stale_gradients:
        findings.append(
            "backward has added its direction to that of the last step: call optimizer.zero_grad() after each step"
        )
    memory, shared = Memory(()), []
    for p in optimizer.params:
        shared += [p] if memory.overlaps(p) else []
        memory.add(p)
    if shared:
        findings.append(
            f"{len(shared)} parameter(s) share memory with others ({names(shared)}) and are perturbed once for each: "
            "to tie weights, assign the parameter, as in head.weight = embedding.weight"
        )
    return findings


def scale_of(loss: Tensor) -> float | None:
    """Return the factor of a loss that was multiplied by a large power of 2, as ``scaler.scale`` does."""
    if type(loss.grad_fn).__name__ != "MulBackward0":
        return None
    try:
        factors = [loss.grad_fn._saved_self, loss.grad_fn._saved_other]  # type: ignore[union-attr]
    except RuntimeError:  # the closure ran backward, which frees them
        return None
    scales = (t for t in factors if t is not None and t.dim() == 0 and t.dtype == torch.float32)  # as a GradScaler's
    numbers = [float(t) for t in scales if not t.requires_grad]
    return next((c for c in numbers if c >= 256 and math.frexp(c)[0] == 0.5), None)
