"""Labelled images, and a data set of training, validation and test images."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..common.errors import BsamValueError


@dataclass(frozen=True)
class Examples:
    """Images ``x`` of shape (n, channels, height, width) and their classes ``y``.

    Example:
        >>> sorted_by_class = Examples(
        ...     torch.zeros(6, 1, 8, 8), torch.tensor([0, 0, 0, 1, 1, 1])
        ... )
        >>> len(sorted_by_class), sorted_by_class.some(4).y
        (6, tensor([0, 0, 1, 1]))
    """

    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        return len(self.y)

    def at(self, rows: Tensor) -> Examples:
        """Return the examples at these indices, or where a mask is true."""
        return Examples(self.x[rows], self.y[rows])

    def some(self, n: int) -> Examples:
        """Return ``n`` examples, those at :meth:`balanced_indices`."""
        return self.at(self.balanced_indices(n))

    def balanced_indices(self, n: int) -> Tensor:
        """Return the sorted indices of ``n`` examples: the first of each class, then the second of each, and so on."""
        if not 1 <= n <= len(self):
            raise BsamValueError(f"of {len(self)} examples 1 to {len(self)} can be taken, not {n!r}")
        by_class = self.y.sort(stable=True)
        first = torch.searchsorted(by_class.values, by_class.values)  # of the same class, in the sorted order
        rank = torch.empty_like(by_class.indices)
        rank[by_class.indices] = torch.arange(len(self), device=self.y.device) - first
        return rank.argsort(stable=True)[:n].sort().values

    def to(self, device: torch.device | str) -> Examples:
        """Return a copy on another device."""
        return Examples(self.x.to(device), self.y.to(device))

    def batches(self, size: int) -> list[tuple[Tensor, Tensor]]:
        """Return all examples in order, in batches of ``size``; the last one may be smaller."""
        return list(zip(self.x.split(size), self.y.split(size), strict=True))


@dataclass(frozen=True)
class Dataset:
    """Training, validation and test images; pixels stay bytes until ``bsam.data.augment`` normalises a batch.

    Args:
        name: of the data set.
        classes: number of classes.
        train: training set.
        validation: validation set, if there is one.
        test: test set.
        mean: of the training pixels per channel; where they are bytes, of ``x / 255``.
        std: standard deviation of the training pixels per channel, likewise.
        class_names: in the order of the labels, where they are known.
        split: which images are training and which are test images, in words, where there is a choice.
        digest: SHA-256 of the pixels, the labels and their order, where it is known.
    """

    name: str
    classes: int
    train: Examples
    validation: Examples | None
    test: Examples
    mean: tuple[float, ...]
    std: tuple[float, ...]
    class_names: tuple[str, ...] = ()
    split: str = ""
    digest: str | None = None
