"""Radii that follow the learning rate."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .checks import check_radius, is_number
from .foreach import Scalar
from .refusal import Refusal


def completed_schedule(group: dict[str, Any], radius: str, floor: str) -> dict[str, Any]:
    """A group whose ``radius`` follows the learning rate down to ``floor``, with ``lr_max`` filled in; refuses what cannot be right."""
    lr_min, lr_max = group["lr_min"], group["lr_max"]
    if group[floor] is not None:
        check_radius(floor, group[floor])
        if group[floor] > group[radius]:
            raise Refusal(f"{floor} must not be above {radius}, got {group[floor]} and {group[radius]}")
    if not is_number(lr_min) or lr_min < 0:
        raise Refusal(f"lr_min must be a finite number that is not negative, got {lr_min!r}")
    if lr_max is None:
        lr_max = float(group["lr"])
        if lr_max == lr_min == 0:  # built with a learning rate of 0, that a scheduler may raise
            return {**group, "lr_max": lr_max}
    if not is_number(lr_max) or lr_max <= lr_min:
        raise Refusal(f"lr_max must be a finite number above lr_min; got lr_max={lr_max!r} and lr_min={lr_min!r}")
    return {**group, "lr_max": lr_max}


def follow_lr(lr: Scalar, *, top: float, floor: float, lr_max: float, lr_min: float) -> Scalar:
    """Eq. rho_change: from ``floor`` at ``lr_min`` to ``top`` at ``lr_max``, on a straight line, and never outside.

    A learning rate that lives on a device (a 0-dim tensor) gives a radius there.

    Example:
        >>> follow_lr(0.05, top=0.1, floor=0.02, lr_max=0.1, lr_min=0.0)
        0.06
        >>> follow_lr(0.4, top=0.1, floor=0.02, lr_max=0.1, lr_min=0.0)
        0.1
    """
    if lr_max <= lr_min:  # built with a learning rate of 0: there is nothing between the two ends
        share = (lr > lr_min) * 1.0
    else:
        share = (lr - lr_min) / (lr_max - lr_min)
    share = torch.clamp(share, 0.0, 1.0) if isinstance(share, Tensor) else min(max(share, 0.0), 1.0)
    return floor + (top - floor) * share
