"""Properties of BSAM from the paper, beyond equality with the transcription."""

from __future__ import annotations

import contextlib
import math
from copy import deepcopy

import pytest
import torch

import bsam
from bsam.core.schedule import follow_lr
from helpers import assert_close, detached, flat, same, sgd


class Quadratic(torch.nn.Module):
    """L = w'Aw/2; records the gradient of every pass."""

    def __init__(self, a, start):
        super().__init__()
        self.a = torch.diag(torch.tensor(a, dtype=torch.float64))
        self.w = torch.nn.Parameter(torch.tensor(start, dtype=torch.float64))
        self.gradients = []

    def loss(self):
        self.gradients.append((self.a @ self.w).detach().clone())
        return 0.5 * self.w @ self.a @ self.w


def direction(model, **arguments):
    optimizer = bsam.BSAM(torch.optim.SGD(model.parameters(), lr=0.1), model, **arguments)
    optimizer.backward(model.loss)
    return model.w.grad.clone(), model.gradients


@pytest.mark.parametrize("passes", [2, 3])
def test_on_a_quadratic_along_an_eigenvector_d_is_g(passes):
    d, (g, *_) = direction(Quadratic([1.0, 4.0], [0.0, 2.0]), passes=passes)
    torch.testing.assert_close(d, g, rtol=1e-14, atol=0)


@pytest.mark.parametrize("passes", [2, 3])
def test_as_rho_min_vanishes_d_is_not_sams_gradient(passes):
    d, (g, g_max, *_) = direction(Quadratic([1.0, 4.0], [3.0, 2.0]), rho_max=0.5, rho_min=0.0, passes=passes)
    expected = g_max + (1 - g_max.norm() / g.norm()) * g
    torch.testing.assert_close(d, expected, rtol=1e-12, atol=0)
    assert (d - g_max).norm() > 0.1


def test_near_a_minimum_a_fixed_rho_min_turns_g_min_around():
    _, (g, _, g_min) = direction(Quadratic([1.0, 4.0], [1e-4, 1e-4]), rho_min=0.05, rho_min_floor=0.05)
    assert torch.nn.functional.cosine_similarity(g, g_min, dim=0) < -0.95


def test_two_passes_agree_with_three_to_first_order(problem):
    def gap(radius):
        ends = []
        for passes in (2, 3):
            copy = problem.clone()
            optimizer = bsam.BSAM(
                torch.optim.SGD(copy.model.parameters(), lr=0.1),
                copy.model,
                rho_max=radius,
                rho_min=radius,
                passes=passes,
            )
            optimizer.backward(copy.loss)
            ends.append(flat(p.grad for p in copy.model.parameters()))
        return float((ends[0] - ends[1]).norm())

    assert gap(0.01) < gap(0.02) / 3  # about a quarter, as the error is quadratic
    assert gap(0.02) > 0


def test_a_vanishing_g_min():
    model = Quadratic([1.0, 1.0], [0.03, 0.04])  # w - 0.05 g/|g| is the minimum itself
    d, (_, _, g_min) = direction(model, rho_max=0.05, rho_min=0.05)
    assert g_min.norm() < 1e-10
    assert torch.isfinite(d).all()


def test_rho_min_follows_the_learning_rate():
    for lr, expected in [(0.1, 0.05), (0.05, 0.03), (0.0, 0.01), (0.4, 0.05), (-1.0, 0.01)]:
        assert math.isclose(follow_lr(lr, top=0.05, floor=0.01, lr_max=0.1, lr_min=0.0), expected, rel_tol=1e-12)
    assert follow_lr(0.0, top=0.05, floor=0.01, lr_max=0.0, lr_min=0.0) == 0.01  # built with learning rate 0 ...
    assert follow_lr(0.2, top=0.05, floor=0.01, lr_max=0.0, lr_min=0.0) == 0.05  # ... which a scheduler raised
    for lr, expected in [(0.4, 0.05), (-1.0, 0.01)]:
        clamped = follow_lr(torch.tensor(lr), top=0.05, floor=0.01, lr_max=0.1, lr_min=0.0)
        assert math.isclose(clamped.item(), expected, rel_tol=1e-6)
    on_device = follow_lr(torch.tensor(0.05), top=0.05, floor=0.01, lr_max=0.1, lr_min=0.0)
    assert isinstance(on_device, torch.Tensor)
    assert math.isclose(on_device.item(), 0.03, rel_tol=1e-6)


