"""Random numbers in the passes of a step on a CUDA device: plain steps and captured steps."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import bsam
from bsam.core.schedule import LR_SEEN

pytestmark = pytest.mark.gpu


class Noisy(nn.Module):
    """Dropout and noise on the input: two kinds of draws."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 10))

    def forward(self, x):
        return self.layers(x + 0.1 * torch.randn_like(x))


def network():
    torch.manual_seed(0)
    return Noisy().cuda()


def batch():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(128, 32, generator=generator).cuda(), torch.randint(0, 10, (128,), generator=generator).cuda()


def sgd(model, lr=0.05, **options):
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, **options)


def pass_gradients(model, passes):
    """Record the gradient of the last layer in every pass, also in replays of a graph."""
    weight = model.layers[3].weight
    buffers, calls = [torch.zeros_like(weight) for _ in range(passes)], []

    def note(g):
        buffers[len(calls) % passes].copy_(g.detach())
        calls.append(1)

    weight.register_hook(note)
    return buffers


def loss_of(model, x, y):
    return lambda: F.cross_entropy(model(x), y)


def still(model, **options):
    """BSAM with radii of 0: all passes are at the same point and differ only in their random numbers."""
    return bsam.BSAM(sgd(model), model, rho_max=0.0, rho_min=0.0, **options)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_plain_steps_share_their_draws_without_waiting_for_the_device():
    model, (x, y) = network(), batch()
    optimizer, buffers = still(model), pass_gradients(model, 3)
    optimizer.step(loss_of(model, x, y))
    for _ in range(3):
        state = torch.cuda.get_rng_state()
        with torch.no_grad():
            model(x)
        after = torch.cuda.get_rng_state()
        torch.cuda.set_rng_state(state)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            optimizer.step(loss_of(model, x, y))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.equal(buffers[0], buffers[1])
        assert torch.equal(buffers[0], buffers[2])
        assert torch.equal(torch.cuda.get_rng_state(), after)


def test_without_it_each_plain_pass_draws_new_numbers():
    model, (x, y) = network(), batch()
    optimizer, buffers = still(model, same_draws=False), pass_gradients(model, 3)
    optimizer.step(loss_of(model, x, y))
    assert not torch.equal(buffers[0], buffers[1])
    assert optimizer.generators() == []


def captured(optimizer, closure, stream, *, register=True):
    graph = torch.cuda.CUDAGraph()
    if register:
        for generator in optimizer.generators():
            graph.register_generator_state(generator)
    with torch.cuda.graph(graph, stream=stream):
        loss = optimizer.step(closure)
    return graph, loss


@pytest.mark.parametrize("between", [False, True])
def test_a_captured_step_shares_its_draws_in_every_replay(between):
    """Also if other code draws from the generator between replays. Each replay draws new numbers."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        model, (x, y) = network(), batch()
        optimizer, buffers = still(model), pass_gradients(model, 3)
        for _ in range(3):
            optimizer.step(loss_of(model, x, y))
        graph, _ = captured(optimizer, loss_of(model, x, y), stream)
        seen = []
        for t in range(5):
            if t:
                if between:
                    torch.rand(7, device="cuda")
                optimizer.count_step()
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(buffers[0], buffers[1]), t
            assert torch.equal(buffers[0], buffers[2]), t
            seen.append(buffers[0].clone())
        assert not any(torch.equal(a, b) for i, a in enumerate(seen) for b in seen[:i])
    assert optimizer.t == 8


def test_a_captured_step_draws_what_a_plain_step_draws():
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        model, (x, y) = network(), batch()
        optimizer = bsam.BSAM(sgd(model), model)
        for _ in range(3):
            optimizer.step(loss_of(model, x, y))
        twin, twin_optimizer = copy.deepcopy((model, optimizer))
        state = torch.cuda.get_rng_state()
        graph, loss = captured(optimizer, loss_of(model, x, y), stream)
        losses = []
        for t in range(5):
            if t:
                optimizer.count_step()
            graph.replay()
            losses.append(loss.clone())
        after = torch.cuda.get_rng_state()
        torch.cuda.set_rng_state(state)
        expected = [twin_optimizer.step(loss_of(twin, x, y)).clone() for _ in range(5)]
        assert torch.equal(torch.cuda.get_rng_state(), after)
    torch.cuda.synchronize()
    torch.testing.assert_close(torch.stack(losses), torch.stack(expected), rtol=1e-5, atol=1e-6)
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_a_captured_step_without_generators_works_and_draws_again():
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        model, (x, y) = network(), batch()
        optimizer, buffers = still(model), pass_gradients(model, 3)
        for _ in range(3):
            optimizer.step(loss_of(model, x, y))
        graph, _ = captured(optimizer, loss_of(model, x, y), stream, register=False)
        graph.replay()
        torch.cuda.synchronize()
        assert not torch.equal(buffers[0], buffers[1])
        optimizer.count_step()
        optimizer.step(loss_of(model, x, y))  # later plain steps share their draws again
        assert torch.equal(buffers[0], buffers[1])


def test_a_captured_step_follows_the_largest_learning_rate():
    """The learning rate on the device rises; the graph records its maximum, and the radius follows."""
    stream = torch.cuda.Stream()
    rates = [0.01, 0.04, 0.08, 0.05, 0.02]
    with torch.cuda.stream(stream):
        model, (x, y) = network(), batch()
        lr = torch.tensor(0.02, device="cuda")
        optimizer = bsam.BSAM(sgd(model, lr, fused=True), model, rho_min=0.1)  # other kernels read lr on the host
        for _ in range(3):
            optimizer.step(loss_of(model, x, y))
        graph, _ = captured(optimizer, loss_of(model, x, y), stream)
        (group,), largest = optimizer.param_groups, 0.02
        for rate in rates:
            lr.fill_(rate)
            graph.replay()
            largest = max(largest, rate)
            assert float(group[LR_SEEN]) == pytest.approx(largest)
            assert float(optimizer.radius(group, "rho_min")) == pytest.approx(0.1 * rate / largest, rel=1e-5)
