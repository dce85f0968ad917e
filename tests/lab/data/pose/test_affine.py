from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from bsam.lab.data.pose.affine import apply, centre_map, compose, crop_map, inverse, warp
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
