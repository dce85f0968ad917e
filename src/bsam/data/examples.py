"""Images with their classes, and the sets that a network is trained and judged on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from ..core.errors import BsamValueError


@dataclass(frozen=True)
class Examples:
    """Images ``x`` of shape (n, channels, height, width) and their classes ``y``.

    Example:
        >>> sorted_by_class = Examples(torch.zeros(6, 1, 8, 8), torch.tensor([0, 0, 0, 1, 1, 1]))
        >>> len(sorted_by_class), sorted_by_class.some(4).y
        (6, tensor([0, 0, 1, 1]))
    """

    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        return len(self.y)

    def labelled(self, y: Tensor) -> Examples:
        """The same images with other labels."""
        return replace(self, y=y)

    def some(self, n: int) -> Examples:
        """``n`` of them, those at :meth:`places`."""
        chosen = self.places(n)
        return Examples(self.x[chosen], self.y[chosen])

    def places(self, n: int) -> Tensor:
        """Where ``n`` of them are, in their order, as evenly from all classes as can be: the first of each class, then
        the second of each, and so on.
        """
        if not 1 <= n <= len(self):
            raise BsamValueError(f"of {len(self)} examples 1 to {len(self)} can be taken, not {n!r}")
        by_class = self.y.sort(stable=True)
        rank = torch.empty_like(by_class.indices)
        rank[by_class.indices] = torch.arange(len(self), device=self.y.device) - torch.searchsorted(
            by_class.values, by_class.values
        )
        return rank.argsort(stable=True)[:n].sort().values

    def to(self, device: torch.device | str) -> Examples:
        """The same on another device."""
        return Examples(self.x.to(device), self.y.to(device))

    def batches(self, size: int) -> list[tuple[Tensor, Tensor]]:
        """All of them in their order, ``size`` at a time; the last batch may be smaller."""
        return list(zip(self.x.split(size), self.y.split(size), strict=True))


@dataclass(frozen=True)
class Dataset:
    """Sets that share no image. Pixels stay bytes until :mod:`bsam.data.augment` makes numbers of a batch.

    Args:
        name: of the whole.
        classes: how many.
        train: to train on.
        validation: to choose settings on, where there is one.
        test: to judge on.
        mean: of the training pixels, one per channel, in units of ``x / 255`` where ``x`` are bytes.
        std: their standard deviation, likewise.
    """

    name: str
    classes: int
    train: Examples
    validation: Examples | None
    test: Examples
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def to(self, device: torch.device | str) -> Self:
        """The same on another device."""
        validation = self.validation and self.validation.to(device)
        return replace(self, train=self.train.to(device), validation=validation, test=self.test.to(device))
