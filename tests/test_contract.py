"""The laws that every method keeps, with SGD + momentum and with AdamW."""

from __future__ import annotations

import copy
import io
import math
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import bsam
from bsam.methods import METHODS

# Every optimizer with its defaults, and switches as methods of their own. SAF and MESA are losses: any optimizer
# minimises them, and none of these laws
# speaks of a loss. What is not a default has its reason here.
VARIANTS: dict[str, Callable[..., Any]] = {
    name: method.cls for name, method in METHODS.items() if not method.is_loss
} | {
    "aesam": partial(bsam.AESAM, total_steps=20),  # has to be told
    "aesam-reuse": partial(bsam.AESAM, total_steps=20, alpha=0.2),
    "bsam-2": partial(bsam.BSAM, passes=2),
    "bsam-adaptive": partial(bsam.BSAM, rho_max=0.5, rho_min=0.4, adaptive=True),
    "bsam-released": partial(bsam.BSAM, start_from_min=True),
    "g-rst": partial(bsam.RST, gamma=2.0),
    "gam-paper": partial(bsam.GAM, form="paper"),
    "gsam-following": partial(bsam.GSAM, rho=0.1, rho_floor=0.02),
    "ksam": partial(bsam.KSAM, k=10),  # the default is larger than the batch
    "msam": partial(bsam.MSAM, rho=0.1),  # the default is larger than this network
}
CHOOSING = (
    "esam",
    "ksam",
)  # they choose samples, and take closures that return one loss per sample of those they ask for
# With these a vanishing radius leaves the base optimizer: all samples and weights used, and of GAM's sum g1 alone (its
# default is tested by itself).
WHOLE: dict[str, dict[str, Any]] = {"esam": {"beta": 1.0, "gamma": 1.0}, "ksam": {"k": 64}, "gam": {"beta": (1, 0, 0)}}
EXEMPT = {
    "the loss at w is returned": {
        "msam": "its only pass is at the perturbed point; that loss is returned, and tested below"
    },
    "a later pass counts": {"msam": "it has no later pass"},
    "per-sample losses are averaged": dict.fromkeys(
        CHOOSING, "it takes nothing else; the mean is refused, which is tested in its place"
    ),
    "a closure may run backward itself": dict.fromkeys(
        CHOOSING, "it looks at losses without gradients; refused, which is tested in its place"
    )
    | {"gam-paper": "it differentiates twice; refused, which is tested in its place"},
}


@pytest.fixture(params=sorted(VARIANTS))
def method(request):
    return request.param


def methods_under(law):
    return pytest.mark.parametrize("method", [name for name in sorted(VARIANTS) if name not in EXEMPT[law]])


def methods_exempt_from(law):
    return pytest.mark.parametrize("method", sorted(EXEMPT[law]))


def build(method, problem, make_base, **arguments):
    return VARIANTS[method](make_base(problem.model.parameters()), problem.model, **arguments)


def closure_of(method, problem):
    return problem.losses if method in CHOOSING else problem.loss


def same(a, b):
    return len(a) == len(b) and all(torch.equal(s, t) for s, t in zip(a, b, strict=True))


def close(a, b, atol=1e-12):
    return all(torch.allclose(s, t, rtol=0, atol=atol) for s, t in zip(a, b, strict=True))


