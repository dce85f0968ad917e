"""SimCC, which classifies coordinates: labels, loss, decoding and the flip test.

Coordinates are in pixels of the network's input; the centre of the first pixel is 0, that of the last one side - 1.
Bin ``b`` = 0 ... ``side * k - 1`` is the coordinate ``b / k``.

Everything here is batched, reads nothing back from the device, and has shapes that do not depend on values, so a CUDA
graph can capture it. Logits in half precision are cast to float32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def simcc_labels(coordinates: Tensor, side: float, k: float, sigma: float) -> Tensor:
    """Return the label of each coordinate: probabilities (..., side * k).

    The label is a Gaussian over the bins, with a centre that is not rounded: ``p[b]`` is proportional to
    ``exp(-(b - k * coordinate)**2 / (2 * sigma**2))`` for ``b`` = 0 ... ``side * k - 1``, and sums to 1, even near a
    border. Li et al. divide by ``sigma * sqrt(2 * pi)``, so that near a border their labels sum to less than 1; mmpose
    rounds ``k * coordinate`` to a whole number.

    Args:
        coordinates: in pixels of the input, of any shape; finite.
        side: side of the input.
        k: bins per pixel.
        sigma: standard deviation, in bins.

    Example:
        >>> simcc_labels(torch.tensor(1.0), side=4, k=1, sigma=1)
        tensor([0.2583, 0.4258, 0.2583, 0.0576])
    """
    bins = torch.arange(round(side * k), device=coordinates.device, dtype=coordinates.dtype)
    return F.softmax(-(((bins - k * coordinates[..., None]) / sigma) ** 2) / 2, dim=-1)


def scored_joints(y: Tensor, side: float) -> Tensor:
    """Return which joints have a loss: those that are visible and inside the image.

    An image extends half a pixel beyond the centres of its outer pixels: x and y are between -0.5 and side - 0.5.

    Args:
        y: (n, joints, 3): x, y, and a number above 0 if the joint is visible.
        side: side of the input.

    Example:
        >>> scored_joints(
        ...     torch.tensor([[[-0.5, 7.4, 1.0], [0.0, 7.5, 1.0], [3.0, 3.0, 0.0]]]), side=8
        ... )
        tensor([[ True, False, False]])
    """
    inside = (y[..., :2] >= -0.5) & (y[..., :2] < side - 0.5)  # False for NaN
    return inside.all(-1) & (y[..., 2] > 0)


def simcc_losses(logits: Tensor, y: Tensor, k: float = 2.0, sigma: float = 6.0) -> Tensor:
    """Return the loss of each sample: the mean over its visible joints of KL(label || prediction) of x plus that of y.

    The divergence is the sum over the bins. (Li et al. take the mean over the bins, and over all joints, with 0 for
    those that are not visible.) Joints that are not visible or not inside the input do not count, and their coordinates
    may be NaN. A sample without joints that count has the loss 0 and no gradient.

    In the mean over a batch, all samples have the same weight, even those without visible joints. The loss of a sample
    therefore does not depend on the others, and micro-batches, processes and methods that select samples all see the
    same loss.

    Args:
        logits: (n, joints, 2, bins), of x and of y.
        y: (n, joints, 3): x, y in pixels of the input, and a number above 0 if the joint is visible.
        k: bins per pixel.
        sigma: standard deviation of the label, in bins; 6 is the value of Li et al.

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
    """Return coordinates (n, joints, 2) in pixels of the input, from logits or log-probabilities.

    The largest bin is refined by at most half a bin: the coordinate is the maximum of the parabola through the logits
    of the bin and its two neighbours. For a Gaussian, whose logarithm is a parabola, this is the centre. If several
    bins are largest, the first counts. At the first and the last bin, and if a neighbour has the probability 0, the
    coordinate is that of the bin.

    Args:
        logits: (n, joints, 2, bins).
        k: bins per pixel.

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
    curvature = before + after  # above 0, since argmax takes the first of equal bins; infinite for a probability of 0
    refined = (largest > 0) & (largest < last) & (curvature < math.inf)
    return (largest + torch.where(refined, (before - after) / (2 * curvature), 0))[..., 0] / k


def flip_merge(logits: Tensor, flipped_logits: Tensor, mirrored: Sequence[int], k: float = 2.0) -> Tensor:
    """Return the logarithm of the mean probabilities of images and of their mirror images.

    For a mirror image, left and right joints are swapped, and the bins of x are reversed and shifted by ``k - 1``: the
    coordinate x becomes side - 1 - x, the bin b becomes bins - k - b. The last ``k - 1`` bins, beyond the centre of the
    last pixel, have no counterpart and are exchanged among themselves. A shift that is not a whole number is rounded.

    Args:
        logits: (n, joints, 2, bins), of the images.
        flipped_logits: (n, joints, 2, bins), of the mirror images, as the network returned them.
        mirrored: for each joint of a mirror image, the joint that it was before, as in
            :class:`bsam.lab.data.persons.Skeleton`.
        k: bins per pixel.

    Example:
        >>> one = simcc_labels(
        ...     torch.tensor([[[1.0, 3.0], [5.0, 3.0]]]), side=8, k=2, sigma=1
        ... ).log()
        >>> flipped = simcc_labels(
        ...     torch.tensor([[[2.0, 3.0], [6.0, 3.0]]]), side=8, k=2, sigma=1
        ... ).log()
        >>> decode(flip_merge(one, flipped, mirrored=(1, 0)))
        tensor([[[1., 3.],
                 [5., 3.]]])
    """
    logits, flipped_logits = _full_precision(logits), _full_precision(flipped_logits)
    # no index tensor: its copy to the device could not be captured in a CUDA graph
    swapped = torch.stack([flipped_logits[:, joint] for joint in mirrored], dim=1)
    reversed_x = torch.stack((swapped[:, :, 0].flip(-1).roll(1 - round(k), -1), swapped[:, :, 1]), dim=2)
    return torch.logaddexp(F.log_softmax(logits, dim=-1), F.log_softmax(reversed_x, dim=-1)) - math.log(2)


def _full_precision(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
