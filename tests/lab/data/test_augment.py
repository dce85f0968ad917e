from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from bsam.lab.data.augment import AUGMENTATIONS, RESIZED_CROP, Augment, augmentation, normalise

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


def images(n: int, channels: int = 3, side: int = 32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(n)
    return torch.randint(0, 256, (n, channels, side, side), generator=generator, dtype=torch.uint8)


def one_image(x: np.ndarray, row: list[int], augment: Augment) -> tuple[np.ndarray, np.ndarray]:
    """Pixel by pixel: the bytes of one image after crop and flip, and the final numbers in double precision."""
    dy, begin, down, across, top, left = row
    channels, side, _ = x.shape
    assert down == 1
    assert across in (1, -1)
    dx = begin if across == 1 else begin - (side - 1)
    assert 0 <= dy <= 2 * augment.pad
    assert 0 <= dx <= 2 * augment.pad
    moved, numbers = np.zeros_like(x), np.zeros(x.shape)
    for c in range(channels):
        for i in range(side):
            for j in range(side):
                source_j = side - 1 - j if across == -1 else j
                from_i, from_j = i + dy - augment.pad, source_j + dx - augment.pad
                if 0 <= from_i < side and 0 <= from_j < side:
                    moved[c, i, j] = x[c, from_i, from_j]
                value = moved[c, i, j] / 255 if x.dtype == np.uint8 else moved[c, i, j]
                mean, std = augment.mean[c % len(augment.mean)], augment.std[c % len(augment.std)]
                cut = augment.cutout and top <= i < top + augment.cutout and left <= j < left + augment.cutout
                numbers[c, i, j] = 0 if cut else (value - mean) / std
    return moved, numbers


@pytest.mark.parametrize("name", [name for name in AUGMENTATIONS if name != RESIZED_CROP])
def test_equals_the_treatment_of_one_image_at_a_time(name):
    augment, x = replace(augmentation(name), mean=MEAN, std=STD), images(12)
    draws = augment.draws(12, seed=1, epoch=2, side=32)
    found = augment(x, draws)
    assert found.dtype == torch.float32
    assert found.is_contiguous(memory_format=torch.channels_last)
    for image, row, ours in zip(x.numpy(), draws.tolist(), found.numpy(), strict=True):
        np.testing.assert_allclose(ours, one_image(image, row, augment)[1], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("setting", [{}, {"pad": 0}, {"flip": False}, {"pad": 1}, {"pad": 32}], ids=str)
@pytest.mark.parametrize("side", [32, 9])
def test_crop_and_flip_are_exact(setting, side):
    augment, x = Augment(cutout=0, **setting), images(6, side=side)
    draws = augment.draws(6, seed=0, epoch=0, side=side)
    expected = [one_image(image, row, augment)[0] for image, row in zip(x.numpy(), draws.tolist(), strict=True)]
    for pixels in (x.float(), x.float().contiguous(memory_format=torch.channels_last)):
        # numbers are not divided, and mean 0 and deviation 1 change no bit
        np.testing.assert_array_equal(augment(pixels, draws).numpy(), expected)


@pytest.mark.parametrize(
    ("top", "left", "rows", "columns"),
    [(-8, -8, (0, 8), (0, 8)), (23, 23, (23, 32), (23, 32)), (-8, 23, (0, 8), (23, 32)), (5, 0, (5, 21), (0, 16))],
)
def test_the_hole_ends_at_the_border(top, left, rows, columns):
    draws = torch.tensor([[4, 4, 1, 1, top, left], [4, 4, 1, 1, 32, 32]])
    cut, whole = Augment(mean=(0.5,), std=(0.1,))(torch.full((2, 3, 32, 32), 255, dtype=torch.uint8), draws)
    expected = torch.full((3, 32, 32), 5.0)
    torch.testing.assert_close(whole, expected)
    expected[:, rows[0] : rows[1], columns[0] : columns[1]] = 0  # after normalisation, in all channels
    torch.testing.assert_close(cut, expected)
    assert torch.equal(cut == 0, expected == 0)


def test_draws_cover_their_range_evenly():
    n, side = 40_000, 32
    draws = Augment().draws(n, seed=3, epoch=7, side=side)
    assert draws.shape == (n, 6)

    def near(count, share):
        return abs(int(count) - n * share) < 5 * (n * share * (1 - share)) ** 0.5

    dy, begin, down, across, top, left = draws.T
    flip, hole = across == -1, top < side
    dx = begin - 31 * flip
    assert set(down.tolist()) == {1}
    assert set(across.tolist()) == {1, -1}
    assert torch.equal(hole, left < side)
    for shift in (dy, dx):
        assert sorted(set(shift.tolist())) == list(range(9))
        assert all(near(count, 1 / 9) for count in shift.bincount())
    for corner in (top[hole], left[hole]):
        assert sorted(set(corner.tolist())) == list(range(-8, 24))
        assert all(near(count, 0.5 / side) for count in (corner + 8).bincount())
    assert near(flip.sum(), 0.5)
    assert near(hole.sum(), 0.5)
    assert near((flip & hole).sum(), 0.25)
    assert near((dy == dx).sum(), 1 / 9)
    assert near((hole & (top == left)).sum(), 0.5 / side)


def test_draws_are_a_function_of_seed_and_epoch():
    state, draws = (torch.random.get_rng_state(), np.random.get_state()[1].tolist()), Augment().draws
    first = draws(100, seed=1, epoch=2, side=32)
    assert torch.equal(draws(100, seed=1, epoch=2, side=32), first)
    for seed, epoch in ((1, 3), (2, 2), (2, 1)):
        assert (draws(100, seed, epoch, 32) != first).any(1).sum() > 90
    assert torch.equal(torch.random.get_rng_state(), state[0])
    assert np.random.get_state()[1].tolist() == state[1]


def test_the_images_stay_as_they_are():
    for augment in (Augment(), Augment(pad=0, flip=False), Augment(pad=0, flip=False, cutout=0)):
        for x in (images(4), images(4).float(), images(4).float().contiguous(memory_format=torch.channels_last)):
            before = x.clone()
            augment(x, augment.draws(4, 0, 0, 32))
            assert torch.equal(x, before)


@pytest.mark.parametrize(("channels", "mean", "std"), [(3, MEAN, STD), (1, (0.2860,), (0.3530,)), (3, (0.5,), (0.2,))])
def test_normalises_bytes_and_numbers(channels, mean, std):
    x = images(5, channels)
    for pixels, unit in ((x, 255.0), (x.float(), 1.0)):
        found = normalise(pixels, mean, std)
        center, scale = (torch.tensor(values).double().view(-1, 1, 1) for values in (mean, std))
        expected = (x.double() / unit - center) / scale
        assert found.is_contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(found, expected.float(), rtol=2e-6, atol=2e-6)
    assert torch.equal(normalise(x.float(), (0.0,), (1.0,)), x.float())


def test_inference_mode_leaves_no_trace():
    mean, std = (0.123,), (0.456,)  # of no other test
    with torch.inference_mode():
        normalise(images(2).float(), mean, std)
    x = images(2).float().requires_grad_()
    normalise(x, mean, std).sum().backward()
    torch.testing.assert_close(x.grad, torch.full_like(x, 1 / 0.456))


def test_no_shape_and_no_value_comes_from_the_data():
    """On the meta device, reading a value or a shape that depends on one raises."""
    augment = Augment(mean=MEAN, std=STD)
    assert augment(images(4).to("meta"), augment.draws(4, 0, 0, 32).to("meta")).shape == (4, 3, 32, 32)