def alike(a, b):
    """Whether two states are equal, tensors bit for bit."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(alike(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(alike, a, b))
    return a == b


def test_every_method_is_listed_once():
    assert len({m.cls for m in METHODS.values()}) == len(METHODS)
    assert all(
        m.name == name and m.is_loss is not issubclass(m.cls, torch.optim.Optimizer) for name, m in METHODS.items()
    )
    assert {name for name, m in METHODS.items() if m.is_loss} == {"saf", "mesa"}
    assert all(set(methods) <= set(VARIANTS) for methods in EXEMPT.values())


def test_lr_zero_leaves_the_weights_bit_identical(problem, method, make_base):
    optimizer = build(method, problem, make_base)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    before = problem.weights()
    for _ in range(3):
        optimizer.step(closure_of(method, problem))
    assert same(before, problem.weights())


@pytest.mark.parametrize(
    "base",
    [lambda params: torch.optim.SGD(params, lr=0.0, momentum=0.9), lambda params: torch.optim.AdamW(params, lr=0.0)],
)
def test_lr_zero_from_the_start(problem, method, base):
    optimizer = VARIANTS[method](base(problem.model.parameters()), problem.model)
    before = problem.weights()
    for _ in range(2):
        optimizer.step(closure_of(method, problem))
    assert same(before, problem.weights())


def without_radius(method, problem, make_base, **arguments):
    optimizer = build(method, problem, make_base, **arguments)
    for group in optimizer.param_groups:
        group.update({name: 0.0 for name, value in group.items() if name.startswith("rho") and value is not None})
    return optimizer


def train(problem, base, steps, closure, factor=1):
    for _ in range(steps):
        base.zero_grad()
        (closure().mean() * factor).backward()
        base.step()


def test_radius_zero_is_the_base_optimizer(problem, plain, method, make_base):
    rounds = method in (
        "pgn",
        "g-rst",
        "gam",
        "gsam",
        "gsam-following",
    )  # (1 - a) g + a g, and projections of g on itself
    if rounds:
        problem = plain  # before batch norm a bias has no gradient but rounding, and Adam makes steps of that
    other = problem.clone()
    optimizer = without_radius(method, problem, make_base, **WHOLE.get(method, {}))
    train(other, make_base(other.model.parameters()), 7, closure_of(method, other))
    for _ in range(7):
        optimizer.step(closure_of(method, problem))
    assert (close if rounds else same)(problem.weights(), other.weights())
    assert same(problem.buffers(), other.buffers())


def test_radius_zero_of_gams_released_form_is_the_base_on_twice_the_loss(problem):
    """With its default weights g1 and g3 are added, n = 2 g, and p = 2 g leaves nothing across n."""
    other = problem.clone()
    sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    optimizer = without_radius("gam", problem, sgd)
    train(other, sgd(other.model.parameters()), 5, other.loss, factor=2)
    for _ in range(5):
        optimizer.step(problem.loss)
    assert close(problem.weights(), other.weights())


def test_a_radius_moves_the_trajectory(problem, method, make_base):
    """Else the laws above would hold of a method that does nothing."""
    other = problem.clone()
    optimizer = build(method, problem, make_base)
    train(other, make_base(other.model.parameters()), 5, other.loss)
    for _ in range(5):
        optimizer.step(closure_of(method, problem))
    assert not close(problem.weights(), other.weights(), atol=1e-5)


def test_batch_norm_moves_once_a_step(problem, method, make_base):
    optimizer = build(method, problem, make_base)
    for t in range(1, 4):
        expected = problem.clone()
        if method == "msam" and t > 1:  # its only pass is at the perturbed point
            to_perturbed_point(expected, optimizer)
        expected.loss()  # one forward pass of the whole batch
        optimizer.step(closure_of(method, problem))
        assert (close if method == "msam" else same)(problem.buffers(), expected.buffers())
        assert int(problem.model[1].num_batches_tracked) == t
        assert problem.model[1].track_running_stats is True


def to_perturbed_point(problem, optimizer):
    """From w to w - rho v/|v|, along the momentum of the base."""
    state = [optimizer.base.state[p] for p in optimizer.model.parameters()]
    v = [s.get("momentum_buffer", s.get("exp_avg")) for s in state]
    length = math.sqrt(sum(float((a**2).sum()) for a in v)) + 1e-12
    with torch.no_grad():
        for p, a in zip(problem.model.parameters(), v, strict=True):
            p -= a * (optimizer.param_groups[0]["rho"] / length)


def squares(problem):
    """A list that gathers |g|^2 of every backward pass, one entry per parameter tensor."""
    found = []
    for p in problem.model.parameters():
        p.register_hook(lambda g: found.append(float((g.detach() ** 2).sum())))
    return found


def promised_passes(method, t, s, memory):
    """Forward passes and backward passes of step ``t``: batch sizes (negative without gradients) and a count. ``s`` is
    |g|^2 at w.
    """
    if method in ("aesam", "aesam-reuse"):
        mu = s if t == 0 else 0.9 * memory["mu"] + 0.1 * s
        var = 0.0 if t == 0 else 0.9 * memory["var"] + 0.1 * (s - mu) ** 2
        memory.update(mu=mu, var=var)
        passes = 2 if s >= mu + (1 - 2 * t / 20) * math.sqrt(var) else 1
    elif method in ("rst", "g-rst"):
        passes = 2 if np.random.default_rng((0, t)).random() < 0.5 else 1
    elif method == "looksam":
        passes = 2 if t % 5 == 0 else 1
    elif method in CHOOSING:
        return ([24, -24, 12], 2) if method == "esam" else ([-24, 10, 10], 2)
    elif method == "gam-paper":
        return [24] * 4, 6  # two of the four go back twice
    else:
        passes = {"bsam-2": 2, "bsam-adaptive": 3, "bsam-released": 3, "gsam-following": 2}.get(method) or METHODS[
            method
        ].passes
    return [24] * passes, passes


@pytest.mark.parametrize(
    "base",
    [lambda params: torch.optim.SGD(params, lr=0.3, momentum=0.5), lambda params: torch.optim.AdamW(params, lr=0.03)],
)
def test_passes_are_as_promised(problem, method, base):
    forwards, backwards, calls = [], [], []

    def watch(_module, _args, out):
        forwards.append(len(out) if torch.is_grad_enabled() else -len(out))
        if out.requires_grad:
            out.register_hook(lambda g: backwards.append(1))

    problem.model.register_forward_hook(watch)
    found = squares(problem)
    optimizer = build(method, problem, base)
    closure = closure_of(method, problem)
    memory, total = {}, 0
    for t in range(20):
        for seen in (forwards, backwards, found, calls):
            seen.clear()
        optimizer.step(lambda *indices: calls.append(1) or closure(*indices))
        s = sum(found[: len(problem.weights())])
        assert (forwards, len(backwards)) == promised_passes(method, t, s, memory)
        assert len(calls) == len(forwards)
        total += sum(n > 0 for n in forwards)
    if method in ("aesam", "aesam-reuse", "rst", "g-rst"):
        assert 22 <= total <= 38  # both kinds of steps occur; the share of heads is tested with the bernoulli
    elif method in METHODS:
        assert total == round(20 * METHODS[method].passes)


@methods_under("the loss at w is returned")
def test_the_loss_at_w_is_returned(problem, method, make_base):
    optimizer = build(method, problem, make_base)
    for _ in range(3):
        expected = closure_of(method, problem.clone())().mean()
        loss = optimizer.step(closure_of(method, problem))
        assert torch.equal(loss, expected.detach())
        assert not loss.requires_grad


@methods_exempt_from("the loss at w is returned")
def test_the_loss_of_the_only_pass_is_returned(problem, method, make_base):
    optimizer = build(method, problem, make_base)
    assert (
        torch.equal(optimizer.step(problem.loss), problem.clone().loss().detach()) is False
    )  # the weights have moved ...
    at_w, perturbed = problem.clone(), problem.clone()
    to_perturbed_point(perturbed, optimizer)
    loss = optimizer.step(problem.loss)
    torch.testing.assert_close(loss, perturbed.loss().detach(), rtol=0, atol=1e-13)
    assert abs(loss - at_w.loss()) > 1e-4


def test_resume_is_bit_identical_from_every_step(problem, method, make_base):
    """Through a file, and far enough to pass the end of LookSAM's cycle from wherever in it."""

    def parts(p):
        optimizer = build(method, p, make_base)
        return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)

    whole = problem.clone()
    optimizer, scheduler = parts(whole)
    files, ends = [], []
    for _ in range(12):
        file = io.BytesIO()
        torch.save(
            {
                "model": whole.model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "scheduler": scheduler.state_dict(),
            },
            file,
        )
        files.append(file)
        optimizer.step(closure_of(method, whole))
        scheduler.step()
        ends.append((whole.weights(), whole.buffers(), copy.deepcopy(optimizer.state_dict())))
    for t in range(1, 7):
        files[t].seek(0)
        saved = torch.load(files[t], weights_only=True)
        assert set(saved["optimizer"]) == {"state", "param_groups"}
        second = problem.clone()
        second.model.load_state_dict(saved["model"])
        optimizer, scheduler = parts(second)
        optimizer.load_state_dict(saved["optimizer"])
        scheduler.load_state_dict(saved["scheduler"])
        assert optimizer.t == t
        for _ in range(6):
            optimizer.step(closure_of(method, second))
            scheduler.step()
        weights, buffers, state = ends[t + 5]
        assert same(weights, second.weights())
        assert same(buffers, second.buffers())
        assert alike(state, optimizer.state_dict())


