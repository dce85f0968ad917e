"""Each operation of RandAugment in batches, compared with timm's on Pillow images, bit for bit."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from PIL import Image

from bsam.common.timm_import import import_timm
from bsam.lab.data.rand_augment import RandAugment

FILL = (12, 100, 200)
# policies of one operation per image, with magnitudes from 0 to 10, from 0 to 30, and with the largest ones
POLICIES = ("rand-m10-mstd101", "rand-m10-mstd101-inc1", "rand-m30-mmax30-mstd101-inc1", "rand-m30-mmax30", "rand-m0")
CHANGED = ("Posterize", "Solarize", "Color", "Contrast", "Brightness", "Sharpness")
OPERATIONS = (
    *("AutoContrast", "Equalize", "Invert", "Rotate", "SolarizeAdd", "ShearX", "ShearY", "TranslateXRel"),
    *("TranslateYRel", "Desaturate", "GaussianBlur", *CHANGED, *(f"{name}Increasing" for name in CHANGED)),
)


def images(channels, side):
    """Return noise, flat images, images of two levels, and gradients with a patch: (n, side, side, channels)."""
    rng = np.random.default_rng(side + channels)
    noise = rng.integers(0, 256, (4, side, side, channels))
    flat = np.broadcast_to(rng.integers(0, 256, (4, 1, 1, channels)), noise.shape)
    levels = np.where(noise < 128, flat, rng.integers(0, 256, (4, 1, 1, channels)))
    y, x = np.mgrid[:side, :side] / side
    slopes = rng.uniform(-3, 3, (2, 4, 1, 1, channels))
    gradient = 128 + 100 * np.sin(slopes[0] * x[..., None] + slopes[1] * y[..., None])
    gradient[:, side // 3 : side // 2, side // 4 :] = flat[:, :1, :1]
    return np.concatenate([noise, flat, levels, gradient]).astype(np.uint8)


def timm_policy(name, channels):
    import_timm()
    from timm.data.auto_augment import rand_augment_transform

    fill = FILL if channels == 3 else FILL[0]
    return rand_augment_transform(name, {"translate_pct": 0.45, "img_mean": fill})


def with_pillow(transform, array, seed):
    random.seed(seed)
    np.random.seed(seed)
    image = transform(Image.fromarray(array[:, :, 0] if array.shape[2] == 1 else array))
    return np.asarray(image).reshape(array.shape)


def batch(arrays):
    return torch.from_numpy(arrays).permute(0, 3, 1, 2)


@pytest.mark.parametrize("channels", [3, 1])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_each_operation_is_that_of_pillow(operation, channels, black_without_bits):
    compared = changed = 0
    for policy in POLICIES:
        for subset in ("", "-t3a"):
            name = f"{policy}-n1-p1{subset}"
            ours, theirs = RandAugment(name, FILL[:channels]), timm_policy(name, channels)
            for policy_of in (ours._policy, theirs):
                policy_of.ops = [op for op in policy_of.ops if op.name == operation]
            if not theirs.ops:
                continue
            for side in (33, 8):
                pixels = images(channels, side)[:: 2 if side == 33 else 1]
                expected = np.stack([with_pillow(theirs, pixels[i], i) for i in range(len(pixels))])
                found = ours(batch(pixels), range(len(pixels)))
                assert torch.equal(found, batch(expected)), (name, side)
                compared += 1
                changed += int((expected != pixels).any((1, 2, 3)).sum())
    assert compared >= 4
    assert changed > 10 or (channels == 1 and operation in ("Color", "ColorIncreasing", "Desaturate"))


@pytest.mark.parametrize("channels", [3, 1])
def test_a_batch_gives_what_single_images_give(channels):
    """On the CPU, images are changed one after another; here the operations get many at once, as on a GPU."""
    pixels, by_operation = batch(images(channels, 33)), {}
    for name in ("rand-m10-mstd101-n3-p1", "rand-m10-mstd101-inc1-t3a-n2-p1"):
        augment = RandAugment(name, FILL[:channels])
        for seed in range(100):
            for operation, numbers in augment.steps(seed, 33):
                by_operation.setdefault(operation, []).append((seed, numbers))
    assert len(by_operation) == 9
    for operation, uses in by_operation.items():
        assert len(uses) > 4
        x = pixels[[seed % len(pixels) for seed, _ in uses]]
        numbers = torch.from_numpy(np.array([values for _, values in uses], np.float64))
        single = [operation(one, row) for one, row in zip(x.split(1), numbers.split(1), strict=True)]
        assert torch.equal(operation(x, numbers), torch.cat(single)), operation


def test_both_interpolations_are_drawn_and_images_keep_their_pixels():
    augment, pixels = RandAugment("rand-m9-mstd0.5-inc1", FILL), batch(images(3, 16)).contiguous()
    before = pixels.clone()
    names = {operation.__name__ for seed in range(200) for operation, _ in augment.steps(seed, 16)}
    assert {"bilinear", "bicubic"} < names
    changed = augment(pixels, range(len(pixels)))
    assert not torch.equal(changed, before)
    assert torch.equal(pixels, before)
    assert augment(pixels[:0], []).shape == (0, 3, 16, 16)


def test_every_operation_of_timm_is_compared():
    import_timm()
    from timm.data import auto_augment

    weighted = auto_augment._RAND_WEIGHTED_0, auto_augment._RAND_WEIGHTED_3A
    lists = auto_augment._RAND_TRANSFORMS, auto_augment._RAND_INCREASING_TRANSFORMS, auto_augment._RAND_3A
    assert {name for part in (*weighted, *lists) for name in part} == set(OPERATIONS)
