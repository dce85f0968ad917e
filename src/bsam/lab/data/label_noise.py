"""Label noise."""

from __future__ import annotations

import torch
from torch import Tensor

from ..config import NoiseLabels


def wrong_share(share: float, noise_labels: NoiseLabels, classes: int) -> float:
    """Return the fraction of labels that are wrong if a fraction ``share`` of them is drawn at random.

    Args:
        share: fraction of the labels that are drawn, 0 to 1.
        noise_labels: ``"all"`` draws from all classes, so that one draw in ``classes`` returns the true class;
            ``"other"`` draws from the other classes.
        classes: number of classes.

    Example:
        >>> round(wrong_share(0.4, "all", 10), 3), wrong_share(0.4, "other", 10)
        (0.36, 0.4)
    """
    return share * (classes - 1) / classes if noise_labels == "all" else share


def flip_labels(
    labels: Tensor, share: float, classes: int, seed: int, noise_labels: NoiseLabels = "all"
) -> tuple[Tensor, Tensor]:
    """Draw a fraction of the labels at random, all classes (or all other classes) being equally likely.

    The number of wrong labels is not random: it is its expected value, ``wrong_share(...) * len(labels)``, rounded. So
    0.8 drawn from all of ten classes is the same, label by label, as 0.72 drawn from the other classes.

    Args:
        labels: true classes, 1-D.
        share: fraction of the labels to draw, 0 to 1.
        classes: number of classes.
        seed: seed of the random choice.
        noise_labels: ``"all"`` draws from all classes, including the true one; ``"other"`` from the others.

    Returns:
        The noisy labels in a new tensor, and the sorted indices of the wrong ones.

    Example:
        >>> labels = torch.arange(1000) % 10
        >>> noisy, wrong = flip_labels(labels, 0.4, classes=10, seed=0)
        >>> bool((noisy != labels).nonzero().flatten().equal(wrong)), len(wrong)
        (True, 360)
    """
    generator = torch.Generator().manual_seed(seed)
    count = round(wrong_share(share, noise_labels, classes) * len(labels))
    wrong = torch.randperm(len(labels), generator=generator)[:count].sort().values
    shift = torch.randint(1, classes, (count,), generator=generator)  # never a multiple of classes
    noisy = labels.clone()
    noisy[wrong] = (labels[wrong] + shift.to(labels)) % classes
    return noisy, wrong
