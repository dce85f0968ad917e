"""RandomResizedCrop for batches, compared with torch's interpolation of one crop at a time."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from bsam.lab.data.augment import RESIZED_CROP, ResizedCrop, augmentation, draw_boxes, normalise

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


def images(n, channels=3, side=40):
    generator = torch.Generator().manual_seed(n)
    return torch.randint(0, 256, (n, channels, side, side), generator=generator, dtype=torch.uint8)


def one_image(x, row, size, mode):
    """One image: its crop, resized by torch with antialiasing, mirrored, and then normalised."""
    top, left, height, width, mirrored = row
    crop = x[None, :, top : top + height, left : left + width].double() / 255
    resized = F.interpolate(crop, (size, size), mode=mode, antialias=True)[0]
    resized = resized.flip(2) if mirrored else resized
    return (resized - torch.tensor(MEAN).view(-1, 1, 1)) / torch.tensor(STD).view(-1, 1, 1)


@pytest.mark.parametrize("size", [11, 29, 64])
@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_equals_the_treatment_of_one_image_at_a_time(mode, size):
    augment = ResizedCrop(size=size, cubic=mode == "bicubic", mean=MEAN, std=STD)
    x = images(24)
    draws = augment.draws(24, seed=1, epoch=2, side=40)
    found = augment(x, draws)
    assert found.dtype == torch.float32
    assert found.is_contiguous(memory_format=torch.channels_last)
    for image, row, ours in zip(x, draws.tolist(), found, strict=True):
        torch.testing.assert_close(ours.double(), one_image(image, row, size, mode), rtol=0, atol=2e-5)
    assert {row[4] for row in draws.tolist()} == {0, 1}
    assert (draws[:, 2:4] < size).any() == (size > 11)  # crops that are enlarged
    assert (draws[:, 2:4] > size).any() == (size < 40)  # and crops that are reduced


def test_stripes_become_grey_where_they_are_reduced():
    x = torch.zeros(1, 1, 64, 64)
    x[..., ::2] = 1
    found = ResizedCrop(size=16)(x, torch.tensor([[0, 0, 64, 64, 0]]))
    assert torch.allclose(found[..., 1:-1], torch.tensor(0.5), atol=1e-6)


def test_the_whole_image_at_its_size_keeps_every_pixel():
    x = images(2)
    draws = torch.tensor([[0, 0, 40, 40, 0], [0, 0, 40, 40, 1]])
    for cubic in (False, True):
        found = ResizedCrop(cubic=cubic)(x.float(), draws)
        assert torch.equal(found[0], x[0].float())
        assert torch.equal(found[1], x[1].float().flip(2))


def by_torchvision(side, random):
    """The box that torchvision's ``RandomResizedCrop.get_params`` returns for a square image, with numpy's numbers."""
    for _ in range(10):
        area = side**2 * random.uniform(0.08, 1.0)
        ratio = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
        width, height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < width <= side and 0 < height <= side:
            return random.integers(0, side - height + 1), random.integers(0, side - width + 1), height, width
    return 0, 0, side, side


def test_boxes_are_distributed_as_those_of_torchvision():
    n, side = 20_000, 50
    ours = draw_boxes(n, side, (0.08, 1.0), (3 / 4, 4 / 3), np.random.default_rng(0))
    random = np.random.default_rng(1)
    theirs = np.array([by_torchvision(side, random) for _ in range(n)])
    top, left, height, width = ours.T
    assert (ours[:, :2] >= 0).all()
    assert (top + height).max() == side
    assert (left + width).max() == side
    statistics = (
        lambda y, x, h, w: h * w / side**2,
        lambda y, x, h, w: np.log(w / h),
        lambda y, x, h, w: np.log(w / h) ** 2,
        lambda y, x, h, w: y / np.maximum(side - h, 1),
        lambda y, x, h, w: x / np.maximum(side - w, 1),
        lambda y, x, h, w: y * x / side**2,
        lambda y, x, h, w: h * w < 0.2 * side**2,
        lambda y, x, h, w: (h == side) & (w == side),
    )
    for number, statistic in enumerate(statistics):
        a, b = (statistic(*boxes.T).astype(float) for boxes in (ours, theirs))
        assert abs(a.mean() - b.mean()) < 5 * np.sqrt((a.var() + b.var()) / n), number


def test_draws_are_a_function_of_seed_and_epoch():
    state = torch.random.get_rng_state(), np.random.get_state()[1].tolist()
    draws = ResizedCrop().draws
    first = draws(100, seed=1, epoch=2, side=64)
    assert first.shape == (100, 5)
    assert torch.equal(draws(100, seed=1, epoch=2, side=64), first)
    for seed, epoch in ((1, 3), (2, 2), (2, 1)):
        assert (draws(100, seed, epoch, 64) != first).any(1).sum() > 90
    assert torch.equal(torch.random.get_rng_state(), state[0])
    assert np.random.get_state()[1].tolist() == state[1]


def test_no_shape_and_no_value_comes_from_the_data():
    """Reading a value of a fake tensor, or a shape that depends on one, raises."""
    augment = ResizedCrop(size=24, mean=MEAN, std=STD)
    x, draws = images(4), augment.draws(4, 0, 0, 40)
    augment(x, draws)  # makes the constants
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert augment(mode.from_tensor(x), mode.from_tensor(draws)).shape == (4, 3, 24, 24)


def test_autocast_changes_nothing():
    augment, x = ResizedCrop(size=24, mean=MEAN, std=STD), images(4)
    draws = augment.draws(4, 0, 0, 40)
    with torch.autocast("cpu", torch.bfloat16):
        found = augment(x, draws)
    assert torch.equal(found, augment(x, draws))


def test_is_one_of_the_augmentations_and_leaves_the_images_as_they_are():
    augment = replace(augmentation(RESIZED_CROP), mean=MEAN, std=STD)
    assert isinstance(augment, ResizedCrop)
    for x in (images(4), images(4).float()):
        before = x.clone()
        augment(x, augment.draws(4, 0, 0, 40))
        assert torch.equal(x, before)
    whole = augment(images(4), torch.tensor([[0, 0, 40, 40, 0]] * 4))
    torch.testing.assert_close(whole, normalise(images(4), MEAN, STD))
