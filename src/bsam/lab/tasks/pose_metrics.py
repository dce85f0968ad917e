"""PCK: the share of joints that are found, which means within a certain distance of their true position."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ...common.errors import BsamValueError
from ..data import persons as skeletons
from ..data.persons import Skeleton

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
    pairs = {
        name: tuple(joint for joint, title in enumerate(skeleton.joints) if title.endswith(f" {name}"))
        for name in ("shoulder", "elbow", "wrist", "hip", "knee", "ankle")
    }
    return {"head": head, **pairs}


#: PCKh@0.5 of MPII's 16 joints. A person's size is the head size
#: (:class:`~bsam.lab.data.persons.PersonFiles`).
#: Pelvis (6) and thorax (7) are left out of the mean; upper neck (8) is in no group. The group head is only its top
#: (9), as in the validation scores published with SimpleBaseline, HRNet and SimCC; MPII's test server takes the mean of
#: upper neck and top.
MPII = PoseScore("PCKh@0.5", 0.5, _groups(skeletons.MPII, head=(9,)), mean=(*range(6), *range(8, 16)))
#: PCK@0.2 of LSP's 14 joints. The size of a person is the torso size (:func:`torso_sizes`). The group head is neck and
#: head top.
LSP = PoseScore("PCK@0.2", 0.2, _groups(skeletons.LSP, head=(12, 13)), mean=tuple(range(14)))
SCORES: Mapping[Skeleton, PoseScore] = {skeletons.MPII: MPII, skeletons.LSP: LSP}
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
        score: :data:`MPII` or :data:`LSP`.

    Example:
        >>> scores = group_scores([1] * 7 + [0] * 7, [1] * 14, LSP)
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
