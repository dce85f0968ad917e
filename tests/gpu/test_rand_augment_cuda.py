"""RandAugment on the GPU gives the pixels of the CPU and never waits for the GPU."""

from __future__ import annotations

import warnings

import pytest
import torch

from bsam.lab.data.augment import TimmAugment

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("channels", [3, 1])
@pytest.mark.parametrize("name", ["rand-m9-mstd0.5-inc1", "rand-m10-mstd101-n3-p1", "rand-m10-mstd101-t3a-n2-p1"])
def test_images_are_those_of_the_cpu(name, channels):
    x = torch.randint(0, 256, (96, channels, 48, 48), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    x[::3] = torch.arange(48, dtype=torch.uint8).mul(5)  # gradients
    x[::8] = 77
    augment = TimmAugment(aa=name, mean=(0.4, 0.5, 0.6)[:channels], std=(0.2,) * channels)
    draws = augment.draws(96, seed=0, epoch=0, side=48)
    expected, images = augment.moved(x, draws), x.cuda()
    assert (expected != x).any((1, 2, 3)).sum() > 60
    augment.moved(images, draws)
    with warnings.catch_warnings(action="ignore"):  # this mode is called a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        found = augment.moved(images, draws)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert (found.cpu().int() - expected.int()).abs().max() <= 1
    with torch.autocast("cuda", torch.bfloat16):
        assert torch.equal(augment.moved(images, draws), found)
    assert torch.equal(images.cpu(), x)
