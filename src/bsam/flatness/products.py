"""Helpers shared by trace, spectral_density and top_eigenvalues."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import torch

from ..core.checks import check_count
from ..core.errors import BsamRuntimeError

Array: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]
Progress: TypeAlias = Callable[[int, int], object]  # called with the number done, and the number expected in all


def seeded(seed: int) -> torch.Generator:
    """Return a generator on the CPU, so that the vectors drawn from it are the same for every device."""
    return torch.Generator().manual_seed(check_count("seed", seed, low=0))


def no_progress(done: int, expected: int) -> None:
    """Report nothing."""


def check_finite(number: float) -> float:
    """Return a number that was computed from a product, and raise if it is not finite."""
    if not math.isfinite(number):
        raise BsamRuntimeError(
            "a Hessian product is not finite: the loss or its derivatives overflow, or are undefined at these weights"
        )
    return number
