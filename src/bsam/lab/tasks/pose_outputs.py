"""What the outputs of a pose network mean: SimCC's labels, loss and decoding, and PCK, the score.

SimCC classifies coordinates. They are in pixels of the network's input; the centre of the first pixel is 0, that of the
last one side - 1. Bin ``b`` = 0 ... ``side * k - 1`` is the coordinate ``b / k``.

The functions of SimCC are batched, read nothing back from the device, and have shapes that do not depend on values, so
a CUDA graph can capture them. Logits in half precision are cast to float32.

PCK is the share of joints that are found, which means within a certain distance of their true position.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ...common.errors import BsamValueError
from ..data import persons as skeletons
from ..data.persons import Skeleton


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
    logits = _full_precision(logits)
    last = logits.shape[-1] - 1
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
    logits = _full_precision(logits)
    flipped_logits = _full_precision(flipped_logits)
    # no index tensor: its copy to the device could not be captured in a CUDA graph
    swapped = torch.stack([flipped_logits[:, joint] for joint in mirrored], dim=1)
    reversed_x = torch.stack((swapped[:, :, 0].flip(-1).roll(1 - round(k), -1), swapped[:, :, 1]), dim=2)
    return torch.logaddexp(F.log_softmax(logits, dim=-1), F.log_softmax(reversed_x, dim=-1)) - math.log(2)


def _full_precision(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


MEAN = "mean"


@dataclass(frozen=True)
class PoseScore:
    """How a data set is scored.

    Args:
        title: name of the score.
        threshold: largest distance at which a joint counts as found, relative to the size of the person.
        groups: joints by group; the score of a group is the mean of the scores of its joints.
        mean: joints that are counted together for the mean.
    """

    title: str
    threshold: float
    groups: Mapping[str, tuple[int, ...]]
    mean: tuple[int, ...]


def _groups(skeleton: Skeleton, head: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    groups = {"head": head}
    for name in ("shoulder", "elbow", "wrist", "hip", "knee", "ankle"):
        groups[name] = tuple(joint for joint, title in enumerate(skeleton.joints) if title.endswith(f" {name}"))
    return groups


#: PCKh@0.5 of MPII's 16 joints. A person's size is the head size
#: (:class:`~bsam.lab.data.persons.PersonFiles`).
#: Pelvis (6) and thorax (7) are left out of the mean; upper neck (8) is in no group. The group head is only its top
#: (9), as in the validation scores published with SimpleBaseline, HRNet and SimCC; MPII's test server takes the mean of
#: upper neck and top.
MPII_SCORE = PoseScore("PCKh@0.5", 0.5, _groups(skeletons.MPII, head=(9,)), mean=(*range(6), *range(8, 16)))
#: PCK@0.2 of LSP's 14 joints. The size of a person is the torso size (:func:`torso_sizes`). The group head is neck and
#: head top.
LSP_SCORE = PoseScore("PCK@0.2", 0.2, _groups(skeletons.LSP, head=(12, 13)), mean=tuple(range(14)))
SCORES: Mapping[Skeleton, PoseScore] = {skeletons.MPII: MPII_SCORE, skeletons.LSP: LSP_SCORE}
_LSP_DIAGONALS = (9, 2), (8, 3)  # left shoulder and right hip; right shoulder and left hip


def torso_sizes(joints: Tensor) -> Tensor:
    """Return the torso sizes of LSP: the distance from left shoulder to right hip, as usual.

    If one of them is not visible, it is the distance from right shoulder to left hip, and if one of these is not
    visible either, 0.

    Args:
        joints: (n, 14, 3): x, y, visible.
    """
    sizes = torch.zeros_like(joints[:, 0, 0])
    for shoulder, hip in _LSP_DIAGONALS:
        visible = (joints[:, shoulder, 2] > 0) & (joints[:, hip, 2] > 0)
        distance = (joints[:, shoulder, :2] - joints[:, hip, :2]).norm(dim=1)
        sizes = torch.where(visible & (sizes == 0), distance, sizes)
    return sizes


def pck(
    predicted: Tensor, truth: Tensor, visible: Tensor, scale: Tensor, threshold: float
) -> tuple[list[int], list[int]]:
    """Return for each joint how often it was found and how often it was visible.

    A joint is found if its distance to the truth is at most ``threshold`` times the person's size.

    Args:
        predicted: (n, joints, 2).
        truth: (n, joints, 2), in the same coordinates.
        visible: (n, joints), above 0 for joints that count; the coordinates of the others are ignored.
        scale: (n,), sizes of the persons, in the same coordinates; 0 if unknown, which leaves the person out.
        threshold: relative to the size of the person.

    Example:
        >>> truth = torch.tensor([[[0.0, 0.0], [8.0, 0.0], [4.0, 4.0]]])
        >>> predicted = truth + torch.tensor([3.0, 4.0])
        >>> pck(
        ...     predicted,
        ...     truth,
        ...     torch.tensor([[1, 1, 0]]),
        ...     torch.tensor([10.0]),
        ...     threshold=0.5,
        ... )
        ([1, 1, 0], [1, 1, 0])
    """
    counted = (visible > 0) & (scale > 0)[:, None]
    distance = (predicted.double() - truth.double()).norm(dim=-1)
    correct = (distance <= threshold * scale.double()[:, None]) & counted
    return correct.sum(0).tolist(), counted.sum(0).tolist()


def group_scores(correct: list[int], visible: list[int], score: PoseScore) -> dict[str, float]:
    """Return the score of each group, and the mean, from 0 to 1; groups whose joints were never visible are left out.

    The score of a group is the mean of the scores of its joints, each over the persons in whom it is visible. For the
    mean, the joints are counted together.

    Args:
        correct, visible: how often each joint was found and was visible, from :func:`pck`.
        score: :data:`MPII_SCORE` or :data:`LSP_SCORE`.

    Example:
        >>> scores = group_scores([1] * 7 + [0] * 7, [1] * 14, LSP_SCORE)
        >>> scores["hip"], scores["wrist"], scores["mean"]
        (1.0, 0.5, 0.5)
    """
    total = sum(visible[joint] for joint in score.mean)
    if not total:
        raise BsamValueError(
            f"no joint is visible in a person of known size, so there is no {score.title}: label joints in the test "
            "set, or evaluate on more persons"
        )
    scores = {}
    for name, group in score.groups.items():
        shares = [correct[joint] / visible[joint] for joint in group if visible[joint]]
        if shares:
            scores[name] = sum(shares) / len(shares)
    return {**scores, MEAN: sum(correct[joint] for joint in score.mean) / total}


def mean_pose(y: Tensor) -> Tensor:
    """Return the mean position of each joint (joints, 2): a prediction that needs no image.

    Joints that are not visible do not count; a joint that is never visible gets the mean of all others.

    Args:
        y: (n, joints, 3) of the training set: x, y in pixels of the input, visible.

    Example:
        >>> mean_pose(
        ...     torch.tensor(
        ...         [[[1.0, 2.0, 1.0], [5.0, 5.0, 0.0]], [[3.0, 6.0, 1.0], [6.0, 6.0, 1.0]]]
        ...     )
        ... )
        tensor([[2., 4.],
                [6., 6.]])
    """
    visible = y[..., 2] > 0
    points = torch.where(visible[..., None], y[..., :2], 0).double()
    count = visible.sum(0)[:, None]
    mean = torch.where(count > 0, points.sum(0) / count.clamp(min=1), points.sum((0, 1)) / count.sum())
    return mean.to(y.dtype)
