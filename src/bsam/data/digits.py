"""Handwritten digits, the set that comes with scikit-learn: no download."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ..core.extras import need
from .examples import Dataset
from .examples import Examples as Examples

TRAIN, VALIDATION, TEST = 640, 400, 757  # ten batches of 64; the rest makes accuracies precise


@dataclass(frozen=True)
class Digits(Dataset):
    """A data set that always has a validation set."""

    validation: Examples


def digits(seed: int = 0) -> Digits:
    """The 1797 images of 8 x 8 pixels, in 640 to train on, 400 to choose settings on and 757 to test on; each class has
    its share in all three.

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
    need("sklearn", "demo")
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    rest, test = train_test_split(np.arange(len(labels)), test_size=TEST, stratify=labels, random_state=seed)
    train, validation = train_test_split(
        rest, train_size=TRAIN, test_size=VALIDATION, stratify=labels[rest], random_state=seed
    )
    x, y = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8), torch.tensor(labels, dtype=torch.int64)
    seen = x[train]
    x = (x - seen.mean()) / seen.std()
    sets = {
        name: Examples(x[part], y[part])
        for name, part in (("train", train), ("validation", validation), ("test", test))
    }
    return Digits("digits", 10, **sets, mean=(0.0,), std=(1.0,))
