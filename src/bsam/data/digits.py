"""Handwritten digits, the set that comes with scikit-learn: no download."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ..core.refusal import Refusal

TRAIN, VALIDATION, TEST = 640, 400, 757  # ten batches of 64; the rest makes accuracies precise


@dataclass(frozen=True)
class Examples:
    """Images ``x`` of shape (n, 1, 8, 8) and their classes ``y``."""

    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        return len(self.y)

    def labelled(self, y: Tensor) -> Examples:
        """The same images with other labels."""
        return replace(self, y=y)

    def batches(self, size: int) -> list[tuple[Tensor, Tensor]]:
        """All of them in their order, ``size`` at a time; the last batch may be smaller."""
        return list(zip(self.x.split(size), self.y.split(size), strict=True))


@dataclass(frozen=True)
class Digits:
    """Three sets that share no image."""

    train: Examples
    validation: Examples
    test: Examples


def digits(seed: int = 0) -> Digits:
    """The 1797 images of 8 x 8 pixels, in 640 to train on, 400 to choose settings on and 757 to test on; each class has its share in all three.

    Pixels are shifted and scaled by the mean and the standard deviation of the training images.

    Args:
        seed: which split; the same seed gives the same one.

    Example:
        >>> data = digits()
        >>> len(data.train), len(data.validation), len(data.test)
        (640, 400, 757)
        >>> data.train.x.shape
        torch.Size([640, 1, 8, 8])
    """
    try:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    except ImportError as missing:
        raise Refusal("the digits come with scikit-learn, which is not installed: pip install 'bsam[demo]'") from missing
    images, labels = load_digits(return_X_y=True)
    rest, test = train_test_split(np.arange(len(labels)), test_size=TEST, stratify=labels, random_state=seed)
    train, validation = train_test_split(rest, train_size=TRAIN, test_size=VALIDATION, stratify=labels[rest], random_state=seed)
    x, y = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8), torch.tensor(labels, dtype=torch.int64)
    seen = x[train]
    x = (x - seen.mean()) / seen.std()
    return Digits(*(Examples(x[part], y[part]) for part in (train, validation, test)))