@pytest.mark.parametrize(("sizes", "reduction"), [([6, 6, 6, 6], "mean"), ([5, 16, 3], "none")])
def test_yielded_micro_batches_equal_the_full_batch(plain, method, make_base, sizes, reduction):
    """Of equal size, by their means; of any size, by their samples. Methods that choose samples need those: the means
    are refused.
    """
    other = plain.clone()

    def micro_batches(indices=slice(None)):
        chosen = torch.arange(24)[indices]
        for part in chosen.split(sizes if len(chosen) == 24 else 5):
            yield nn.functional.cross_entropy(plain.model(plain.x[part]), plain.y[part], reduction=reduction)

    ours, whole = build(method, plain, make_base), build(method, other, make_base)
    if method in CHOOSING and reduction == "mean":
        with pytest.raises(bsam.BsamError, match="let it return one loss per sample"):
            ours.step(micro_batches)
        return
    for _ in range(5):
        loss = ours.step(micro_batches)
        expected = whole.step(closure_of(method, other))
    assert close(plain.weights(), other.weights())
    assert torch.allclose(loss, expected, atol=1e-12)


@methods_under("per-sample losses are averaged")
def test_per_sample_losses_are_averaged(problem, method, make_base):
    other = problem.clone()
    ours, whole = build(method, problem, make_base), build(method, other, make_base)
    for _ in range(5):
        ours.step(problem.losses)
        whole.step(other.loss)
    assert close(problem.weights(), other.weights())


