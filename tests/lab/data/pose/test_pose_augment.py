from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from bsam.lab.data.pose.affine import apply
from bsam.lab.data.pose.persons import Persons
from bsam.lab.data.pose.pose_augment import PoseAugment
from pose_reference import bilinear, came_from, moved

STORED, SIDE = 22, 16
ORDER = (0, 2, 1, 3)  # head, right hand, left hand, navel
MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)


def persons(n: int) -> Persons:
    random = np.random.default_rng(n)
    x = torch.from_numpy(random.integers(0, 256, (n, STORED, STORED, 3), np.uint8)).permute(0, 3, 1, 2)
    y = np.concatenate([random.uniform(0, STORED, (n, 4, 2)), random.integers(0, 2, (n, 4, 1))], axis=2)
    return Persons(x, torch.from_numpy(y).float(), torch.from_numpy(random.normal(0, 3, (n, 2, 3))))


def augment(**settings) -> PoseAugment:
    return PoseAugment(SIDE, ORDER, mean=MEAN, std=STD, **settings)


def one_person(x: np.ndarray, y: np.ndarray, row: list[float]) -> tuple[np.ndarray, np.ndarray]:
    """One pixel and one joint at a time, in double precision."""
    image = np.zeros((3, SIDE, SIDE))
    for i, j in np.ndindex(SIDE, SIDE):
        value = bilinear(x, *came_from(j, i, row, STORED, SIDE))
        image[:, i, j] = (value / 255 - np.array(MEAN)) / np.array(STD)
    joints = np.zeros_like(y)
    for joint in range(len(y)):
        before_x, before_y, flag = y[ORDER[joint] if row[2] else joint]
        after = moved(before_x, before_y, row, STORED, SIDE)
        inside = all(-0.5 <= place <= SIDE - 0.5 for place in after)
        joints[joint] = *after, flag if inside else 0
    return image, joints


def test_equals_the_treatment_of_one_person_at_a_time():
    batch, ours = persons(12), augment()
    draws = ours.draws(12, seed=1, epoch=2)
    x, y, to_image = ours(batch.x, batch.y, batch.to_image, draws)
    assert (x.dtype, y.dtype, to_image.dtype) == (torch.float32, torch.float32, torch.float64)
    assert x.is_contiguous(memory_format=torch.channels_last)
    rows = draws.tolist()
    assert {row[2] for row in rows} == {0, 1}
    assert {row[1] == 0 for row in rows} == {True, False}
    for i, row in enumerate(rows):
        image, joints = one_person(batch.x[i].numpy(), batch.y[i].numpy(), row)
        np.testing.assert_allclose(x[i].numpy(), image, atol=1e-4)
        np.testing.assert_allclose(y[i].numpy(), joints, atol=1e-4)
    labelled, found = batch.y[:, :, 2].sum(), y[:, :, 2].sum()
    assert 0 < found < labelled  # some left the input
    # the way back: input, stored crop, image
    stored = torch.tensor([[came_from(3, 11, row, STORED, SIDE)] for row in rows], dtype=torch.float64)
    there = apply(to_image, torch.tensor([[[3.0, 11.0]]], dtype=torch.float64).expand(12, 1, 2))
    torch.testing.assert_close(there, apply(batch.to_image, stored), rtol=0, atol=1e-9)


def test_identity_draws_cut_out_the_centre():
    batch = persons(3)
    x, y, to_image = replace(augment(), mean=(0.0,), std=(1.0,))(batch.x, batch.y, batch.to_image)
    torch.testing.assert_close(255 * x, batch.x[:, :, 3:19, 3:19].float(), rtol=0, atol=2e-3)
    torch.testing.assert_close(y[:, :, :2], batch.y[:, :, :2] - 3, rtol=0, atol=1e-5)
    points = y[:, :, :2].double()
    torch.testing.assert_close(apply(to_image, points), apply(batch.to_image, points + 3), rtol=0, atol=1e-9)


def test_a_joint_on_the_border_counts_and_one_beyond_does_not():
    y = torch.tensor([[[2.6, 10.0, 1.0], [2.4, 10.0, 1.0], [10.0, 18.4, 1.0], [10.0, 18.6, 1.0]]])
    x, to_image = torch.zeros(1, 3, STORED, STORED), torch.eye(2, 3).double()[None]
    assert augment()(x, y, to_image)[1][0, :, 2].tolist() == [1, 0, 1, 0]


def test_draws_lie_in_their_ranges_and_are_a_function_of_seed_and_epoch():
    table = augment().draws(4000, seed=3, epoch=5)
    scale, angle, mirrored = table.unbind(dim=1)
    assert table.dtype == torch.float64
    assert 0.75 <= scale.min() < 0.76 < 1.24 < scale.max() <= 1.25
    assert scale.mean().item() == pytest.approx(1, abs=0.01)
    limit = math.radians(30)
    assert -limit <= angle.min() < -0.98 * limit < 0.98 * limit < angle.max() <= limit
    assert (angle != 0).double().mean().item() == pytest.approx(0.6, abs=0.03)
    assert mirrored.unique().tolist() == [0, 1]
    assert mirrored.mean().item() == pytest.approx(0.5, abs=0.03)
    assert abs(np.corrcoef(np.stack([scale, angle, mirrored]))[np.triu_indices(3, 1)]).max() < 0.06

    assert torch.equal(table, augment().draws(4000, seed=3, epoch=5))
    for seed, epoch in ((3, 6), (4, 5), (5, 3)):
        assert (table[:, 0] != augment().draws(4000, seed, epoch)[:, 0]).all()
    still = augment(scale=0.0, rotation_p=0.0, flip=False).draws(50, seed=3, epoch=5)
    assert torch.equal(still, torch.tensor([[1.0, 0, 0]]).double().expand(50, 3))
    assert augment(rotation=0.0).draws(50, seed=3, epoch=5)[:, 1].eq(0).all()
