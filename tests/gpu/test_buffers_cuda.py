"""Buffers that every pass updates, in eager, compiled and captured steps on a CUDA device."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import bsam

pytestmark = pytest.mark.gpu


class Average(nn.Module):
    """Subtracts a moving average of its inputs."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(0.1 * x.mean(0))
        return x - self.mean


LAYERS = {
    "batch norm": lambda: nn.BatchNorm1d(8),
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)),
    "average": Average,
}


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def task(name):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), LAYERS[name](), nn.Tanh(), nn.Linear(8, 1)).cuda()
    return model, torch.randn(16, 4, device="cuda")


def assert_same(model, other, tolerance):
    for (name, a), (_, b) in zip(model.state_dict().items(), other.state_dict().items(), strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.parametrize("name", LAYERS)
def test_sam_without_a_radius_equals_its_base(name):
    (model, x), (other, _) = task(name), task(name)
    optimizer, base = bsam.SAM(sgd(model), model, rho=0.0), sgd(other)
    for _ in range(5):
        optimizer.step(lambda: model(x).square().mean())
        base.zero_grad()
        other(x).square().mean().backward()
        base.step()
    assert_same(model, other, 0)


@pytest.mark.filterwarnings("default")  # importing inductor warns
@pytest.mark.parametrize("name", LAYERS)
def test_a_compiled_network_equals_the_eager_one(name):
    (model, x), (other, _) = task(name), task(name)
    compiled = torch.compile(model)
    optimizer, eager = bsam.BSAM(sgd(model), compiled), bsam.BSAM(sgd(other), other)
    for _ in range(5):
        optimizer.step(lambda: compiled(x).square().mean())
        eager.step(lambda: other(x).square().mean())
    assert_same(model, other, 1e-5)


@pytest.mark.parametrize("name", LAYERS)
def test_a_captured_step_moves_buffers_once(name):
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        model, x = task(name)
        optimizer = bsam.BSAM(sgd(model), model, rho_max=0.3, rho_min=0.2)
        for _ in range(3):
            optimizer.step(lambda: model(x).square().mean())
        twin, eager = copy.deepcopy((model, optimizer))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            optimizer.step(lambda: model(x).square().mean())
        for _ in range(5):
            graph.replay()
            eager.step(lambda: twin(x).square().mean())
    torch.cuda.synchronize()
    assert_same(model, twin, 1e-6)


def test_check_changes_nothing_on_the_device():
    model, x = task("batch norm")
    optimizer = bsam.BSAM(sgd(model), model)
    before, generator = copy.deepcopy(model.state_dict()), torch.cuda.get_rng_state()
    assert optimizer.check(lambda: nn.functional.dropout(model(x), 0.5).square().mean()) == []
    assert torch.equal(generator, torch.cuda.get_rng_state())
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert optimizer.check(lambda: model(x * torch.rand(()).item()).square().mean()) == []  # drawn on the CPU
    batches = iter(torch.randn(2, 16, 4, device="cuda"))
    assert len(optimizer.check(lambda: model(next(batches)).square().mean())) == 1
