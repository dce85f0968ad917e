from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from bsam.lab.data.persons import Persons
from bsam.lab.data.pose_augment import PoseAugment, apply, centre_map, compose, crop_map, inverse, warp
from pose_reference import bilinear, came_from, moved

ROWS = [[1.0, 0.0, 0.0], [1.0, 0.0, 1.0], [1.25, 0.5, 0.0], [0.75, -0.4, 1.0], [2.0, math.pi / 2, 0.0]]


def centred(rows: list[list[float]], source: int, target: int) -> torch.Tensor:
    return centre_map(source, target, *torch.tensor(rows, dtype=torch.float64).unbind(dim=1))


def test_a_crop_is_a_square_around_the_box():
    box = [30.0, 10.0, 50.0, 90.0]  # centre (40, 50), longer side 80: a square of 100 with a margin of 1.25
    maps = crop_map(torch.tensor([box]), margin=1.25, side=64)
    points = torch.tensor([[[40.0, 50.0], [-10.0, 0.0], [90.0, 100.0]]])
    assert apply(maps, points).tolist() == [[[31.5, 31.5], [-0.5, -0.5], [63.5, 63.5]]]  # centre and corners


@pytest.mark.parametrize(("source", "target"), [(352, 256), (9, 12)])
def test_rotation_scale_and_flip_about_the_centre(source, target):
    random = np.random.default_rng(0)
    points = random.uniform(-5, source + 5, (len(ROWS), 7, 2))
    want = [[moved(x, y, row, source, target) for x, y in some] for some, row in zip(points, ROWS, strict=True)]
    found = apply(centred(ROWS, source, target), torch.from_numpy(points))
    np.testing.assert_allclose(found.numpy(), np.array(want), atol=1e-9)
    for row, (x, y) in zip(ROWS, points[:, 0], strict=True):  # the two references agree
        assert came_from(*moved(x, y, row, source, target), row, source, target) == pytest.approx((x, y), abs=1e-9)


def test_float32_points_return_to_within_1e_4_pixels():
    random = np.random.default_rng(0)
    corner, extent = random.uniform(-20, 400, (200, 2)), random.uniform(100, 600, (200, 2))
    crops = crop_map(torch.from_numpy(np.concatenate([corner, corner + extent], axis=1)), 1.25 * 1.375, 352)
    rows = np.stack([random.uniform(0.75, 1.25, 200), random.uniform(-0.5, 0.5, 200), random.integers(0, 2, 200)], 1)
    turns = centred(rows.tolist(), 352, 256)
    whole = compose(turns, crops)
    inputs = torch.from_numpy(random.uniform(0, 255, (200, 50, 2))).float()
    images = torch.from_numpy(corner[:, None] + extent[:, None] * random.random((200, 50, 2))).float()
    for maps, points in ((whole, images), (inverse(whole), inputs), (crops, images), (turns, inputs)):
        there = apply(maps, points)
        assert there.dtype == torch.float32
        assert (apply(inverse(maps), there) - points).abs().max() <= 1e-4
        far = points.double() + 5000
        torch.testing.assert_close(apply(inverse(maps), apply(maps, far)), far, rtol=0, atol=1e-8)
    steps = apply(turns, apply(crops, images.double()))
    torch.testing.assert_close(apply(whole, images.double()), steps, rtol=0, atol=1e-9)


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize(("source", "target"), [(12, 9), (8, 16)])
def test_an_image_moves_as_its_points_do(row, source, target):
    image = np.random.default_rng(1).uniform(0, 255, (2, source, source))
    want = np.zeros((2, target, target))
    for i in range(target):
        for j in range(target):
            want[:, i, j] = bilinear(image, *came_from(j, i, row, source, target))
    found = warp(torch.from_numpy(image)[None], centred([row], source, target), target)
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found[0].numpy(), want, atol=1e-3)


def test_autocast_changes_nothing():
    image = torch.rand(1, 3, 20, 20, generator=torch.Generator().manual_seed(0))
    maps = centred([[1.1, 0.3, 1.0]], 20, 16)
    want = warp(image, maps, 16), compose(maps, inverse(maps)), apply(maps, image[:, 0, :, :2])
    with torch.autocast("cpu", torch.bfloat16):
        found = warp(image, maps, 16), compose(maps, inverse(maps)), apply(maps, image[:, 0, :, :2])
    assert all(torch.equal(one, other) for one, other in zip(want, found, strict=True))


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
