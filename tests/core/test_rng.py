"""All passes of a step see the same random draws, and the generators continue as after one pass."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import bsam
from bsam.flatness import Probe
from bsam.methods import METHODS
from helpers import assert_close, flat, interrupted, same, sgd


class Noisy(nn.Module):
    """Dropout, and noise on the input."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Dropout(0.3), nn.Linear(12, 3)).double()

    def forward(self, x):
        return self.layers(x + 0.1 * torch.randn_like(x))


@pytest.fixture
def noisy(problem):
    torch.manual_seed(1)
    return type(problem)(Noisy(), problem.x, problem.y)


def recorded_gradients(model):
    """A list that collects the gradient of every pass, as one vector."""
    gradients, parts = [], []
    params = list(model.parameters())

    def collect(g):
        parts.append(g.detach().flatten().clone())
        if len(parts) == len(params):
            gradients.append(torch.cat(parts))
            parts.clear()

    for p in params:
        p.register_hook(collect)
    return gradients


# Settings with a second pass in every step, on all samples and weights.
WHOLE = {
    "looksam": {"k": 1},
    "aesam": {"total_steps": 9, "lambda_2": -1.0},
    "rst": {"p": 1.0},
    "esam": {"beta": 1.0, "gamma": 1.0},
}


def without_radius(name, problem, **options):
    optimizer = METHODS[name](sgd(problem.model.parameters()), problem.model, **WHOLE.get(name, {}), **options)
    (group,) = optimizer.param_groups
    group.update({key: 0.0 for key, value in group.items() if key.startswith("rho") and value is not None})
    return optimizer


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if not method.is_loss])
def test_passes_at_radius_zero_have_one_gradient(noisy, name):
    """Bit for bit; it is the gradient of a plain pass, and the generator continues as after that pass."""
    optimizer, gradients = without_radius(name, noisy), recorded_gradients(noisy.model)
    closures = {"esam": noisy.losses, "ksam": noisy.losses, "functional_sam": noisy.loss_and_outputs}
    closure = closures.get(name, noisy.loss)
    for _ in range(3):
        state = torch.get_rng_state()
        expected = torch.autograd.grad(noisy.loss(), list(noisy.model.parameters()))
        after = torch.get_rng_state()
        torch.set_rng_state(state)
        gradients.clear()
        optimizer.step(closure)
        assert gradients
        for g in gradients:
            plain = flat(expected)  # in another order: hooks run in the order of the backward pass
            torch.testing.assert_close(g.sort().values, plain.sort().values, rtol=1e-12, atol=1e-15)
            assert torch.equal(g, gradients[0])
        assert torch.equal(torch.get_rng_state(), after)


def test_without_same_draws_every_pass_draws_new_numbers(noisy):
    optimizer, gradients = without_radius("bsam", noisy, same_draws=False), recorded_gradients(noisy.model)
    state = torch.get_rng_state()
    for _ in range(3):
        noisy.loss()
    after = torch.get_rng_state()
    torch.set_rng_state(state)
    optimizer.step(noisy.loss)
    assert len(gradients) == 3
    assert not any(torch.equal(a, b) for a, b in itertools.pairwise(gradients))
    assert torch.equal(torch.get_rng_state(), after)


def test_sam_with_noise_equals_a_loop_that_resets_the_generator(noisy):
    other = noisy.clone()
    ours, base = bsam.SAM(sgd(noisy.model.parameters()), noisy.model, rho=0.1), sgd(other.model.parameters())
    torch.manual_seed(5)
    losses = [ours.step(noisy.loss) for _ in range(5)]
    torch.manual_seed(5)
    params = list(other.model.parameters())
    for loss in losses:
        state = torch.get_rng_state()
        first = other.loss()
        torch.testing.assert_close(first.detach(), loss, rtol=1e-12, atol=0)
        g = torch.autograd.grad(first, params)
        after = torch.get_rng_state()
        length = flat(g).norm()
        start = other.weights()
        with torch.no_grad():
            for p, t in zip(params, g, strict=True):
                p.add_(0.1 * t / length)
        torch.set_rng_state(state)
        d = torch.autograd.grad(other.loss(), params)
        torch.set_rng_state(after)
        with torch.no_grad():
            for p, w, t in zip(params, start, d, strict=True):
                p.copy_(w)
                p.grad = t
        base.step()
    assert_close(noisy.weights(), other.weights(), atol=1e-13)


