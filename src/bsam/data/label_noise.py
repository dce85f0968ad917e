"""Label noise."""

from __future__ import annotations

import torch
from torch import Tensor


def flip_labels(labels: Tensor, share: float, classes: int, seed: int) -> tuple[Tensor, Tensor]:
    """Replace a fraction of the labels with another class, all other classes being equally likely.

    Args:
        labels: true classes, 1-D.
        share: fraction of the labels to flip, 0 to 1; exactly ``round(share * len(labels))`` labels change.
        classes: number of classes.
        seed: seed of the random choice.

    Returns:
        The noisy labels in a new tensor, and the sorted indices of the wrong ones.

    Example:
        >>> labels = torch.arange(10)
        >>> noisy, flipped = flip_labels(labels, 0.4, classes=10, seed=0)
        >>> bool((noisy != labels).nonzero().flatten().equal(flipped)), len(flipped)
        (True, 4)
    """
    generator = torch.Generator().manual_seed(seed)
    flipped = torch.randperm(len(labels), generator=generator)[: round(share * len(labels))].sort().values
    shift = torch.randint(1, classes, (len(flipped),), generator=generator)  # never a multiple of classes
    noisy = labels.clone()
    noisy[flipped] = (labels[flipped] + shift.to(labels)) % classes
    return noisy, flipped
