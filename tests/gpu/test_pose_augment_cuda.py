"""Augmentation on the device equals that on the CPU, also in a captured CUDA graph."""

from __future__ import annotations

import pytest
import torch

from bsam.lab.data.pose_augment import PoseAugment
from bsam.lab.data.stick_figures import stick_figures

pytestmark = pytest.mark.gpu


def test_a_captured_augmentation_gives_the_numbers_of_the_cpu():
    data = stick_figures(16)
    augment = PoseAugment(data.side, data.skeleton.mirrored, mean=(0.4, 0.5, 0.6), std=(0.2, 0.2, 0.3))
    draws = [augment.draws(16, seed=0, epoch=epoch) for epoch in range(2)]
    persons, row = data.train, draws[0].to("cuda")
    tensors = tuple(tensor.cuda() for tensor in (persons.x, persons.y, persons.to_image))
    arguments = *tensors, row
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        augment(*arguments)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        augmented = augment(*arguments)
    for epoch in draws:
        row.copy_(epoch)
        graph.replay()
        want = augment(data.train.x, data.train.y, data.train.to_image, epoch)
        for one, other in zip(augmented, want, strict=True):
            torch.testing.assert_close(one.cpu(), other, rtol=0, atol=1e-3)
        with torch.autocast("cuda", torch.bfloat16):
            eager = augment(*tensors, epoch.to("cuda"))
        assert all(torch.equal(one, other) for one, other in zip(augmented, eager, strict=True))
    assert augmented[0].is_contiguous(memory_format=torch.channels_last)
