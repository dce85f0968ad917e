"""Half precision, and parameters without gradient, on a GPU: nothing overflows, waits or is captured wrongly."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import bsam
from bsam.common.method_info import Need
from bsam.methods import METHODS

pytestmark = pytest.mark.gpu

OPTIMIZERS = {name: method for name, method in METHODS.items() if not method.is_loss} | {
    "aesam": partial(bsam.AESAM, total_steps=6, alpha=0.2),
    "bsam-2": partial(bsam.BSAM, passes=2),
    "bsam-adaptive": partial(bsam.BSAM, adaptive=True),
    "bsam-every": partial(bsam.BSAM, every=3),
    "bsam-released": partial(bsam.BSAM, start_from_min=True),
    "gam-paper": partial(bsam.GAM, form="paper"),
}
REMEMBERING = {
    "vasso": partial(bsam.VaSSO, theta=0.2),
    "friendly": bsam.FriendlySAM,
    "msam": partial(bsam.MSAM, rho=0.1),
}


class WithHead(nn.Module):
    """A network with an auxiliary head."""

    def __init__(self, dtype):
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to("cuda", dtype)
        self.head = nn.Linear(6, 3).to("cuda", dtype)
        self.x, self.y = torch.randn(16, 6).to("cuda", dtype), torch.randint(0, 3, (16,)).cuda()

    def loss(self, with_head=False):
        out = self.trunk(self.x)
        return F.cross_entropy((out + self.head(self.x) if with_head else out).float(), self.y)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("factor", [0.0, 1e-7, 1e-4])
@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_tiny_and_zero_gradients(name, factor, dtype):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to("cuda", dtype)
    x, y = torch.randn(16, 6).to("cuda", dtype), torch.randint(0, 3, (16,)).cuda()
    optimizer = OPTIMIZERS[name](torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), model)

    def closure(indices=slice(None)):
        outputs = model(x[indices])
        losses = factor * F.cross_entropy(outputs.float(), y[indices], reduction="none")
        if Need.OUTPUTS in optimizer.needs:
            return losses.mean(), outputs
        return losses if Need.PER_SAMPLE_LOSSES in optimizer.needs else losses.mean()

    before = [p.detach().clone() for p in model.parameters()]
    for _ in range(4):
        optimizer.step(closure)
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert factor > 0 or all(torch.equal(a, p) for a, p in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", REMEMBERING)
def test_captured_steps_with_a_head_that_they_do_not_use(name, dtype):
    """Eager steps use it, and the captured step does not: MSAM's restart is captured with it."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        model = WithHead(dtype)
        optimizer = REMEMBERING[name](torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), model)
        for t in range(4):
            optimizer.step(lambda t=t: model.loss(with_head=t != 2))
        twin, eager = copy.deepcopy((model, optimizer))
        graph = torch.cuda.CUDAGraph()
        optimizer.zero_grad()
        with torch.cuda.graph(graph, stream=stream):
            optimizer.step(model.loss)
        for _ in range(4):
            graph.replay()
            eager.step(twin.loss)
    torch.cuda.synchronize()
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        if "gradient_mean" in optimizer.vectors:
            mean = optimizer.state[p]["gradient_mean"]
            assert mean.dtype == torch.float32
            torch.testing.assert_close(mean, eager.state[q]["gradient_mean"])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", REMEMBERING)
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_a_step_with_other_parameters_does_not_wait(name, dtype):
    model = WithHead(dtype)
    optimizer = REMEMBERING[name](torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), model)
    for t in range(4):
        optimizer.step(lambda t=t: model.loss(with_head=t != 2))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for with_head in (True, False, False, True):
            optimizer.step(lambda w=with_head: model.loss(w))
    finally:
        torch.cuda.set_sync_debug_mode("default")