def test_a_pass_that_raises_leaves_the_generator_after_the_first_pass(noisy):
    optimizer = bsam.BSAM(sgd(noisy.model.parameters()), noisy.model)
    state = torch.get_rng_state()
    noisy.loss()
    after = torch.get_rng_state()
    for failing in (2, 3):
        torch.set_rng_state(state)
        interrupt = interrupted(lambda: 0.0, failing)
        with pytest.raises(KeyboardInterrupt):
            optimizer.backward(lambda: noisy.loss() + interrupt())
        assert torch.equal(torch.get_rng_state(), after)


def test_micro_batches_and_accumulation_draw_as_plain_passes_do(noisy):
    """Micro-batches have different draws, repeated in every pass; the next call continues after one pass."""
    gradients = recorded_gradients(noisy.model)
    optimizer = bsam.BSAM(sgd(noisy.model.parameters()), noisy.model, rho_max=0.0, rho_min=0.0)
    halves = [(noisy.x[:12], noisy.y[:12]), (noisy.x[12:], noisy.y[12:])]

    def micro_batches():
        for x, y in halves:
            yield F.cross_entropy(noisy.model(x), y)

    state = torch.get_rng_state()
    params = list(noisy.model.parameters())
    expected = [torch.autograd.grad(F.cross_entropy(noisy.model(x), y), params) for _ in range(2) for x, y in halves]
    after = torch.get_rng_state()
    torch.set_rng_state(state)
    gradients.clear()
    optimizer.backward(micro_batches)
    optimizer.backward(micro_batches)
    assert torch.equal(torch.get_rng_state(), after)
    sizes = [float(flat(g).norm()) for g in expected]
    assert [float(g.norm()) for g in gradients] == pytest.approx(sizes[:2] * 3 + sizes[2:] * 3, rel=1e-12)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers_repeat_their_draws(noisy, reentrant):
    other = noisy.clone()
    x = noisy.x.clone().requires_grad_()

    def checkpointed():
        return F.cross_entropy(torch.utils.checkpoint.checkpoint(noisy.model, x, use_reentrant=reentrant), noisy.y)

    ours, whole = (bsam.BSAM(sgd(p.model.parameters()), p.model) for p in (noisy, other))
    state = torch.get_rng_state()
    for _ in range(3):
        ours.step(checkpointed)
    after = torch.get_rng_state()
    torch.set_rng_state(state)
    for _ in range(3):
        whole.step(other.loss)
    assert torch.equal(torch.get_rng_state(), after)
    assert same(noisy.weights(), other.weights())


def test_a_probe_repeats_the_draws_of_the_step(noisy):
    other = noisy.clone()
    ours, whole = (bsam.SAM(sgd(p.model.parameters()), p.model, rho=0.1) for p in (noisy, other))
    probe = Probe(every=1).attach(ours)
    torch.manual_seed(4)
    losses = [ours.step(noisy.loss) for _ in range(3)]
    after = torch.get_rng_state()
    torch.manual_seed(4)
    for loss, reading in zip(losses, probe, strict=True):
        params, state = list(other.model.parameters()), torch.get_rng_state()
        g = torch.autograd.grad(other.loss(), params)
        length, start = flat(g).norm(), other.weights()
        with torch.no_grad():
            for p, t in zip(params, g, strict=True):
                p.sub_(0.1 * t / length)  # downhill, where only the probe evaluates
            torch.set_rng_state(state)
            down = other.loss()
            for p, w in zip(params, start, strict=True):
                p.copy_(w)
        assert reading.min_sharpness == pytest.approx(float(loss - down), rel=1e-9)
        torch.set_rng_state(state)
        whole.step(other.loss)
    assert torch.equal(torch.get_rng_state(), after)
    assert same(noisy.weights(), other.weights())


@pytest.mark.parametrize("method", [lambda base, model: bsam.KSAM(base, model, k=5), bsam.ESAM], ids=["ksam", "esam"])
def test_later_passes_that_draw_fewer_numbers(noisy, method):
    """They evaluate a part of the batch; the generator still continues as after the first pass."""
    optimizer = method(sgd(noisy.model.parameters()), noisy.model)

    def closure(indices=slice(None)):
        return F.cross_entropy(noisy.model(noisy.x[indices]), noisy.y[indices], reduction="none")

    before = torch.get_rng_state()
    with torch.no_grad():
        noisy.model(noisy.x)
    after = torch.get_rng_state()
    torch.set_rng_state(before)
    optimizer.step(closure)
    assert torch.equal(torch.get_rng_state(), after)
