"""Helpers shared by the instruments."""

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
Progress: TypeAlias = Callable[[int, int], object]  # called with the number done, and the number expected in all


def seeded(seed: int) -> torch.Generator:
    """Return a generator on the CPU, so that the vectors drawn from it are the same for every device."""
    return torch.Generator().manual_seed(check_count("seed", seed, low=0))


def random_like(p: Tensor, generator: torch.Generator) -> Tensor:
    """Return a tensor of the kind of ``p`` with standard normal entries, of a complex one in both parts.

    Example:
        >>> random_like(torch.zeros(2, dtype=torch.complex64), seeded(0)).imag.abs().min() > 0
        tensor(True)
    """
    return as_kind_of(p, torch.randn(real_view(p).shape, generator=generator))


def real_view(t: Tensor) -> Tensor:
    """Return a complex tensor as a real one with a last dimension of two, and others as they are."""
    return torch.view_as_real(t) if t.is_complex() else t


def as_kind_of(p: Tensor, real: Tensor) -> Tensor:
    """Return a tensor of the shape of ``real_view(p)`` as one of shape, dtype and device of ``p``."""
    return torch.view_as_complex(real.to(real_view(p)).contiguous()) if p.is_complex() else real.to(p)


def no_progress(done: int, expected: int) -> None:
    """Report nothing."""


def after_products(products: int, note: str) -> str:
    """Return the end of the ``repr`` of a result: how many products it took, and its note."""
    return f"{products} products" + (f"; {note}" if note else "")


def check_finite(number: float) -> float:
    """Return a number that was computed from a product, and raise if it is not finite."""
    if not math.isfinite(number):
        raise BsamRuntimeError(
            "a Hessian product is not finite: the loss or its derivatives overflow, or are undefined at these weights"
        )
    return number
