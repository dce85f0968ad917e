"""SimCC: labels and loss of coordinates as classes, decoding, and the flip test.

Coordinates are in pixels of the network's input; the centre of the first pixel is 0, that of the last one side - 1.
Bin ``b`` = 0 ... ``side * k - 1`` is the coordinate ``b / k``.

Everything here is batched, reads nothing back from the device and has shapes that do not depend on values, so that a
CUDA graph can capture it. Logits of a half precision are cast to float32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def simcc_labels(coordinates: Tensor, side: float, k: float, sigma: float) -> Tensor:
    """Return the label of each coordinate, probabilities of the shape (..., side * k).

    The label is a Gaussian over the bins, not rounded: ``p[b]`` is proportional to
    ``exp(-(b - k * coordinate)**2 / (2 * sigma**2))`` for ``b`` = 0 ... ``side * k - 1``, and sums to 1. Near a border,
    where a part of it would lie outside, the rest sums to 1. Li et al. divide by ``sigma * sqrt(2 * pi)``, so that
    theirs sums to less than 1 there; mmpose rounds ``k * coordinate`` to a whole number.

    Args:
        coordinates: in pixels of the input, of any shape; finite.
        side: of the input.
        k: bins for each pixel.
        sigma: standard deviation, in bins.

    Example:
        >>> simcc_labels(torch.tensor(1.0), side=4, k=1, sigma=1)
        tensor([0.2583, 0.4258, 0.2583, 0.0576])
    """
    bins = torch.arange(round(side * k), device=coordinates.device, dtype=coordinates.dtype)
    return F.softmax(-(((bins - k * coordinates[..., None]) / sigma) ** 2) / 2, dim=-1)


def scored_joints(y: Tensor, side: float) -> Tensor:
    """Return which joints have a loss: those that are visible and inside the image.

    An image extends half a pixel beyond the centres of its outer pixels: -0.5 <= x < side - 0.5, and y likewise.

    Args:
        y: of the shape (n, joints, 3): x, y, and whether the joint is visible, which is a number above 0.
        side: of the input.

    Example:
        >>> scored_joints(
        ...     torch.tensor([[[-0.5, 7.4, 1.0], [0.0, 7.5, 1.0], [3.0, 3.0, 0.0]]]), side=8
        ... )
        tensor([[ True, False, False]])
    """
    inside = (y[..., :2] >= -0.5) & (y[..., :2] < side - 0.5)  # not NaN
    return inside.all(-1) & (y[..., 2] > 0)


def simcc_losses(logits: Tensor, y: Tensor, k: float = 2.0, sigma: float = 6.0) -> Tensor:
    """Return the loss of each sample: the mean over its visible joints of KL(label || prediction) of x plus that of y.

    The divergence is the sum over the bins. (Li et al. take the mean over the bins, and over all joints, with 0 for
    those that are not visible.) Joints that are not visible or not inside the input do not count, whatever their
    coordinates are, NaN included. A sample without any has the loss 0, and no gradient.

    In the mean over a batch all samples have the same weight, however many of their joints are visible, and samples
    without any count too: the loss of a sample must not depend on the others, so that micro-batches, processes and
    methods that select samples see the same.

    Args:
        logits: of the shape (n, joints, 2, bins), of x and of y.
        y: of the shape (n, joints, 3): x, y in pixels of the input, and whether the joint is visible.
        k: bins for each pixel.
        sigma: standard deviation of the label, in bins; 6 is that of Li et al.

    Example:
        >>> y = torch.tensor(
        ...     [[[3.0, 5.0, 1.0], [2.0, 2.0, 0.0]], [[9.0, 0.0, 1.0], [0.0, 0.0, 0.0]]]
        ... )
        >>> simcc_losses(torch.zeros(2, 2, 2, 16), y, k=2, sigma=1)
        tensor([2.7073, 0.0000])
    """
    logits = _full_precision(logits)
    side = logits.shape[-1] / k
    scored = scored_joints(y, side)
    coordinates = torch.where(scored[..., None], y[..., :2], 0).to(logits.dtype)
    label = simcc_labels(coordinates, side, k, sigma)
    divergence = (torch.xlogy(label, label) - label * F.log_softmax(logits, dim=-1)).sum((-1, -2))
    return torch.where(scored, divergence, 0).sum(-1) / scored.sum(-1).clamp(min=1)


def decode(logits: Tensor, k: float = 2.0) -> Tensor:
    """Return coordinates in pixels of the input, of the shape (n, joints, 2), from logits or log-probabilities.

    The maximum is refined within half a bin: it is that of the parabola through the logits of the largest bin and its
    two neighbours. Of a Gaussian, whose logarithm is a parabola, this is the centre. Of several largest
    bins the first is taken. At the first and the last bin of all, and where a neighbour has the probability 0, the bin
    itself is taken.

    Args:
        logits: of the shape (n, joints, 2, bins).
        k: bins for each pixel.

    Example:
        >>> decode(
        ...     simcc_labels(torch.tensor([[[3.3, 6.1]]]), side=16, k=2, sigma=3).log(), k=2
        ... )
        tensor([[[3.3000, 6.1000]]])
    """
    logits, last = _full_precision(logits), logits.shape[-1] - 1
    largest = logits.argmax(-1, keepdim=True)
    middle = logits.gather(-1, largest)
    before = middle - logits.gather(-1, (largest - 1).clamp(min=0))
    after = middle - logits.gather(-1, (largest + 1).clamp(max=last))
    bend = before + after  # above 0, since the first largest one was taken; infinite for a probability of 0
    refined = (largest > 0) & (largest < last) & (bend < math.inf)
    return (largest + torch.where(refined, (before - after) / (2 * bend), 0))[..., 0] / k


def flip_merge(logits: Tensor, flipped_logits: Tensor, pairs: Sequence[tuple[int, int]], k: float = 2.0) -> Tensor:
    """Return the logarithms of the mean probabilities of images and of the same images mirrored left to right.

    Of a mirrored image left and right joints are swapped and the bins of x reversed, and shifted by ``k - 1``: the
    coordinate x goes to side - 1 - x, the bin b to bins - k - b. The last ``k - 1`` bins, beyond the centre of the last
    pixel, have no counterpart and are exchanged among themselves. A shift that is no whole number is rounded.

    Args:
        logits: of the images, of the shape (n, joints, 2, bins).
        flipped_logits: of the mirrored images, as the network gave them.
        pairs: joints that are left and right of each other.
        k: bins for each pixel.

    Example:
        >>> one = simcc_labels(
        ...     torch.tensor([[[1.0, 3.0], [5.0, 3.0]]]), side=8, k=2, sigma=1
        ... ).log()
        >>> mirrored = simcc_labels(
        ...     torch.tensor([[[2.0, 3.0], [6.0, 3.0]]]), side=8, k=2, sigma=1
        ... ).log()
        >>> decode(flip_merge(one, mirrored, pairs=[(0, 1)]))
        tensor([[[1., 3.],
                 [5., 3.]]])
    """
    order = list(range(logits.shape[1]))
    for left, right in pairs:
        order[left], order[right] = right, left
    logits, flipped_logits = _full_precision(logits), _full_precision(flipped_logits)
    # not by an index tensor: its copy to the device could not be captured in a CUDA graph
    swapped = torch.stack([flipped_logits[:, joint] for joint in order], dim=1)
    mirrored = torch.stack((swapped[:, :, 0].flip(-1).roll(1 - round(k), -1), swapped[:, :, 1]), dim=2)
    return torch.logaddexp(F.log_softmax(logits, dim=-1), F.log_softmax(mirrored, dim=-1)) - math.log(2)


def _full_precision(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
