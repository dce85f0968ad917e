"""The laws that every method keeps, with SGD + momentum and with AdamW."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import bsam
from bsam.methods import METHODS

# Every method with its defaults, and the switches of BSAM as methods of their own.
VARIANTS: dict[str, Callable[..., Any]] = {name: method.cls for name, method in METHODS.items()} | {
    "bsam-2": lambda base, model, **own: bsam.BSAM(base, model, passes=2, **own),
    "bsam-released": lambda base, model, **own: bsam.BSAM(base, model, start_from_min=True, **own),
}
PASSES = {name: method.passes for name, method in METHODS.items()} | {"bsam-2": 2, "bsam-released": 3}
ZERO = {"sam": {"rho": 0.0}, "bsam": {"rho_max": 0.0, "rho_min": 0.0}}


@pytest.fixture(params=sorted(VARIANTS))
def method(request):
    return request.param


def build(method, problem, make_base, **arguments):
    return VARIANTS[method](make_base(problem.model.parameters()), problem.model, **arguments)


def same(a, b):
    return len(a) == len(b) and all(torch.equal(s, t) for s, t in zip(a, b, strict=True))


def close(a, b, atol=1e-12):
    return all(torch.allclose(s, t, rtol=0, atol=atol) for s, t in zip(a, b, strict=True))


def test_every_method_is_listed_once():
    assert len({m.cls for m in METHODS.values()}) == len(METHODS)
    assert all(issubclass(m.cls, torch.optim.Optimizer) and m.name == name for name, m in METHODS.items())


def test_lr_zero_leaves_the_weights_bit_identical(problem, method, make_base):
    optimizer = build(method, problem, make_base)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    before = problem.weights()
    for _ in range(3):
        optimizer.step(problem.loss)
    assert same(before, problem.weights())


def test_lr_zero_from_the_start(problem, method):
    optimizer = VARIANTS[method](torch.optim.SGD(problem.model.parameters(), lr=0.0, momentum=0.9), problem.model)
    before = problem.weights()
    optimizer.step(problem.loss)
    assert same(before, problem.weights())


def test_radius_zero_is_the_base_optimizer(problem, method, make_base):
    other = problem.clone()
    optimizer = build(method, problem, make_base, **ZERO[method.split("-")[0]])
    base = make_base(other.model.parameters())
    for _ in range(5):
        optimizer.step(problem.loss)
        base.zero_grad()
        other.loss().backward()
        base.step()
    assert same(problem.weights(), other.weights())
    assert same(problem.buffers(), other.buffers())


def test_batch_norm_moves_once_a_step(problem, method, make_base):
    expected = problem.clone()
    optimizer = build(method, problem, make_base)
    expected.loss()  # one forward pass at w
    optimizer.backward(problem.loss)
    assert same(problem.buffers(), expected.buffers())
    assert int(problem.model[1].num_batches_tracked) == 1
    assert problem.model[1].track_running_stats is True


def test_passes_are_as_promised(problem, method, make_base):
    forwards = []
    problem.model.register_forward_hook(lambda *_: forwards.append(1))
    backwards = []
    problem.model[0].weight.register_hook(lambda g: backwards.append(1))
    optimizer = build(method, problem, make_base)
    for _ in range(4):
        optimizer.step(problem.loss)
    assert len(forwards) == len(backwards) == 4 * PASSES[method]


def test_the_loss_at_w_is_returned(problem, method, make_base):
    optimizer = build(method, problem, make_base)
    expected = problem.clone().loss()
    loss = optimizer.step(problem.loss)
    assert torch.equal(loss, expected.detach())
    assert not loss.requires_grad


def test_resume_is_bit_identical(problem, method, make_base):
    def run(p, optimizer, scheduler, steps):
        for _ in range(steps):
            optimizer.step(p.loss)
            scheduler.step()

    def parts(p):
        optimizer = build(method, p, make_base)
        return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)

    whole = problem.clone()
    run(whole, *parts(whole), 12)
    first = problem.clone()
    optimizer, scheduler = parts(first)
    run(first, optimizer, scheduler, 5)
    file = io.BytesIO()
    torch.save({"model": first.model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    assert set(saved["optimizer"]) == {"state", "param_groups"}
    second = problem.clone()
    second.model.load_state_dict(saved["model"])
    optimizer, scheduler = parts(second)
    optimizer.load_state_dict(saved["optimizer"])
    scheduler.load_state_dict(saved["scheduler"])
    assert optimizer.t == 5
    run(second, optimizer, scheduler, 7)
    assert same(whole.weights(), second.weights())
    assert same(whole.buffers(), second.buffers())


@pytest.mark.parametrize(("sizes", "reduction"), [([6, 6, 6, 6], "mean"), ([5, 16, 3], "none")])
def test_yielded_micro_batches_equal_the_full_batch(plain, method, make_base, sizes, reduction):
    """Of equal size, by their means; of any size, by their samples."""
    other = plain.clone()

    def micro_batches():
        for x, y in zip(plain.x.split(sizes), plain.y.split(sizes), strict=True):
            yield nn.functional.cross_entropy(plain.model(x), y, reduction=reduction)

    ours, whole = build(method, plain, make_base), build(method, other, make_base)
    for _ in range(5):
        loss = ours.step(micro_batches)
        expected = whole.step(other.loss)
    assert close(plain.weights(), other.weights())
    assert torch.allclose(loss, expected, atol=1e-12)


def test_per_sample_losses_are_averaged(problem, method, make_base):
    other = problem.clone()
    ours, whole = build(method, problem, make_base), build(method, other, make_base)
    for _ in range(5):
        ours.step(lambda: nn.functional.cross_entropy(problem.model(problem.x), problem.y, reduction="none"))
        whole.step(other.loss)
    assert close(problem.weights(), other.weights())


def test_a_closure_may_run_backward_itself(problem, method, make_base):
    other = problem.clone()
    ours, whole = build(method, problem, make_base), build(method, other, make_base)

    def closure():
        ours.zero_grad()
        loss = problem.loss()
        loss.backward()
        return loss

    for _ in range(5):
        assert torch.equal(ours.step(closure), whole.step(other.loss))
    assert same(problem.weights(), other.weights())


def test_such_a_closure_may_return_a_number(problem, method, make_base):
    optimizer = build(method, problem, make_base)
    other = problem.clone()
    whole = build(method, other, make_base)

    def closure():
        loss = problem.loss()
        loss.backward()
        return loss.item()

    assert float(optimizer.step(closure)) == pytest.approx(float(whole.step(other.loss)))
    assert same(problem.weights(), other.weights())


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_closure_that_raises_leaves_everything_as_it_was(problem, method, make_base, error):
    optimizer = build(method, problem, make_base)
    optimizer.step(problem.loss)
    optimizer.zero_grad()
    optimizer.backward(problem.loss)  # half an accumulation that must survive
    for failing in range(1, PASSES[method] + 1):
        for where in ("forward", "backward"):
            calls = 0

            def closure():
                nonlocal calls
                calls += 1
                if calls == failing and where == "forward":
                    raise error("in the forward pass")
                loss = problem.loss()
                if calls == failing:
                    loss.register_hook(lambda g: (_ for _ in ()).throw(error("in the backward pass")))
                return loss

            weights, grads = problem.weights(), [p.grad.clone() for p in problem.model.parameters()]
            state = copy.deepcopy(optimizer.state_dict())
            with pytest.raises(error):
                optimizer.backward(closure)
            assert calls == failing
            assert same(weights, problem.weights())
            assert same(grads, [p.grad for p in problem.model.parameters()])
            assert problem.model[1].track_running_stats is True
            assert str(state) == str(optimizer.state_dict())
            with pytest.raises(bsam.Refusal, match="last backward raised"):
                optimizer.step()


def test_a_nan_perturbation_leaves_the_weights_as_they_were(problem, method, make_base):
    optimizer = build(method, problem, make_base)
    before = problem.weights()
    optimizer.backward(lambda: problem.loss() * float("nan"))
    assert same(before, problem.weights())


def test_a_parameter_no_pass_reaches_stays_untouched(problem, method, make_base):
    problem.model.append(nn.Linear(4, 4).double())
    idle = list(problem.model[-1].parameters())
    optimizer = build(method, problem, make_base)
    before = [p.detach().clone() for p in idle]
    optimizer.step(lambda: nn.functional.cross_entropy(problem.model[:-1](problem.x), problem.y))
    assert all(p.grad is None for p in idle)
    assert same(before, [p.detach() for p in idle])
    assert all(p.grad is not None for p in problem.model[0].parameters())


def test_a_parameter_reached_by_a_later_pass_only_is_used(plain, method, make_base):
    extra = nn.Linear(6, 3).double()
    plain.model.extra = extra
    optimizer = build(method, plain, make_base)
    calls = 0

    def closure():
        nonlocal calls
        calls += 1
        out = plain.model[:5](plain.x)
        return nn.functional.cross_entropy(out + extra(plain.x) if calls > 1 else out, plain.y)

    optimizer.backward(closure)
    assert extra.weight.grad is not None
    assert extra.weight.grad.abs().sum() > 0


def test_frozen_parameters_stay(problem, method, make_base):
    frozen = problem.model[0]
    optimizer = build(method, problem, make_base)
    for p in frozen.parameters():
        p.requires_grad_(False)
    before = [p.detach().clone() for p in frozen.parameters()]
    for _ in range(3):
        optimizer.step(problem.loss)
    assert same(before, [p.detach() for p in frozen.parameters()])
    assert all(p.grad is None and not p.requires_grad for p in frozen.parameters())


def test_zero_gradient_moves_nothing_by_nan(problem, method):
    optimizer = VARIANTS[method](torch.optim.SGD(problem.model.parameters(), lr=0.1, momentum=0.9), problem.model)
    before = problem.weights()
    optimizer.step(lambda: problem.loss() * 0.0)
    assert same(before, problem.weights())


def test_a_quadratic_converges(method, make_base):
    torch.manual_seed(0)
    w = nn.Parameter(torch.randn(10, dtype=torch.float64))
    scale = torch.linspace(0.5, 2.0, 10, dtype=torch.float64)
    optimizer = VARIANTS[method](make_base([w]), None)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=800)
    for _ in range(800):
        optimizer.step(lambda: (scale * w**2).sum() / 2)
        scheduler.step()
    assert float(w.detach().norm()) < 0.1  # from 3: within two radii of the minimum


def test_accumulation_adds_one_direction_per_call(plain, method, make_base):
    optimizer = build(method, plain, make_base)
    halves = list(zip(plain.x.chunk(2), plain.y.chunk(2), strict=True))
    alone = []
    for x, y in halves:
        optimizer.zero_grad()
        optimizer.backward(lambda: nn.functional.cross_entropy(plain.model(x), y))
        alone.append([p.grad.clone() for p in plain.model.parameters()])
    optimizer.zero_grad()
    for x, y in halves:
        optimizer.backward(lambda: nn.functional.cross_entropy(plain.model(x), y))
    summed = [p.grad for p in plain.model.parameters()]
    assert close(summed, [a + b for a, b in zip(*alone, strict=True)], atol=1e-15)
    optimizer.step()


def test_backward_then_step_is_step(problem, method, make_base):
    other = problem.clone()
    ours, whole = build(method, problem, make_base), build(method, other, make_base)
    for _ in range(4):
        ours.zero_grad()
        ours.backward(problem.loss)
        assert ours.step() is None
        whole.step(other.loss)
    assert same(problem.weights(), other.weights())


@pytest.mark.parametrize("clip", [False, True])
def test_a_scaler_changes_nothing(problem, method, make_base, clip):
    other = problem.clone()
    ours, plain = build(method, problem, make_base), build(method, other, make_base)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    for _ in range(6):
        expected = plain.backward(other.loss)
        if clip:
            torch.nn.utils.clip_grad_norm_(other.model.parameters(), 0.1)
        plain.step()
        plain.zero_grad()
        assert torch.equal(ours.backward(problem.loss, scaler=scaler), expected)
        if clip:
            scaler.unscale_(ours)
            torch.nn.utils.clip_grad_norm_(problem.model.parameters(), 0.1)
        scaler.step(ours)
        scaler.update()
        ours.zero_grad()
    assert same(problem.weights(), other.weights())
    assert scaler.get_scale() > 2.0**10


def test_an_overflow_in_any_pass_skips_the_step_and_lowers_the_scale(problem, method, make_base):
    for failing in range(1, PASSES[method] + 1):
        copy_ = problem.clone()
        optimizer = build(method, copy_, make_base)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        calls = 0

        def closure():
            nonlocal calls
            calls += 1
            loss = copy_.loss()
            # An inf in one entry of one gradient alone, as an overflow in half precision would leave it.
            if calls == failing:
                handle = copy_.model[5].bias.register_hook(lambda g: handle.remove() or g * torch.tensor([1.0, torch.inf, 1.0], dtype=g.dtype))
            return loss

        before = copy_.weights()
        optimizer.backward(closure, scaler=scaler)
        assert same(before, copy_.weights())
        scaler.step(optimizer)
        scaler.update()
        assert calls == PASSES[method]
        assert same(before, copy_.weights())
        assert scaler.get_scale() == 2.0**9
        optimizer.zero_grad()
        optimizer.backward(copy_.loss, scaler=scaler)  # and training goes on
        scaler.step(optimizer)
        assert not same(before, copy_.weights())


def test_deepcopy_and_pickle_go_on_bit_for_bit(problem, method, make_base):
    import pickle

    optimizer = build(method, problem, make_base)
    torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=9)  # patches `step` on the instance
    optimizer.step(problem.loss)
    for duplicate in (copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))):
        twin_problem, twin = duplicate((problem, optimizer))
        assert {id(p) for g in twin.param_groups for p in g["params"]} == {id(p) for p in twin_problem.model.parameters()}
        reference, original = copy.deepcopy((problem, optimizer))
        for _ in range(3):
            twin.step(twin_problem.loss)
            original.step(reference.loss)
        assert same(twin_problem.weights(), reference.weights())
        assert not same(twin_problem.weights(), problem.weights())