@methods_exempt_from("per-sample losses are averaged")
def test_means_are_refused_where_samples_are_chosen(problem, method, make_base):
    optimizer = build(method, problem, make_base)
    before = problem.weights()
    with pytest.raises(bsam.BsamError, match="let it return one loss per sample"):
        optimizer.step(lambda indices=slice(None): problem.losses(indices).mean())
    assert same(before, problem.weights())


@methods_under("a closure may run backward itself")
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


@methods_under("a closure may run backward itself")
def test_such_a_closure_may_return_a_number(problem, method, make_base):
    optimizer = build(method, problem, make_base)
    other = problem.clone()
    whole = build(method, other, make_base)

    def closure():
        loss = problem.loss()
        loss.backward()
        return loss.item()

    for _ in range(2):
        assert float(optimizer.step(closure)) == pytest.approx(float(whole.step(other.loss)))
    assert same(problem.weights(), other.weights())


@methods_exempt_from("a closure may run backward itself")
def test_a_closure_that_runs_backward_itself_is_refused_where_it_cannot_work(problem, method, make_base):
    optimizer = build(method, problem, make_base)
    before = problem.weights()

    def closure(indices=slice(None)):
        losses = problem.losses(indices)
        losses.mean().backward()
        return losses

    with pytest.raises(
        bsam.BsamError,
        match="leave backward to it"
        if method in CHOOSING
        else "must not run backward itself: give the loss with its graph",
    ):
        optimizer.step(closure)
    assert same(before, problem.weights())
    assert all(p.grad is None for p in problem.model.parameters())


