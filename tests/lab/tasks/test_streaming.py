"""Batches of images that stay in a file are those of indexing."""

import numpy as np
import pytest
import torch

from bsam.lab.tasks.images import stream


@pytest.fixture(params=["mapped", "in memory", "contiguous"])
def images(request, tmp_path):
    """Of image files, of files some of which were left out, and in the other memory format."""
    pixels = np.random.default_rng(0).integers(0, 256, (20, 5, 6, 3), np.uint8)
    np.save(tmp_path / "pixels.npy", pixels)
    if request.param == "mapped":
        pixels = np.load(tmp_path / "pixels.npy", mmap_mode="c")
    x = torch.from_numpy(pixels).permute(0, 3, 1, 2)
    return x.contiguous() if request.param == "contiguous" else x


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_batches_are_those_of_indexing(images, device):
    generator = torch.Generator().manual_seed(1)
    indices = [torch.randint(0, 20, (n,), generator=generator) for n in (4, 4, 1, 7, 4, 0, 4, 3)]
    found = list(stream(images, indices, torch.device(device)))
    assert [batch.device.type for batch in found] == [device] * 8
    for batch, index in zip(found, indices, strict=True):
        assert batch.dtype == torch.uint8
        assert torch.equal(batch.cpu(), images[index])
        assert batch.is_contiguous(memory_format=torch.channels_last)
    assert list(stream(images, [], torch.device(device))) == []


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_reader_may_stop_early(images, device):
    batches = stream(images, torch.arange(20).view(10, 2), torch.device(device))
    assert torch.equal(next(batches).cpu(), images[:2])
    batches.close()