@pytest.mark.parametrize("start_from_min", [True, False])
def test_gradients_cleared_by_the_network_move_nothing(plain, start_from_min):
    """The optimizer is not told of ``model.zero_grad()``, with which loops skip a batch whose loss is NaN."""
    base = torch.optim.SGD(plain.model.parameters(), lr=0.1)
    optimizer, before = bsam.BSAM(base, plain.model, start_from_min=start_from_min), plain.weights()
    optimizer.backward(plain.loss)
    plain.model.zero_grad()
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, plain.weights(), strict=True))
    optimizer.step(plain.loss)
    assert not any(torch.equal(a, b) for a, b in zip(before, plain.weights(), strict=True))


def test_start_from_min_averages_over_accumulated_calls(plain):
    """Two calls on the same batch start from the same point as one call."""
    once, twice = plain.clone(), plain.clone()
    for copy, calls in ((once, 1), (twice, 2)):
        optimizer = bsam.BSAM(torch.optim.SGD(copy.model.parameters(), lr=0.1), copy.model, start_from_min=True)
        for _ in range(calls):
            optimizer.backward(lambda: copy.loss() / calls)
        optimizer.step()
    assert_close(once.weights(), twice.weights(), atol=1e-13)


# every: the part across the gradient, computed every k-th step.


@pytest.mark.parametrize("passes", [2, 3])
def test_every_reuses_the_part_across_the_gradient(plain, passes):
    """Against plain BSAM and autograd: d = g + |g| / |g_0| v_0, where v_0 is BSAM's direction at step 0 across g_0."""
    params, radii = list(plain.model.parameters()), {"rho_max": 0.2, "rho_min": 0.1, "lr_max": 0.1}
    optimizer = bsam.BSAM(sgd(params), plain.model, passes=passes, every=3, **radii)
    across, counted = None, []
    for t in range(7):
        optimizer.zero_grad()
        g = flat(torch.autograd.grad(plain.loss(), params))
        if t % 3 == 0:
            algorithm = bsam.BSAM(sgd(params), plain.model, passes=passes, **radii)
            algorithm.backward(plain.loss)
            expected = flat(p.grad for p in params)
            algorithm.zero_grad()
            across = (expected - (expected @ g) / (g @ g) * g) / g.norm()
        else:
            expected = g + g.norm() * across
        calls = []
        optimizer.backward(lambda calls=calls: calls.append(1) or plain.loss())
        torch.testing.assert_close(flat(p.grad for p in params), expected, rtol=1e-10, atol=1e-12)
        assert optimizer.step_kind() == (t % 3 == 0)
        optimizer.step()
        counted.append(len(calls))
    assert counted == [passes, 1, 1, passes, 1, 1, passes]
    assert optimizer.passes == bsam.BSAM.passes_with({"passes": passes, "every": 3}) == 1 + (passes - 1) / 3


def test_every_continues_from_a_state_dict(plain):
    def new(problem):
        return bsam.BSAM(sgd(problem.model.parameters()), problem.model, passes=2, every=3)

    other = plain.clone()
    optimizer, resumed = new(plain), new(other)
    for _ in range(4):
        optimizer.step(plain.loss)
    other.model.load_state_dict(plain.model.state_dict())
    resumed.load_state_dict(deepcopy(optimizer.state_dict()))
    for _ in range(4):
        optimizer.step(plain.loss)
        resumed.step(other.loss)
    assert torch.equal(flat(plain.weights()), flat(other.weights()))


def test_every_cannot_start_from_the_point_downhill(plain):
    with pytest.raises(bsam.BsamError, match="start_from_min"):
        bsam.BSAM(sgd(plain.model.parameters()), plain.model, every=2, start_from_min=True)


# Two passes.


class Fixed(torch.autograd.Function):
    """Has the gradient ``g`` at w, and ``g_max`` elsewhere."""

    @staticmethod
    def forward(ctx, w, start, g, g_max):
        ctx.save_for_backward(g if torch.equal(w, start) else g_max)
        return w.sum()

    @staticmethod
    def backward(ctx, grad):
        (gradient,) = ctx.saved_tensors
        return gradient * grad, None, None, None


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    ("remains", "n"), [*((share, 10_000) for share in (1.0, 0.1, 0.02, 1e-3, 0.0)), (0.3, 2_359_296), (0.02, 2_359_296)]
)
def test_two_passes_lose_few_digits_where_g_min_nearly_vanishes(remains, n, device):
    """In float32 against float64, with |g_min| down to nothing: g_min = 2 g - g_max is ``remains`` of g, rotated."""
    generator = torch.Generator().manual_seed(0)
    g, other = torch.randn(2, n, generator=generator, dtype=torch.float64)
    other -= (other @ g) / (g @ g) * g
    g_min = remains * other * (g.norm() / other.norm())
    g_max = 2 * g - g_min
    expected = g + g_max - (g_max.norm() / g_min.norm() * g_min if remains else 0)
    w = torch.nn.Parameter(torch.zeros(n, device=device))
    start = w.detach().clone()
    optimizer = bsam.BSAM(torch.optim.SGD([w], lr=0.1), None, rho_max=0.1, rho_min=0.1, passes=2)
    optimizer.backward(lambda: Fixed.apply(w, start, g.float().to(device), g_max.float().to(device)))
    error = float((w.grad.cpu().double() - expected).norm() / expected.norm())
    assert error < min(2e-6 / remains**2 if remains else 1.0, 0.5)
    assert w.grad.cpu().double().norm() < 1.05 * (g + g_max).norm() + g_max.norm()


