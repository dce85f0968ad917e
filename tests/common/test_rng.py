"""All passes of a step see the same random draws, and the generators go on as after one pass."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import bsam
from bsam.flatness import Probe
from bsam.methods import METHODS
from helpers import assert_close, flat, same, sgd


class Noisy(nn.Module):
    """Dropout and noise on the input: two kinds of draws."""

    def __init__(self, dropout=0.3, noise=0.1):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Dropout(dropout), nn.Linear(12, 3)).double()
        self.noise = noise

    def forward(self, x):
        return self.layers(x + self.noise * torch.randn_like(x))


@pytest.fixture
def noisy(problem):
    torch.manual_seed(1)
    return type(problem)(Noisy(), problem.x, problem.y)


def gradients(model):
    """A list that gathers the gradient of each pass, all parameters in one vector."""
    found, parts = [], []
    params = list(model.parameters())

    def gather(g):
        parts.append(g.detach().flatten().clone())
        if len(parts) == len(params):
            found.append(torch.cat(parts))
            parts.clear()

    for p in params:
        p.register_hook(gather)
    return found


# With a radius of zero, and with settings that make a second pass in every step, on all samples and weights.
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
    """Bit for bit, and it is the gradient of a plain pass; the generator goes on as after that pass, too."""
    optimizer, found = without_radius(name, noisy), gradients(noisy.model)
    closure = noisy.losses if name in ("esam", "ksam") else noisy.loss
    for _ in range(3):
        state = torch.get_rng_state()
        expected = torch.autograd.grad(noisy.loss(), list(noisy.model.parameters()))
        after = torch.get_rng_state()
        torch.set_rng_state(state)
        found.clear()
        optimizer.step(closure)
        assert found
        for g in found:
            plain = flat(expected)  # hooks fire in the order of the backward pass
            torch.testing.assert_close(g.sort().values, plain.sort().values, rtol=1e-12, atol=1e-15)
            assert torch.equal(g, found[0])
        assert torch.equal(torch.get_rng_state(), after)


def test_without_it_each_pass_draws_on_its_own(noisy):
    optimizer, found = without_radius("bsam", noisy, same_draws=False), gradients(noisy.model)
    state = torch.get_rng_state()
    for _ in range(3):
        noisy.loss()
    after = torch.get_rng_state()
    torch.set_rng_state(state)
    optimizer.step(noisy.loss)
    assert len(found) == 3
    assert not any(torch.equal(a, b) for a, b in itertools.pairwise(found))
    assert torch.equal(torch.get_rng_state(), after)
    for option in ("same_draws", "m_sharpness"):
        with pytest.raises(bsam.BsamError, match=f"{option} must be True or False, got 1"):
            without_radius("bsam", noisy, **{option: 1})


def test_training_goes_the_way_of_the_algorithm_with_one_function_a_step(noisy):
    """Against SAM by hand, which sets the generator back before its second pass."""
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


@pytest.mark.parametrize("options", [{"dropout": 0.3, "noise": 0.0}, {"dropout": 0.0, "noise": 0.3}])
def test_the_noise_of_the_direction_falls_to_that_of_the_gradient(problem, options):
    """Spread over length, of many draws at one point: BSAM's direction with one draw and with three; the gradient."""
    torch.manual_seed(2)
    noisy = type(problem)(Noisy(**options), problem.x, problem.y)

    def spread(directions):
        stacked = torch.stack(directions)
        return float(stacked.std(0).norm() / stacked.mean(0).norm())

    def directions(**own):
        optimizer, found = bsam.BSAM(sgd(noisy.model.parameters()), noisy.model, **own), []
        for _ in range(100):
            optimizer.zero_grad()
            optimizer.backward(noisy.loss)
            found.append(flat(p.grad for p in noisy.model.parameters()))
        return found

    params = list(noisy.model.parameters())
    plain = [torch.cat([t.flatten() for t in torch.autograd.grad(noisy.loss(), params)]) for _ in range(100)]
    one, apart, gradient = spread(directions()), spread(directions(same_draws=False)), spread(plain)
    assert one < 1.25 * gradient
    assert apart > 1.4 * gradient


def test_a_pass_that_raises_leaves_the_generator_after_the_first_pass(noisy):
    optimizer = bsam.BSAM(sgd(noisy.model.parameters()), noisy.model)
    state = torch.get_rng_state()
    noisy.loss()
    after = torch.get_rng_state()
    for failing in (2, 3):
        torch.set_rng_state(state)
        calls = 0

        def closure():
            nonlocal calls
            calls += 1
            loss = noisy.loss()
            if calls == failing:
                raise KeyboardInterrupt
            return loss

        with pytest.raises(KeyboardInterrupt):
            optimizer.backward(closure)
        assert torch.equal(torch.get_rng_state(), after)


def test_micro_batches_and_accumulation_draw_as_plain_passes_do(noisy):
    """Each micro-batch has its own draws, the same in every pass; the next call goes on after one pass of this one."""
    found = gradients(noisy.model)
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
    found.clear()
    optimizer.backward(micro_batches)
    optimizer.backward(micro_batches)
    assert torch.equal(torch.get_rng_state(), after)
    assert len(found) == 12
    sizes = [float(flat(g).norm()) for g in expected]
    assert [float(g.norm()) for g in found] == pytest.approx(sizes[:2] * 3 + sizes[2:] * 3, rel=1e-12)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers_draw_alike(noisy, reentrant):
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


def test_resume_is_bit_identical(noisy):
    second = noisy.clone()
    optimizer = bsam.BSAM(sgd(noisy.model.parameters()), noisy.model)
    for t in range(6):
        if t == 3:
            saved = copy.deepcopy((noisy.model.state_dict(), optimizer.state_dict())), torch.get_rng_state()
        optimizer.step(noisy.loss)
    (weights, state), generator = saved
    second.model.load_state_dict(weights)
    optimizer = bsam.BSAM(sgd(second.model.parameters()), second.model)
    optimizer.load_state_dict(state)
    torch.set_rng_state(generator)
    for _ in range(3):
        optimizer.step(second.loss)
    assert same(noisy.weights(), second.weights())


def test_a_probe_reads_the_function_of_the_step_and_disturbs_nothing(noisy):
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
                p.sub_(0.1 * t / length)  # downhill, where SAM never goes and the probe does
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
def test_passes_that_draw_less_leave_the_generator_after_the_first(noisy, method):
    """They look at a part of the batch, so that they draw fewer numbers than the first pass."""
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
