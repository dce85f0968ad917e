"""Helpers shared by the measurements."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ..common.checks import check_count
from ..common.errors import BsamRuntimeError

Array: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]
Progress: TypeAlias = Callable[[int, int], object]  # called with the number done and the number expected in total


def seeded_generator(seed: int) -> torch.Generator:
    """Return a generator on the CPU, so that the vectors drawn from it are the same for every device."""
    return torch.Generator().manual_seed(check_count("seed", seed, low=0))


def random_like(w: Tensor, generator: torch.Generator) -> Tensor:
    """Return standard normal entries in the shape, dtype and device of ``w``, which must be real."""
    return torch.randn(w.shape, generator=generator).to(w)


def no_progress(done: int, expected: int) -> None:
    """Report nothing."""


def after_products(products: int, note: str) -> str:
    """Return the end of a result's ``repr``: the number of products and the note."""
    return f"{products} products" + (f"; {note}" if note else "")


def check_finite(number: float) -> float:
    """Return ``number``, which was computed from a product; raise if it is not finite."""
    if not math.isfinite(number):
        raise BsamRuntimeError(
            "a Hessian product is not finite: the loss or its derivatives overflow, or are undefined at these weights"
        )
    return number
