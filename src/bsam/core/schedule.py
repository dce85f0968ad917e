"""Radii that follow the learning rate."""

from __future__ import annotations

import torch
from torch import Tensor

from .foreach import Scalar


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
