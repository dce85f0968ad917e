"""What the instruments share that look at a Hessian through its products alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import torch

from ..core.checks import check_count
from ..core.errors import BsamRuntimeError

Array: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]
Progress: TypeAlias = Callable[[int, int], None]  # products done, and expected in all


def seeded(seed: int) -> torch.Generator:
    """Random numbers, on the CPU, so that the vectors made of them are the same on every device."""
    return torch.Generator().manual_seed(check_count("seed", seed, low=0))


def finite(number: float) -> float:
    """A number that was taken from a product, as it is; refused if it is none."""
    if not math.isfinite(number):
        raise BsamRuntimeError(
            "a Hessian product is not finite: the loss or its derivatives overflow, or are undefined where the "
            "weights are"
        )
    return number