@pytest.mark.parametrize("lr", [0.05, torch.tensor(0.05)], ids=["number", "tensor"])
@pytest.mark.parametrize("split", [False, True])
def test_a_group_that_is_not_perturbed_is_extrapolated_with_the_others(plain, lr, split):
    """Its gradient changes as the others move: with two passes the error falls with the square of the radii."""
    first, second, third = (list(layer.parameters()) for layer in plain.model if isinstance(layer, torch.nn.Linear))
    others = [second, third] if split else [second + third]
    directions = {}
    for rho in (0.02, 0.01):
        for passes in (2, 3):
            groups = [{"params": first, "perturb": False}, *({"params": params, "lr": lr} for params in others)]
            optimizer = bsam.BSAM(sgd(groups), plain.model, rho_max=rho, rho_min=rho, passes=passes)
            optimizer.backward(plain.loss)
            directions[rho, passes] = flat(p.grad for p in plain.model.parameters())
            optimizer.zero_grad()
    large, small = (float((directions[rho, 2] - directions[rho, 3]).norm()) for rho in (0.02, 0.01))
    assert large / small == pytest.approx(4, rel=0.15)


@pytest.mark.parametrize("radii", [[(0.1, 0.05), (0.04, 0.06)], [(0.0, 0.05), (0.0, 0.05)], [(0.1, 0.1), (0.0, 0.1)]])
def test_two_passes_need_one_ratio_of_radii(plain, radii):
    """If groups differ in ``rho_min / rho_max``, one gradient does not determine the other: the step takes three."""
    first, *others = plain.model.children()
    calls, directions = [], []
    for passes in (2, 3):
        groups = [
            {"params": [p for m in modules for p in m.parameters()], "rho_max": a, "rho_min": b}
            for modules, (a, b) in zip([[first], others], radii, strict=True)
        ]
        optimizer = bsam.BSAM(sgd(groups), plain.model, passes=passes)
        with pytest.warns(UserWarning, match="three passes") if passes == 2 else contextlib.nullcontext():
            optimizer.backward(lambda: calls.append(passes) or plain.loss())
        directions.append(detached(p.grad for p in plain.model.parameters()))
        optimizer.zero_grad()
    assert same(*directions)
    assert calls == [2, 2, 2, 3, 3, 3]


def test_two_passes_with_equal_ratios_of_other_radii(plain):
    """Radii that differ by a factor keep the second pass, and the direction is BSAM's to first order."""
    first, *others = plain.model.children()
    directions = {}
    for rho in (0.02, 0.01):
        for passes in (2, 3):
            groups = [
                {"params": [p for m in modules for p in m.parameters()], "rho_max": a * rho, "rho_min": 3 * a * rho}
                for modules, a in (([first], 1.0), (others, 0.3))
            ]
            calls = []
            optimizer = bsam.BSAM(sgd(groups), plain.model, passes=passes)
            optimizer.backward(lambda: calls.append(1) or plain.loss())
            assert len(calls) == passes
            directions[rho, passes] = flat(p.grad for p in plain.model.parameters())
            optimizer.zero_grad()
    large, small = (float((directions[rho, 2] - directions[rho, 3]).norm()) for rho in (0.02, 0.01))
    assert large / small == pytest.approx(4, rel=0.15)


def test_state_dicts_between_different_every(plain):
    """A vector that the loading optimizer does not remember is dropped; later it is not taken up again."""

    def new(every):
        return bsam.BSAM(sgd(plain.model.parameters()), plain.model, passes=2, every=every)

    fifth, each, again = new(5), new(1), new(5)
    for _ in range(2):
        fifth.step(plain.loss)
    assert "orthogonal" in fifth.state_dict()["state"][0]
    each.load_state_dict(deepcopy(fifth.state_dict()))
    each.step(plain.loss)
    assert "orthogonal" not in each.state_dict()["state"][0]
    again.load_state_dict(deepcopy(each.state_dict()))
    assert again.recall("orthogonal") is None
    again.step(plain.loss)
    sam = bsam.SAM(sgd(plain.model.parameters()), plain.model)
    with pytest.warns(UserWarning, match="BSAM"):
        sam.load_state_dict(deepcopy(again.state_dict()))
    assert all(set(state) == {"momentum_buffer"} for state in sam.base.state.values())
