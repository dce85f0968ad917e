"""Radii that follow the learning rate."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..common.checks import check_radius, is_number
from ..common.errors import BsamValueError
from .foreach import Scalar

# Keys of the parameter groups. The prefix avoids clashes: schedule-free optimizers have an lr_max, too.
LR_MAX = "sharpness_lr_max"  # the argument lr_max: a number, or None
LR_MIN = "sharpness_lr_min"  # the argument lr_min
LR_START = "sharpness_lr_start"  # the learning rate before any scheduler lowered it
LR_SEEN = "sharpness_lr_seen"  # the largest learning rate of all steps; a tensor if lr is one


def radius_settings(
    rho: float, rho_floor: float | None, lr_max: float | None, lr_min: float
) -> dict[str, float | None]:
    """Return the group values for a ``rho`` that may follow the learning rate down to ``rho_floor``."""
    return {"rho": rho, "rho_floor": rho_floor, LR_MAX: lr_max, LR_MIN: lr_min}


def completed_schedule(group: dict[str, Any], radius: str, floor: str) -> dict[str, Any]:
    """Check and complete a group whose ``radius`` follows the learning rate down to ``floor``."""
    lr_min, lr_max = group[LR_MIN], group[LR_MAX]
    if group[floor] is not None:
        check_radius(floor, group[floor])
        if group[floor] > group[radius]:
            raise BsamValueError(f"{floor} must not be above {radius}, got {group[floor]} and {group[radius]}")
    if not is_number(lr_min) or lr_min < 0:
        raise BsamValueError(f"lr_min must be a finite number that is not negative, got {lr_min!r}")
    lr = group.get("lr")
    if lr is not None:  # optimizers that choose their step length may have lr=None
        group = {**group, LR_START: float(group.get("initial_lr", lr))}
        group[LR_SEEN] = torch.zeros_like(lr) if isinstance(lr, Tensor) else 0.0
        if lr_max is None:
            lr_max = float(_known_top(group))
            if lr_max == lr_min == 0:  # a scheduler may raise the rate from 0 later
                return group
    elif group[floor] not in (None, group[radius]):
        raise BsamValueError(
            f"{radius} follows the learning rate, but base has no lr in its parameter groups: "
            f"pass {floor}={group[radius]} to keep {radius} fixed, or use another base"
        )
    elif lr_max is None:
        return group
    if not is_number(lr_max) or lr_max <= lr_min:
        raise BsamValueError(
            f"lr_max must be a finite number above lr_min, got lr_max={lr_max!r} and lr_min={lr_min!r}"
        )
    return group


def unscaled_lr(group: dict[str, Any]) -> Scalar:
    """Return the learning rate of a group without the factor ``lr_scale`` of timm's schedulers."""
    lr, scale = group["lr"], group.get("lr_scale", 1.0)
    return lr if scale in (0.0, 1.0) else lr / scale


def top_lr(group: dict[str, Any]) -> Scalar:
    """Return the learning rate at which a radius is largest: ``lr_max`` if it was set.

    Otherwise the maximum of this step's rate, those of all earlier steps, and the rate known beforehand: ``max_lr`` or
    else ``initial_lr``, which schedulers store in the group, or else the rate when the optimizer was built.
    """
    if group[LR_MAX] is not None:
        return group[LR_MAX]
    return _largest(unscaled_lr(group), _seen(group), _known_top(group))


def _known_top(group: dict[str, Any]) -> Scalar:
    rates = (group.get(name) for name in ("max_lr", "initial_lr", LR_START))
    return next(rate for rate in rates if rate is not None)


def _seen(group: dict[str, Any]) -> Scalar:
    """Return the largest learning rate so far, as a tensor if ``lr`` is one (a checkpoint may hold either)."""
    return group[LR_SEEN] if isinstance(group["lr"], Tensor) else float(group[LR_SEEN])


def note_lr(group: dict[str, Any]) -> None:
    """Update the largest learning rate after a step. A tensor is written in place, as CUDA graphs require."""
    seen, lr = _seen(group), group["lr"]
    if not isinstance(lr, Tensor):
        group[LR_SEEN] = _largest(seen, unscaled_lr(group))
    elif isinstance(seen, Tensor) and seen.device == lr.device:
        seen.copy_(torch.maximum(seen, unscaled_lr(group)))  # type: ignore[arg-type]
    else:
        group[LR_SEEN] = _largest(unscaled_lr(group), float(seen))


def scheduled(group: dict[str, Any], radius: str, floor: str) -> Scalar:
    """Return the radius of a group in this step."""
    if group[floor] in (None, group[radius]):
        return group[radius]
    lr, lr_max = unscaled_lr(group), top_lr(group)
    return follow_lr(lr, top=group[radius], floor=group[floor], lr_max=lr_max, lr_min=group[LR_MIN])


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


def _largest(first: Scalar, *others: Scalar) -> Scalar:
    """Return the maximum. Tensors stay on their device, without synchronization."""
    largest = first
    for rate in others:
        if isinstance(largest, Tensor):
            largest = torch.maximum(largest, rate.to(largest)) if isinstance(rate, Tensor) else largest.clamp(min=rate)
        else:
            largest = rate.clamp(min=largest) if isinstance(rate, Tensor) else max(largest, rate)
    return largest
