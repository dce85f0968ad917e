"""Evaluate a trained classifier on labelled images: the confusion matrix, and the worst mistakes."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

MISTAKES = 16  # mistakes that are kept


def confusion_matrix(truth: Tensor, predicted: Tensor, classes: int) -> Tensor:
    """Return how many samples of each class (row) were classified as each class (column).

    Example:
        >>> confusion_matrix(torch.tensor([0, 0, 1]), torch.tensor([0, 1, 1]), classes=2)
        tensor([[1, 1],
                [0, 1]])
    """
    return torch.bincount(truth * classes + predicted, minlength=classes**2).view(classes, classes)


@torch.no_grad()
def class_predictions(network: nn.Module, batches: Iterable[tuple[Tensor, Tensor]], classes: int) -> dict[str, Tensor]:
    """Return the confusion matrix and the :data:`MISTAKES` most confident mistakes of a network.

    Args:
        network: returns logits; in eval mode.
        batches: inputs and classes.
        classes: number of classes.

    Returns:
        ``confusion`` (classes, classes), and for the mistakes, the most confident first, ``inputs``, ``truth``,
        ``found`` (the predicted class) and ``confidence`` (its probability).
    """
    total: Tensor | int = 0
    worst: list[Tensor] = []
    for x, truth in batches:
        confidence, predicted = network(x).float().softmax(1).max(1)
        total = total + confusion_matrix(truth, predicted, classes)
        wrong = predicted != truth
        mistakes = [tensor[wrong] for tensor in (x, truth, predicted, confidence)]
        merged = [torch.cat(pair) for pair in zip(worst, mistakes, strict=True)] if worst else mistakes
        first = merged[-1].argsort(descending=True, stable=True)[:MISTAKES]
        worst = [tensor[first] for tensor in merged]
    return {
        "confusion": torch.as_tensor(total),
        **dict(zip(("inputs", "truth", "found", "confidence"), worst, strict=True)),
    }
