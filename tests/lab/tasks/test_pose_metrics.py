"""PCK against plain loops and cases by hand."""

from __future__ import annotations

import json
import math

import pytest
import torch

from bsam.common.errors import BsamError
from bsam.lab.tasks.pose_outputs import LSP_SCORE, MPII_SCORE, group_scores, mean_pose, pck, torso_sizes

NAN = math.nan
NAMES = {  # in the order of the files
    "LSP": "rank rkne rhip lhip lkne lank rwri relb rsho lsho lelb lwri neck head",
    "MPII": "rank rkne rhip lhip lkne lank pelvis thorax neck head rwri relb rsho lsho lelb lwri",
}
SCORES = {"LSP": LSP_SCORE, "MPII": MPII_SCORE}
GROUPS = {"shoulder": "sho", "elbow": "elb", "wrist": "wri", "hip": "hip", "knee": "kne", "ankle": "ank"}


def pck_loop(predicted, truth, visible, scale, threshold):
    found, counts = [0] * len(truth[0]), [0] * len(truth[0])
    for i, persons in enumerate(truth):
        for joint, (x, y) in enumerate(persons):
            if visible[i][joint] and scale[i]:
                counts[joint] += 1
                px, py = predicted[i][joint]
                found[joint] += math.hypot(px - x, py - y) / scale[i] <= threshold
    return found, counts


def scores_loop(found, counts, data):
    """The share of each joint by its name, then as the evaluation scripts have it."""
    names = NAMES[data].split()
    share = {name: found[i] / counts[i] for i, name in enumerate(names)}
    groups = {group: (share[f"l{joint}"] + share[f"r{joint}"]) / 2 for group, joint in GROUPS.items()}
    groups["head"] = share["head"] if data == "MPII" else (share["neck"] + share["head"]) / 2
    total = [i for i, name in enumerate(names) if name not in ("pelvis", "thorax")]
    return {**groups, "mean": sum(found[i] for i in total) / sum(counts[i] for i in total)}


@pytest.mark.parametrize("data", NAMES)
def test_scores_are_those_of_a_loop(data):
    score, joints, generator = SCORES[data], len(NAMES[data].split()), torch.Generator().manual_seed(0)
    truth = torch.rand(40, joints, 2, generator=generator) * 100
    spread = torch.linspace(2, 12, joints)[:, None]  # another for each joint
    predicted = truth + spread * torch.randn(40, joints, 2, generator=generator)
    visible, scale = torch.rand(40, joints, generator=generator) < 0.7, 20 * torch.rand(40, generator=generator) + 10
    scale[3] = 0
    truth[~visible] = NAN
    found, counts = pck(predicted, truth, visible, scale, score.threshold)
    plain = [t.tolist() for t in (predicted, truth, visible, scale)]
    assert (found, counts) == pck_loop(*plain, score.threshold)
    scores = group_scores(found, counts, score)
    assert scores == pytest.approx(scores_loop(found, counts, data), abs=1e-12)
    assert list(scores) == ["head", *GROUPS, "mean"]
    assert json.loads(json.dumps(scores)) == scores
    assert len(set(scores.values())) == 8


def test_a_distance_that_equals_the_limit_is_found():
    truth = torch.zeros(1, 2, 2)
    predicted = torch.tensor([[[3.0, 4.0], [3.0, 4.001]]])
    assert pck(predicted, truth, torch.ones(1, 2), torch.tensor([10.0]), 0.5) == ([1, 0], [1, 1])


def test_sides_have_equal_weight_in_a_group_and_joints_in_the_mean():
    found, counts = [0] * 14, [0] * 14
    found[2], counts[2], found[3], counts[3] = 1, 1, 0, 9
    assert group_scores(found, counts, LSP_SCORE) == {"hip": 0.5, "mean": 0.1}
    counts[3] = 0
    assert group_scores(found, counts, LSP_SCORE) == {"hip": 1.0, "mean": 1.0}


def test_sizes():
    joints = torch.full((3, 14, 3), NAN)
    joints[:, 9] = torch.tensor([0.0, 0.0, 1.0])  # left shoulder
    joints[:, 2] = torch.tensor([3.0, 4.0, 1.0])  # right hip
    joints[1, 9, 2] = 0
    joints[2, 2] = torch.tensor([NAN, NAN, 0.0])
    assert torso_sizes(joints).tolist() == [5.0, 0.0, 0.0]
    joints[:, 8] = torch.tensor([0.0, 12.0, 1.0])  # right shoulder
    joints[:, 3] = torch.tensor([5.0, 0.0, 1.0])  # left hip
    joints[2, 3, 2] = 0
    assert torso_sizes(joints).tolist() == [5.0, 13.0, 0.0]  # the other diagonal only where the first is not known


def test_persons_of_unknown_size_and_joints_that_are_not_visible_are_left_out():
    truth = torch.zeros(2, 14, 2)
    truth[1] = NAN
    predicted, visible = torch.full_like(truth, 1e9), torch.zeros(2, 14)
    visible[0, 5] = visible[1, 4] = 1
    predicted[0, 5] = 0
    found, counts = pck(predicted, truth, visible, torch.tensor([1.0, 0.0]), 0.2)
    assert (sum(found), sum(counts), found[5]) == (1, 1, 1)
    nothing = pck(predicted, truth, 0 * visible, torch.ones(2), 0.2)
    assert nothing == ([0] * 14, [0] * 14)
    with pytest.raises(BsamError, match="PCK"):
        group_scores(*nothing, LSP_SCORE)


def test_the_mean_pose_is_that_of_a_loop():
    y = torch.rand(20, 5, 3, generator=torch.Generator().manual_seed(0)) * 64
    y[..., 2] = y[..., 2] > 20
    y[:, 4, 2] = 0
    y[y[..., 2] == 0] = torch.tensor([NAN, NAN, 0])
    found = mean_pose(y)
    assert (found.dtype, found.shape) == (torch.float32, (5, 2))
    rows = [[person[j][:2] for person in y.tolist() if person[j][2]] for j in range(5)]
    rows[4] = [point for row in rows[:4] for point in row]
    expected = [[sum(p[axis] for p in row) / len(row) for axis in range(2)] for row in rows]
    torch.testing.assert_close(found, torch.tensor(expected))
