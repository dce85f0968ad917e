"""The handwritten digits that come with scikit-learn."""

from __future__ import annotations

import numpy as np
import torch

from ...common.extras import require_package
from .examples import Dataset, Examples, Pixels

TRAIN = 640  # ten batches of 64
VALIDATION = 400
TEST = 757  # all others, for a precise accuracy


def digits(seed: int = 0) -> Dataset:
    """Return 1797 images of 8 x 8 pixels in a stratified split: 640 training, 400 validation and 757 test images.

    Pixels are normalised with the mean and the standard deviation of the training images.

    Args:
        seed: seed of the random split.

    Example:
        >>> data = digits()
        >>> len(data.train), len(data.validation), len(data.test)
        (640, 400, 757)
        >>> data.train.x.shape
        torch.Size([640, 1, 8, 8])
    """
    require_package("sklearn", "demo")
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    rest, test = train_test_split(np.arange(len(labels)), test_size=TEST, stratify=labels, random_state=seed)
    train, validation = train_test_split(
        rest, train_size=TRAIN, test_size=VALIDATION, stratify=labels[rest], random_state=seed
    )
    x, y = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8), torch.tensor(labels, dtype=torch.int64)
    mean, std = x[train].mean(), x[train].std()
    x = (x - mean) / std
    pixels = Pixels(0.0, 16.0, float(mean), float(std))
    examples = Examples(x, y)
    sets = [examples.at(torch.from_numpy(rows)) for rows in (train, validation, test)]
    return Dataset("digits", 10, sets[0], sets[1], sets[2], mean=(0.0,), std=(1.0,), pixels=pixels)
