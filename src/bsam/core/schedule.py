"""Radii that follow the learning rate: linear from a floor at ``lr_min`` to the radius at ``lr_max``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .tensors import Scalar

# Keys of the parameter groups. The prefix avoids clashes: schedule-free optimizers have an lr_max, too.
LR_MAX = "sharpness_lr_max"  # the argument lr_max: a number, or None
LR_MIN = "sharpness_lr_min"  # the argument lr_min
LR_START = "sharpness_lr_start"  # the learning rate before any scheduler lowered it
LR_SEEN = "sharpness_lr_seen"  # the largest learning rate of all steps; a tensor if lr is one


def scheduled(group: dict[str, Any], radius: str, floor: str) -> Scalar:
    """Return the radius of a group in this step."""
    if group[floor] in (None, group[radius]):
        return group[radius]
    return follow_lr(_lr(group), top=group[radius], floor=group[floor], lr_max=top_lr(group), lr_min=group[LR_MIN])


def follow_lr(lr: Scalar, *, top: float, floor: float, lr_max: Scalar, lr_min: float) -> Scalar:
    """Interpolate linearly from ``floor`` at ``lr_min`` to ``top`` at ``lr_max``, clamped, as in the BSAM paper.

    If the learning rate is a 0-dim tensor, so is the result, on the same device.

    Example:
        >>> follow_lr(0.05, top=0.1, floor=0.02, lr_max=0.1, lr_min=0.0)
        0.06
        >>> follow_lr(0.4, top=0.1, floor=0.02, lr_max=0.1, lr_min=0.0)
        0.1
    """
    share: Scalar
    if isinstance(lr_max, Tensor):
        share = torch.where(lr_max > lr_min, (lr - lr_min) / (lr_max - lr_min), (lr > lr_min) * 1.0)
    elif lr_max <= lr_min:  # built with a learning rate of 0: nothing to interpolate
        share = (lr > lr_min) * 1.0
    else:
        share = (lr - lr_min) / (lr_max - lr_min)
    share = torch.clamp(share, 0.0, 1.0) if isinstance(share, Tensor) else min(max(share, 0.0), 1.0)
    return floor + (top - floor) * share


def top_lr(group: dict[str, Any]) -> Scalar:
    """Return the learning rate at which a radius is largest: ``lr_max`` if it was set.

    Otherwise the maximum of this step's rate, those of all earlier steps, and the rate known beforehand: ``max_lr`` or
    else ``initial_lr``, which schedulers store in the group, or else the rate when the optimizer was built.
    """
    if group[LR_MAX] is not None:
        return group[LR_MAX]
    known = next(rate for name in ("max_lr", "initial_lr", LR_START) if (rate := group.get(name)) is not None)
    return _largest(_lr(group), group[LR_SEEN], known)


def note_lr(group: dict[str, Any]) -> None:
    """Update the largest learning rate after a step. A tensor is written in place, as CUDA graphs require."""
    seen, largest = group[LR_SEEN], _largest(_lr(group), group[LR_SEEN])
    if isinstance(seen, Tensor) and isinstance(largest, Tensor) and seen.device == largest.device:
        seen.copy_(largest)
    else:
        group[LR_SEEN] = largest


def _lr(group: dict[str, Any]) -> Scalar:
    """Return the learning rate without the factor ``lr_scale`` of timm's schedulers."""
    scale = group.get("lr_scale", 1.0)
    return group["lr"] if scale in (0.0, 1.0) else group["lr"] / scale


def _largest(lr: Scalar, *others: Scalar) -> Scalar:
    """Return the maximum: a number if ``lr`` is one; otherwise a tensor on its device, without synchronization."""
    for rate in others:
        if not isinstance(lr, Tensor):
            lr = max(lr, float(rate))
        else:
            lr = torch.maximum(lr, rate.to(lr)) if isinstance(rate, Tensor) else lr.clamp(min=rate)
    return lr