@pytest.mark.parametrize(("where", "error"), [("forward", ValueError), ("backward", KeyboardInterrupt)])
def test_a_closure_that_raises_leaves_everything_as_it_was(problem, method, make_base, where, error):
    """In every pass of a fresh and of a later step; and training goes on as if nothing had been."""
    twin = problem.clone()
    ours, untroubled = build(method, problem, make_base), build(method, twin, make_base)
    passes = []
    for _ in range(3):
        for optimizer, p in ((ours, problem), (untroubled, twin)):
            optimizer.zero_grad()
            optimizer.backward(closure_of(method, p))  # half an accumulation that must survive
        calls = failing = 0

        def closure(*indices):
            nonlocal calls
            if where == "backward" and not torch.is_grad_enabled():
                return problem.losses(*indices)  # it has none
            calls += 1
            if calls == failing and where == "forward":
                raise error("in the forward pass")
            loss = closure_of(method, problem)(*indices)
            if calls == failing:
                loss.register_hook(lambda g: (_ for _ in ()).throw(error("in the backward pass")))
            return loss

        while calls == failing:
            calls, failing = 0, failing + 1
            weights, grads = problem.weights(), [p.grad.clone() for p in problem.model.parameters()]
            state = copy.deepcopy(ours.state_dict())
            try:
                ours.backward(closure)
            except error:
                assert calls == failing
                assert same(weights, problem.weights())
                assert same(grads, [p.grad for p in problem.model.parameters()])
                assert problem.model[1].track_running_stats is True
                assert alike(state, ours.state_dict())
                with pytest.raises(bsam.BsamError, match="last backward raised"):
                    ours.step()
        passes.append(calls)
        untroubled.backward(closure_of(method, twin))
        ours.step()
        untroubled.step()
    assert same(problem.weights(), twin.weights())
    assert alike(ours.state_dict(), untroubled.state_dict())
    fewest, most = {
        "msam": (1, 1),
        "looksam": (1, 2),
        "esam": (2, 3),
        "ksam": (2, 3),
        "gam": (4, 4),
        "gam-paper": (4, 4),
    }.get(method, (1, 3))
    assert all(fewest <= n <= most for n in passes)


def test_a_nan_perturbation_leaves_the_weights_as_they_were(problem, method, make_base):
    """And a step that is not taken leaves no memory behind."""
    twin = problem.clone()
    optimizer, untroubled = build(method, problem, make_base), build(method, twin, make_base)
    for _ in range(3):
        before = problem.weights()
        optimizer.backward(lambda *indices: closure_of(method, problem)(*indices) * float("nan"))
        assert same(before, problem.weights())
        optimizer.zero_grad()
        optimizer.step(closure_of(method, problem))
        untroubled.step(closure_of(method, twin))
        assert same(problem.weights(), twin.weights())


def test_a_parameter_no_pass_reaches_stays_untouched(problem, method, make_base):
    problem.model.append(nn.Linear(4, 4).double())
    idle = list(problem.model[-1].parameters())
    optimizer = build(method, problem, make_base)
    before = [p.detach().clone() for p in idle]

    def closure(indices=slice(None)):
        losses = nn.functional.cross_entropy(
            problem.model[:-1](problem.x[indices]), problem.y[indices], reduction="none"
        )
        return losses if method in CHOOSING else losses.mean()

    for _ in range(6):
        optimizer.step(closure)
        assert all(p.grad is None for p in idle)
        assert same(before, [p.detach() for p in idle])
        assert all(p.grad is not None for p in problem.model[0].parameters())


