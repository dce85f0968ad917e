"""Radii that follow the learning rate or the number of steps: floors, warm-up and a late start."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..common.errors import BsamRuntimeError
from .tensors import Scalar

# Keys of the parameter groups. The prefix avoids clashes: schedule-free optimizers have an lr_max, too.
LR_MAX = "sharpness_lr_max"  # the argument lr_max: a number, or None
LR_MIN = "sharpness_lr_min"  # the argument lr_min
LR_START = "sharpness_lr_start"  # the learning rate before any scheduler lowered it
LR_SEEN = "sharpness_lr_seen"  # the largest learning rate of all steps; a tensor if lr is one
WARMUP = "sharpness_warmup"  # the argument warmup: the number of steps in which the radii rise from 0
START = "sharpness_start"  # the argument start: the number of plain steps before
COUNTER = "sharpness_counter"  # steps_taken as a tensor, which CUDA graphs read and raise; None if lr is a number


def scheduled(group: dict[str, Any], radius: str, floor: str) -> Scalar:
    """Return the radius of a group in this step."""
    if group[floor] in (None, group[radius]):
        return group[radius]
    return follow_lr(_lr(group), top=group[radius], floor=group[floor], lr_max=top_lr(group), lr_min=group[LR_MIN])


def warmed_up(group: dict[str, Any], radius: Scalar) -> Scalar:
    """Return the share of a radius that a group uses in this step.

    A CUDA graph computes it from a tensor that counts the steps.
    """
    if not capturing():
        return radius * share_of_radius(group, group["steps_taken"])
    if group[COUNTER] is None:
        raise BsamRuntimeError(
            "in a CUDA graph, warmup and start need a learning rate that is a tensor, and a few steps before the "
            "capture: build base with lr=torch.tensor(...), and take some steps first"
        )
    return radius * share_of_radius(group, group[COUNTER])


def share_of_radius(group: dict[str, Any], steps: Scalar) -> Scalar:
    """Return 0 before the start, then a share that rises linearly to 1 during the warm-up.

    Example:
        >>> [share_of_radius({WARMUP: 4, START: 2}, t) for t in range(8)]
        [0.0, 0.0, 0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    """
    share = (steps + 1 - group[START]) / max(group[WARMUP], 1)
    return torch.clamp(share, 0.0, 1.0) if isinstance(share, Tensor) else min(max(share, 0.0), 1.0)


def count_on_device(group: dict[str, Any]) -> None:
    """Count a step in the tensor that CUDA graphs read; a captured step counts itself at every replay."""
    lr = group.get("lr")
    if not isinstance(lr, Tensor):
        return
    if capturing() and group[COUNTER] is not None:
        group[COUNTER] += 1
    elif group[COUNTER] is None or group[COUNTER].device != lr.device:
        group[COUNTER] = torch.tensor(group["steps_taken"], device=lr.device)
    else:
        group[COUNTER].fill_(group["steps_taken"])


def capturing() -> bool:
    """Whether a CUDA graph is being captured."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


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
