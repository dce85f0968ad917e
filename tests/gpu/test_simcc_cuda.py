"""Loss, decoding and flip test of SimCC on a CUDA device, in a CUDA graph."""

from __future__ import annotations

import pytest
import torch

from bsam.lab.models import build
from bsam.lab.tasks.pose_outputs import decode, flip_merge, simcc_losses

pytestmark = pytest.mark.gpu
MIRRORED = [3, 4, 2, 0, 1]


def test_a_graph_of_the_network_and_all_that_follows_equals_the_cpu():
    network = build("simcc_resnet8", classes=5, seed=0).double()  # avoids TF32, so the largest bins are the same
    x, y = torch.randn(2, 4, 3, 64, 64).double(), 70 * torch.rand(2, 4, 5, 3).double()  # some joints outside
    y[..., 2] = y[..., 2] > 20
    y[:, 1, :, 2], y[:, 2, 0] = 0, torch.tensor([torch.nan, 1, 0])

    def everything(network, x, y):
        logits = network(x)
        losses = simcc_losses(logits, y, k=2, sigma=2)
        grads = torch.autograd.grad(losses.mean(), list(network.parameters()))
        return losses, decode(flip_merge(logits, logits.roll(1, 0), MIRRORED)), *grads

    expected = everything(network, x[1], y[1])
    network = build("simcc_resnet8", classes=5, seed=0).double().cuda()
    static = x[0].cuda(), y[0].cuda()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        everything(network, *static)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = everything(network, *static)
    for place, value in zip(static, (x[1], y[1]), strict=True):
        place.copy_(value)
    graph.replay()
    for one, other in zip(outputs, expected, strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=1e-6, atol=1e-6)


def test_autocast_reaches_the_backbone_and_not_the_head():
    network, seen = build("simcc_resnet8", classes=5, seed=0).cuda(), []
    network.backbone.stages[-1][-1].conv2.register_forward_hook(lambda module, x, out: seen.append(out.dtype))
    y = 64 * torch.rand(4, 5, 3).cuda()
    with torch.autocast("cuda", torch.bfloat16):
        logits = network(torch.randn(4, 3, 64, 64).cuda())
        losses, places = simcc_losses(logits, y), decode(flip_merge(logits, logits, MIRRORED))
    assert seen == [torch.bfloat16]
    assert logits.dtype == losses.dtype == places.dtype == torch.float32  # in bf16, several bins would be the largest
    torch.testing.assert_close(losses, simcc_losses(logits, y))