@methods_under("a later pass counts")
def test_a_parameter_reached_by_a_later_pass_only_is_used(plain, method, make_base):
    extra = nn.Linear(6, 3).double()
    plain.model.extra = extra
    optimizer = build(
        method, plain, make_base, **({"p": 1.0} if method.endswith("rst") else {})
    )  # this step's coin may fall on the other side
    calls = 0

    def closure(indices=slice(None)):
        nonlocal calls
        calls += 1
        x = plain.x[indices]
        out = plain.model[:5](x)
        losses = nn.functional.cross_entropy(out + extra(x) if calls > 1 else out, plain.y[indices], reduction="none")
        return losses if method in CHOOSING else losses.mean()

    optimizer.backward(closure)
    assert extra.weight.grad is not None
    assert extra.weight.grad.abs().sum() > 0


def test_frozen_parameters_stay(problem, method, make_base):
    frozen = problem.model[0]
    optimizer = build(method, problem, make_base)
    optimizer.step(closure_of(method, problem))  # memory and momentum of what is frozen then
    optimizer.zero_grad()
    for p in frozen.parameters():
        p.requires_grad_(False)
    before = [p.detach().clone() for p in frozen.parameters()]
    for _ in range(3):
        optimizer.step(closure_of(method, problem))
    assert same(before, [p.detach() for p in frozen.parameters()])
    assert all(p.grad is None and not p.requires_grad for p in frozen.parameters())
    for p in frozen.parameters():
        p.requires_grad_(True)
    optimizer.step(closure_of(method, problem))
    assert not same(before, [p.detach() for p in frozen.parameters()])


@pytest.mark.parametrize(
    "base",
    [
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        lambda params: torch.optim.AdamW(params, weight_decay=0.0),
    ],
)
def test_zero_gradient_moves_nothing_by_nan(problem, method, base):
    """Nor with a memory and a momentum of zeros; and what comes after is finite."""
    optimizer = VARIANTS[method](base(problem.model.parameters()), problem.model)
    before = problem.weights()
    for _ in range(6):
        optimizer.step(lambda *indices: closure_of(method, problem)(*indices) * 0.0)
        assert same(before, problem.weights())
    for _ in range(2):
        optimizer.step(closure_of(method, problem))
    assert not same(before, problem.weights())
    assert all(torch.isfinite(w).all() for w in problem.weights())


def test_a_quadratic_converges(method, make_base):
    torch.manual_seed(0)
    w = nn.Parameter(
        0.3 * torch.randn(10, dtype=torch.float64)
    )  # near enough for AdamW, which by itself walks at most the sum of its learning rates
    scale = torch.linspace(0.5, 2.0, 10, dtype=torch.float64)
    start = float(w.detach().norm())
    small = {
        "asam": {"rho": 0.05},
        "bsam-adaptive": {"rho_max": 0.05, "rho_min": 0.05},
        "msam": {"rho": 0.05},
        "gam": {"rho_norm": 0.05},
    }
    optimizer = VARIANTS[method](make_base([w]), None, **small.get(method, {}))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=250)

    def closure(indices=slice(None)):
        losses = 5 * (scale * w**2)[indices]  # every entry a sample
        return losses if method in CHOOSING else losses.mean()

    for _ in range(250):
        optimizer.step(closure)
        scheduler.step()
    assert start > 0.8
    assert float(w.detach().norm()) < 0.1  # from 0.9: within two radii of the minimum


def test_accumulation_adds_one_direction_per_call(plain, method, make_base):
    twin = plain.clone()
    ours, apart = build(method, plain, make_base), build(method, twin, make_base)
    for _ in range(3):
        alone = []
        for half in (slice(0, 12), slice(12, 24)):
            ours.backward(on_part(method, plain, half))
            apart.backward(on_part(method, twin, half))
            alone.append([p.grad.clone() for p in twin.model.parameters()])
            for p in twin.model.parameters():
                p.grad.zero_()
        sums = [a + b for a, b in zip(*alone, strict=True)]
        assert close([p.grad for p in plain.model.parameters()], sums, atol=1e-15)
        for p, total in zip(twin.model.parameters(), sums, strict=True):
            p.grad = total
        ours.step()
        apart.step()
        ours.zero_grad()
        apart.zero_grad()
    assert close(plain.weights(), twin.weights())


def on_part(method, problem, part):
    part = type(problem)(problem.model, problem.x[part], problem.y[part])
    return closure_of(method, part)


