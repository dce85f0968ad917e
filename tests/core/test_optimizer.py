"""Groups, base optimizers, precision and models of every kind; and how backward and step work together."""

from __future__ import annotations

import contextlib
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import bsam
from bsam.core.schedule import top_lr
from helpers import assert_close, detached, flat, same, sgd


def recorded_points(model, optimizer, loss):
    """The weights at which the closure was called in one backward."""
    points = []

    def closure():
        points.append(detached(model.parameters()))
        return loss()

    optimizer.backward(closure)
    return points


def test_each_group_has_its_own_radius(plain):
    first, rest = list(plain.model[0].parameters()), list(plain.model[2:].parameters())
    base = torch.optim.SGD([{"params": first, "rho_max": 0.2, "lr": 0.3}, {"params": rest}], lr=0.1)
    optimizer = bsam.BSAM(base, plain.model, rho_max=0.05, rho_min=0.04, rho_min_floor=0.04)
    assert [g["rho_max"] for g in optimizer.param_groups] == [0.2, 0.05]
    assert [top_lr(g) for g in optimizer.param_groups] == [0.3, 0.1]
    g = torch.autograd.grad(plain.loss(), list(plain.model.parameters()))
    length = flat(g).norm()
    w, at_max, at_min = recorded_points(plain.model, optimizer, plain.loss)
    for i, radius in enumerate([0.2, 0.2, 0.05, 0.05, 0.05, 0.05]):
        torch.testing.assert_close(at_max[i] - w[i], radius * g[i] / length, rtol=1e-9, atol=1e-14)
        torch.testing.assert_close(at_min[i] - w[i], -0.04 * g[i] / length, rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize(
    ("cls", "radii"),
    [
        (bsam.BSAM, {"rho_max": 0.2, "rho_min": 0.2, "rho_min_floor": 0.1}),
        (partial(bsam.BSAM, passes=2, start_from_min=True), {}),
        (bsam.GSAM, {"rho": 0.2, "rho_floor": 0.1}),
        (bsam.GAM, {}),
        (bsam.ASAM, {}),
    ],
)
def test_a_group_that_is_not_perturbed(plain, cls, radii):
    """It stays at w in every pass and takes its step; the other group moves as usual."""
    first, rest = list(plain.model[0].parameters()), list(plain.model[2:].parameters())
    other = plain.clone()
    base = torch.optim.SGD([{"params": first, "perturb": False}, {"params": rest, "perturb": True}], lr=0.1)
    optimizer = cls(base, plain.model, **radii)
    w, *perturbed = recorded_points(plain.model, optimizer, plain.loss)
    assert all(same(point[:2], w[:2]) for point in perturbed)
    _, moved, *_ = recorded_points(other.model, cls(sgd(other.model.parameters()), other.model, **radii), other.loss)
    assert same(perturbed[0][2:], moved[2:])
    optimizer.step()
    assert not any(torch.equal(p, before) for p, before in zip(plain.model.parameters(), w, strict=True))
    resumed = cls(sgd([{"params": first}, {"params": rest}]), plain.model, **radii)
    resumed.load_state_dict(optimizer.state_dict())
    assert [group["perturb"] for group in resumed.param_groups] == [False, True]


def test_groups_with_equal_radii_are_one_group(plain):
    other = plain.clone()
    halves = [{"params": plain.model[0].parameters()}, {"params": plain.model[2:].parameters(), "rho_max": 0.05}]
    split = bsam.BSAM(sgd(halves), plain.model, passes=2)
    whole = bsam.BSAM(sgd(other.model.parameters()), other.model, passes=2)
    for _ in range(3):
        split.step(plain.loss)
        whole.step(other.loss)
    assert_close(plain.weights(), other.weights(), atol=1e-14)


SGD = partial(torch.optim.SGD, momentum=0.9)


@pytest.mark.parametrize(
    "make_base",
    [
        *(partial(SGD, **{option: True}) for option in ("nesterov", "foreach", "fused")),
        partial(SGD, foreach=False),
        *(torch.optim.Adam, torch.optim.RMSprop, torch.optim.NAdam, torch.optim.Adagrad, torch.optim.Adafactor),
    ],
)
def test_the_base_steps_on_the_direction(problem, make_base):
    """A base that gets the direction by hand moves the weights as the wrapped base does."""
    other = problem.clone()
    optimizer = bsam.BSAM(make_base(problem.model.parameters(), lr=0.01), problem.model)
    base = make_base(other.model.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        optimizer.backward(problem.loss)
        for p, q in zip(problem.model.parameters(), other.model.parameters(), strict=True):
            q.grad = p.grad.clone()
        optimizer.step()
        base.step()
        assert same(problem.weights(), other.weights())


def test_a_base_that_raises_leaves_the_weights(problem):
    class Failing(torch.optim.SGD):
        def step(self, closure=None):
            raise MemoryError

    optimizer = bsam.BSAM(Failing(problem.model.parameters(), lr=0.1), problem.model, start_from_min=True)
    before = problem.weights()
    with pytest.raises(MemoryError):
        optimizer.step(problem.loss)
    assert same(before, problem.weights())


@pytest.mark.parametrize("where", ["inside the closure", "around the step"])
def test_bf16_autocast(where):
    """Autocast around the step caches casts of the weights: a pass must not use those of another point."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
    x, y = torch.randn(32, 8), torch.randint(0, 3, (32,))
    optimizer = bsam.BSAM(sgd(model.parameters()), model, rho_max=2.0, rho_min=2.0)
    outputs, autocast = [], torch.autocast("cpu", dtype=torch.bfloat16)

    def closure():
        with autocast if where == "inside the closure" else contextlib.nullcontext():
            out = model(x)
        outputs.append(out.detach().clone())
        return F.cross_entropy(out, y)

    with autocast if where == "around the step" else contextlib.nullcontext():
        before = model(x).detach()
        optimizer.backward(closure)
        after = model(x).detach()
    assert outputs[0].dtype == torch.bfloat16
    assert not torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])
    assert torch.equal(before, after)
    assert model[0].weight.grad.dtype == torch.float32


def test_bf16_parameters():
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)).bfloat16()
    x, y = torch.randn(32, 8).bfloat16(), torch.randint(0, 3, (32,))
    optimizer = bsam.BSAM(sgd(model.parameters()), model, rho_max=1.0, rho_min=1.0)

    def loss():
        return F.cross_entropy(model(x), y)

    w, at_max, _ = recorded_points(model, optimizer, loss)
    moved = torch.cat([(a.float() - b.float()).flatten() for a, b in zip(at_max, w, strict=True)])
    assert float(moved.norm()) == pytest.approx(1.0, rel=0.02)
    assert model[0].weight.grad.dtype == torch.bfloat16
    losses = [float(optimizer.step(loss)) for _ in range(10)]
    assert losses[-1] < losses[0]


def test_complex_parameters():
    """A complex parameter is the pair of its real and imaginary parts."""
    torch.manual_seed(1)
    start, target = torch.randn(6, dtype=torch.complex128), torch.randn(6, dtype=torch.complex128)
    z = nn.Parameter(start.clone())
    xy = nn.Parameter(torch.view_as_real(start).clone())

    def steps(parameter, loss):
        optimizer = bsam.BSAM(torch.optim.SGD([parameter], lr=1e-3, momentum=0.9), None, rho_max=0.3, rho_min=0.2)
        for _ in range(5):
            optimizer.step(loss)
        return parameter.detach()

    complex_end = steps(z, lambda: ((z - target).abs() ** 4).sum())
    real_end = steps(xy, lambda: ((torch.view_as_complex(xy) - target).abs() ** 4).sum())
    torch.testing.assert_close(torch.view_as_real(complex_end), real_end, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("enabled", "runs_backward"), [(True, True), (False, False)])
def test_scalers(problem, enabled, runs_backward):
    """A closure that runs backward scales the loss itself; a disabled scaler changes nothing."""
    other = problem.clone()
    ours, plain = (bsam.BSAM(sgd(p.model.parameters()), p.model) for p in (problem, other))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, enabled=enabled)

    def closure():
        loss = problem.loss()
        if runs_backward:
            scaler.scale(loss).backward()
        return loss

    for _ in range(3):
        ours.zero_grad()
        ours.backward(closure, scaler=scaler)
        scaler.step(ours)
        scaler.update()
        plain.step(other.loss)
    assert same(problem.weights(), other.weights())


class LowRank(nn.Module):
    """Like PEFT's LoRA layers: a frozen layer plus the product of two trainable thin matrices."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(2, layer.in_features, dtype=torch.float64) / 2)
        self.b = nn.Parameter(torch.randn(layer.out_features, 2, dtype=torch.float64) / 2)

    def forward(self, x):
        return self.layer(x) + x @ self.a.T @ self.b.T


def bsam_by_hand(params, loss, rho):
    """The direction of Algorithm 1, from plain gradients."""
    g = torch.autograd.grad(loss(), params)
    length = flat(g).norm()
    start, perturbed = detached(params), []
    for sign in (1, -1):
        with torch.no_grad():
            for p, t in zip(params, g, strict=True):
                p.add_(sign * rho * t / length)
        perturbed.append(torch.autograd.grad(loss(), params))
        with torch.no_grad():
            for p, w in zip(params, start, strict=True):
                p.copy_(w)
    g_max, g_min = perturbed
    ratio = flat(g_max).norm() / flat(g_min).norm()
    return [a + b - ratio * c for a, b, c in zip(g, g_max, g_min, strict=True)]


def adapted(model):
    model.requires_grad_(False)
    for i in (0, 2, 4):
        model[i] = LowRank(model[i])
    return model


def tied(model):
    model[0] = nn.Linear(6, 6).double()
    model[2] = model[0]
    model[4] = nn.Linear(6, 3).double()
    return model


class Checkpointed(nn.Module):
    def __init__(self, model, reentrant):
        super().__init__()
        self.model, self.reentrant = model, reentrant

    def forward(self, x):
        x = x.requires_grad_()  # the reentrant kind needs an input with a gradient
        for layer in self.model:
            x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


MODELS = {
    "adapters": adapted,
    "tied": tied,
    "checkpointed": lambda model: Checkpointed(model, False),
    "checkpointed, reentrant": lambda model: Checkpointed(model, True),
}


@pytest.mark.parametrize("name", sorted(MODELS))
def test_models_of_every_kind(plain, name):
    """Against plain gradients of the model without checkpoints, which has the same parameters."""
    model = MODELS[name](plain.model)
    x, y = plain.x.clone(), plain.y
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = bsam.BSAM(sgd(params), model, rho_max=0.1, rho_min=0.1)
    frozen = [p.detach().clone() for p in model.parameters() if not p.requires_grad]
    for _ in range(3):
        expected = bsam_by_hand(params, lambda: F.cross_entropy(plain.model(x), y), 0.1)
        optimizer.zero_grad()
        optimizer.backward(lambda: F.cross_entropy(model(x.clone()), y))
        for p, d in zip(params, expected, strict=True):
            torch.testing.assert_close(p.grad, d, rtol=1e-9, atol=1e-13)
        optimizer.step()
    assert same(frozen, [p.detach() for p in model.parameters() if not p.requires_grad])
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)


def test_a_step_under_no_grad(problem):
    other = problem.clone()
    ours, whole = (bsam.BSAM(sgd(p.model.parameters()), p.model) for p in (problem, other))
    with torch.no_grad():
        ours.step(problem.loss)
    whole.step(other.loss)
    assert same(problem.weights(), other.weights())


def test_a_parameter_that_only_the_first_pass_reaches(plain):
    extra = plain.model.extra = nn.Linear(6, 3).double()
    optimizer = bsam.BSAM(sgd(plain.model.parameters()), plain.model)
    calls = 0

    def closure():
        nonlocal calls
        calls += 1
        out = plain.model[:5](plain.x)
        return F.cross_entropy(out + extra(plain.x) if calls == 1 else out, plain.y)

    optimizer.backward(closure)
    first = extra.weight.grad.clone()
    assert first.abs().sum() > 0
    optimizer.backward(lambda: F.cross_entropy(plain.model[:5](plain.x), plain.y))
    assert torch.equal(extra.weight.grad, first)  # a later call that does not reach it
