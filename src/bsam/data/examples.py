"""Images with their classes, and the sets that a network is trained and judged on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from ..core.refusal import Refusal


@dataclass(frozen=True)
class Examples:
    """Images ``x`` of shape (n, channels, height, width) and their classes ``y``.

    Example:
        >>> few = Examples(torch.zeros(5, 1, 8, 8), torch.arange(5)).first(2)
        >>> len(few), few.y
        (2, tensor([0, 1]))
    """

    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        return len(self.y)

    def labelled(self, y: Tensor) -> Examples:
        """The same images with other labels."""
        return replace(self, y=y)

    def first(self, n: int) -> Examples:
        """The first ``n`` of them."""
        if not 1 <= n <= len(self):
            raise Refusal(f"of {len(self)} examples the first 1 to {len(self)} can be taken, not {n!r}")
        return Examples(self.x[:n], self.y[:n])

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