def test_backward_then_step_is_step(problem, method, make_base):
    other = problem.clone()
    ours, whole = build(method, problem, make_base), build(method, other, make_base)
    for _ in range(6):
        ours.zero_grad()
        ours.backward(closure_of(method, problem))
        assert ours.step() is None
        whole.step(closure_of(method, other))
    assert same(problem.weights(), other.weights())


@pytest.mark.parametrize("clip", [False, True])
def test_a_scaler_changes_nothing(problem, method, make_base, clip):
    """Bit for bit, for all: scales are powers of two, and gradients are unscaled before anything is made of them."""
    other = problem.clone()
    ours, plain = build(method, problem, make_base), build(method, other, make_base)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    for _ in range(7):
        expected = plain.backward(closure_of(method, other))
        if clip:
            torch.nn.utils.clip_grad_norm_(other.model.parameters(), 0.1)
        plain.step()
        plain.zero_grad()
        assert torch.equal(ours.backward(closure_of(method, problem), scaler=scaler), expected)
        if clip:
            scaler.unscale_(ours)
            torch.nn.utils.clip_grad_norm_(problem.model.parameters(), 0.1)
        scaler.step(ours)
        scaler.update()
        ours.zero_grad()
    assert same(problem.weights(), other.weights())
    assert scaler.get_scale() > 2.0**10


def test_an_overflow_in_any_pass_skips_the_step_and_lowers_the_scale(problem, method, make_base):
    """And nothing remembers it: training goes on bit for bit as if that step had not been tried."""
    twin = problem.clone()
    optimizer, untroubled = build(method, problem, make_base), build(method, twin, make_base)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**50)
    calls = failing = 0
    fired: list[int] = []

    def overflow(g):
        """An inf in one entry of one gradient alone, as half precision would leave it."""
        if calls != failing or fired:
            return None
        fired.append(failing)
        return g * torch.tensor([torch.inf] + [1.0] * (g.numel() - 1), dtype=g.dtype).view(g.shape)

    def closure(*indices):
        nonlocal calls
        calls += torch.is_grad_enabled()
        return closure_of(method, problem)(*indices)

    for p in problem.model.parameters():
        p.register_hook(overflow)
    overflows = []
    for _ in range(7):
        failing = 0
        while not failing or fired:
            calls, failing, fired = 0, failing + 1, []
            before, scale, state = problem.weights(), scaler.get_scale(), copy.deepcopy(optimizer.state_dict())
            optimizer.backward(closure, scaler=scaler)
            assert same(before, problem.weights())
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            assert same(before, problem.weights()) is bool(fired)
            assert scaler.get_scale() == (scale / 2 if fired else scale)
            assert alike(state, optimizer.state_dict()) is bool(fired)
            overflows += fired
        untroubled.step(closure_of(method, twin))
        assert same(problem.weights(), twin.weights())
    assert max(overflows) == {
        "msam": 1,
        "gam": 4,
        "gam-paper": 4,
        "bsam": 3,
        "bsam-adaptive": 3,
        "bsam-released": 3,
    }.get(method, 2)


def test_deepcopy_and_pickle_go_on_bit_for_bit(problem, method, make_base):
    optimizer = build(method, problem, make_base)
    torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=9)  # patches `step` on the instance
    for _ in range(2):  # into the middle of LookSAM's cycle
        optimizer.step(closure_of(method, problem))
    for duplicate in (copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))):
        twin_problem, twin = duplicate((problem, optimizer))
        assert {id(p) for g in twin.param_groups for p in g["params"]} == {
            id(p) for p in twin_problem.model.parameters()
        }
        assert alike(twin.state_dict(), optimizer.state_dict())
        reference, original = copy.deepcopy((problem, optimizer))
        for _ in range(5):
            twin.step(closure_of(method, twin_problem))
            original.step(closure_of(method, reference))
        assert same(twin_problem.weights(), reference.weights())
        assert not same(twin_problem.weights(), problem.weights())
