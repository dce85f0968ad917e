"""The laws that every method keeps.

What tests a method runs on all of them and their variants. What tests the engine runs on four methods that differ in
what they ask of it (one radius, two radii, memory, chosen samples), and on others only where they take another path.
"""

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
from bsam.common.method_info import Need
from bsam.methods import METHODS
from helpers import alike, assert_close, detached, distance, same, train, train_base

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=1e-2)
ADAMW = partial(torch.optim.AdamW, lr=1e-2, weight_decay=1e-2)
BASES = {"sgd": SGD, "adamw": ADAMW}
ENGINE = ("sam", "bsam", "looksam", "esam")
DIFFERENTIATED_TWICE = "gam-paper"


def variants() -> dict[str, Callable[..., Any]]:
    """Every optimizer with its defaults, and switches as methods of their own. SAF and MESA are losses, which any
    optimizer minimises: none of these laws concerns them. What is not a default has its reason here.
    """
    return {name: method for name, method in METHODS.items() if not method.is_loss} | {
        "aesam": partial(bsam.AESAM, total_steps=20),  # a required argument
        "aesam-reuse": partial(bsam.AESAM, total_steps=20, alpha=0.2),
        "bsam-2": partial(bsam.BSAM, passes=2),
        "bsam-adaptive": partial(bsam.BSAM, rho_max=0.5, rho_min=0.4, adaptive=True),
        "bsam-every": partial(bsam.BSAM, every=3),
        "bsam-released": partial(bsam.BSAM, start_from_min=True),
        "g-rst": partial(bsam.RST, gamma=2.0),
        "gam-paper": partial(bsam.GAM, form="paper"),
        "gsam-following": partial(bsam.GSAM, rho=0.1, rho_floor=0.02),
        "ksam": partial(bsam.KSAM, k=10),  # the default is larger than the batch
        "msam": partial(bsam.MSAM, rho=0.1),  # the default is larger than this network
        "sam-following": partial(bsam.SAM, rho=0.1, rho_floor=0.02),
    }


def chooses(method: str) -> bool:
    """Whether it chooses samples, and takes closures that return one loss per sample of those it asks for."""
    own = variants()[method]
    return Need.PER_SAMPLE_LOSSES in getattr(own, "func", own).needs


def needs_outputs(method: str) -> bool:
    own = variants()[method]
    return Need.OUTPUTS in getattr(own, "func", own).needs


CHOOSING = [name for name in sorted(variants()) if chooses(name)]
all_methods = pytest.mark.parametrize("method", sorted(variants()))


def engine_and(*more: str):
    """The four that stand for all, and those that take another path in what is tested."""
    return pytest.mark.parametrize("method", [*ENGINE, *more])


def all_but(*names: str):
    return pytest.mark.parametrize("method", [name for name in sorted(variants()) if name not in names])


def build(method, problem, make_base=SGD, **arguments):
    return variants()[method](make_base(problem.model.parameters()), problem.model, **arguments)


def closure_of(method, problem):
    if needs_outputs(method):
        return problem.loss_and_outputs
    return problem.losses if chooses(method) else problem.loss


def mean_loss(answer):
    """The mean loss of what a closure returned."""
    return (answer[0] if isinstance(answer, tuple) else answer).mean()


def times(answer, factor):
    return (answer[0] * factor, answer[1]) if isinstance(answer, tuple) else answer * factor


def twins(method, problem, make_base=SGD, **arguments):
    """The optimizer of a problem, a copy of the problem, and its optimizer."""
    other = problem.clone()
    return build(method, problem, make_base, **arguments), other, build(method, other, make_base, **arguments)


def close(a, b, atol=1e-12):
    return distance(a, b) <= atol


def test_every_method_is_listed_once_and_describes_itself():
    assert len(set(METHODS.values())) == len(METHODS)
    for m in METHODS.values():
        assert m.is_loss is not issubclass(m, torch.optim.Optimizer)
        assert all((m.title, m.reference, m.purpose, m.passes >= 1, m.memory >= m.memory_kept >= 0))
    assert {name for name, m in METHODS.items() if m.is_loss} == {"saf", "mesa"}


@pytest.mark.parametrize("start", [0.1, 0.0])
@all_methods
def test_lr_zero_leaves_the_weights_bit_identical(problem, method, make_base, start):
    """Set later, and from the start."""
    base = make_base(problem.model.parameters())
    base.param_groups[0]["lr"] = start
    optimizer = variants()[method](base, problem.model)
    optimizer.param_groups[0]["lr"] = 0.0
    before = problem.weights()
    train(problem, optimizer, 3, closure_of(method, problem))
    assert same(before, problem.weights())


def without_radius(method, problem, make_base, **arguments):
    optimizer = build(method, problem, make_base, **arguments)
    for group in optimizer.param_groups:
        group.update({name: 0.0 for name, value in group.items() if name.startswith("rho") and value is not None})
    return optimizer


@all_methods
def test_radius_zero_is_the_base_optimizer(problem, plain, method, make_base):
    # with all samples and weights, and of GAM's sum g1 alone (its default is tested below)
    whole = {"esam": {"beta": 1.0, "gamma": 1.0}, "ksam": {"k": 64}, "gam": {"beta": (1, 0, 0)}}.get(method, {})
    # (1 - a) g + a g, and projections of g on itself
    rounds = method in ("pgn", "g-rst", "gam", "gsam", "gsam-following", "crsam", "bsam-every")
    if rounds:
        problem = plain  # before batch norm a bias has no gradient but rounding, and Adam makes steps of that
    other = problem.clone()
    optimizer = without_radius(method, problem, make_base, **whole)
    train(problem, optimizer, 7, closure_of(method, problem))
    base = make_base(other.model.parameters())
    for _ in range(7):
        base.zero_grad()
        mean_loss(closure_of(method, other)()).backward()
        base.step()
    assert (close if rounds else same)(problem.weights(), other.weights())
    assert same(problem.buffers(), other.buffers())


def test_radius_zero_of_gams_released_form_is_the_base_on_twice_the_loss(problem):
    """With its default weights g1 and g3 are added, n = 2 g, and p = 2 g has no part orthogonal to n."""
    other, base = problem.clone(), partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    train(problem, without_radius("gam", problem, base), 5)
    train_base(other, base(other.model.parameters()), 5, factor=2)
    assert close(problem.weights(), other.weights())


@all_methods
def test_a_radius_changes_the_trajectory(problem, method, make_base):
    """Else the laws above would hold of a method that does nothing."""
    other = problem.clone()
    train(problem, build(method, problem, make_base), 3, closure_of(method, problem))
    train_base(other, make_base(other.model.parameters()), 3)
    assert not close(problem.weights(), other.weights(), atol=1e-5)


@all_methods
def test_batch_norm_is_updated_once_a_step(problem, method, make_base):
    optimizer = build(method, problem, make_base)
    for t in range(1, 4):
        expected = problem.clone()
        if method == "msam" and t > 1:  # its only pass is at the perturbed point
            to_perturbed_point(expected, optimizer)
        expected.loss()  # one forward pass of the whole batch
        optimizer.step(closure_of(method, problem))
        *statistics, count = problem.buffers()
        *wanted, _ = expected.buffers()
        assert (close if method == "msam" else same)(statistics, wanted)
        assert int(count) == t


def to_perturbed_point(problem, optimizer):
    """From w to w - rho v/|v|, along the momentum of the base."""
    state = [optimizer.base.state[p] for p in optimizer.model.parameters()]
    v = [s.get("momentum_buffer", s.get("exp_avg")) for s in state]
    length = math.sqrt(sum(float((a**2).sum()) for a in v)) + 1e-12
    with torch.no_grad():
        for p, a in zip(problem.model.parameters(), v, strict=True):
            p -= a * (optimizer.param_groups[0]["rho"] / length)


def expected_passes(method, t, s, memory):
    """Forward and backward passes of step ``t``: batch sizes (negative without gradients) and a count. ``s`` is |g|^2
    at w.
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
    elif method == "bsam-every":
        passes = 3 if t % 3 == 0 else 1
    elif method in ("esam", "ksam"):
        return ([24, -24, 12], 2) if method == "esam" else ([-24, 10, 10], 2)
    elif method == "gam-paper":
        return [24] * 4, 6  # two of the four go back twice
    else:
        own = {"bsam-2": 2, "bsam-adaptive": 3, "bsam-released": 3, "gsam-following": 2, "sam-following": 2}
        passes = own.get(method) or METHODS[method].passes
    return [24] * passes, passes


@all_methods
def test_passes_are_as_stated(problem, method):
    forwards, backwards, squares, calls = [], [], [], []

    def watch(_module, _args, out):
        forwards.append(len(out) if torch.is_grad_enabled() else -len(out))
        if out.requires_grad:
            out.register_hook(lambda g: backwards.append(1))

    problem.model.register_forward_hook(watch)
    for p in problem.model.parameters():
        p.register_hook(lambda g: squares.append(float((g.detach() ** 2).sum())))
    optimizer = build(method, problem, partial(torch.optim.SGD, lr=0.3, momentum=0.5))
    closure, memory, total = closure_of(method, problem), {}, 0
    draws = method in ("aesam", "aesam-reuse", "rst", "g-rst")  # the steps with a second pass
    steps = 20 if draws else 10
    for t in range(steps):
        for seen in (forwards, backwards, squares, calls):
            seen.clear()
        optimizer.step(lambda *indices: calls.append(1) or closure(*indices))
        s = sum(squares[: len(problem.weights())])
        assert (forwards, len(backwards)) == expected_passes(method, t, s, memory)
        assert len(calls) == len(forwards)
        total += sum(n > 0 for n in forwards)
    if draws:
        assert 22 <= total <= 38  # both kinds of steps occur; the share is tested with bernoulli
        assert METHODS.get(method, METHODS["rst"]).passes == 1.5
    elif method in METHODS:
        assert total == round(steps * METHODS[method].passes)


@all_but("msam")
def test_the_loss_at_w_is_returned(problem, method):
    optimizer = build(method, problem)
    for _ in range(3):
        expected = mean_loss(closure_of(method, problem.clone())())
        loss = optimizer.step(closure_of(method, problem))
        assert torch.equal(loss, expected.detach())
        assert not loss.requires_grad


def test_msam_returns_the_loss_of_its_only_pass(problem, make_base):
    optimizer = build("msam", problem, make_base)
    assert not torch.equal(optimizer.step(problem.loss), problem.clone().loss().detach())  # the weights have moved
    at_w, perturbed = problem.clone(), problem.clone()
    to_perturbed_point(perturbed, optimizer)
    loss = optimizer.step(problem.loss)
    torch.testing.assert_close(loss, perturbed.loss().detach(), rtol=0, atol=1e-13)
    assert abs(loss - at_w.loss()) > 1e-4


@pytest.mark.parametrize(
    ("method", "base"), [*((name, "sgd") for name in sorted(variants())), *((name, "adamw") for name in ENGINE)]
)
def test_resume_is_bit_identical(problem, method, base):
    """Through a file, from several places in LookSAM's cycle, and far enough to pass its end."""

    def parts(p):
        optimizer = build(method, p, BASES[base])
        return p.model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)

    def steps(p, optimizer, scheduler, n):
        for _ in range(n):
            optimizer.step(closure_of(method, p))
            scheduler.step()

    whole, files = problem.clone(), {}
    model, optimizer, scheduler = parts(whole)
    for t in range(1, 8):
        steps(whole, optimizer, scheduler, 1)
        if t in (1, 3, 5):
            files[t] = io.BytesIO()
            torch.save([part.state_dict() for part in (model, optimizer, scheduler)], files[t])
    for t, file in files.items():
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        assert set(saved[1]) == {"state", "param_groups"}
        second = problem.clone()
        for part, state in zip(own := parts(second), saved, strict=True):
            part.load_state_dict(state)
        assert own[1].t == t
        steps(second, *own[1:], 7 - t)
        assert same(whole.weights() + whole.buffers(), second.weights() + second.buffers())
        assert alike(optimizer.state_dict(), own[1].state_dict())


@pytest.mark.parametrize(("sizes", "reduction"), [([6, 6, 6, 6], "mean"), ([5, 16, 3], "none")])
@engine_and("ksam", DIFFERENTIATED_TWICE)
def test_yielded_micro_batches_equal_the_full_batch(plain, method, sizes, reduction):
    """Of equal size, by their means; of any size, by their samples. Methods that choose samples need those: the means
    are refused.
    """
    ours, other, whole = twins(method, plain)

    def micro_batches(indices=slice(None)):
        chosen = torch.arange(24)[indices]
        for part in chosen.split(sizes if len(chosen) == 24 else 5):
            yield nn.functional.cross_entropy(plain.model(plain.x[part]), plain.y[part], reduction=reduction)

    if chooses(method) and reduction == "mean":
        with pytest.raises(bsam.BsamError, match="return one loss per selected sample"):
            ours.step(micro_batches)
        return
    for _ in range(5):
        loss, expected = ours.step(micro_batches), whole.step(closure_of(method, other))
    assert close(plain.weights(), other.weights())
    assert torch.allclose(loss, expected, atol=1e-12)


@pytest.mark.parametrize("method", ["sam", "bsam", "looksam"])
def test_per_sample_losses_are_averaged(problem, method):
    ours, other, whole = twins(method, problem)
    train(problem, ours, 5, problem.losses)
    train(other, whole, 5)
    assert close(problem.weights(), other.weights())


@pytest.mark.parametrize("method", CHOOSING)
def test_the_mean_is_refused_where_samples_are_chosen(problem, method):
    optimizer, before = build(method, problem), problem.weights()
    with pytest.raises(bsam.BsamError, match="return one loss per selected sample"):
        optimizer.step(lambda indices=slice(None): problem.losses(indices).mean())
    assert same(before, problem.weights())


@pytest.mark.parametrize("returned", [lambda loss: loss, lambda loss: loss.item()], ids=["tensor", "number"])
@all_but(*CHOOSING, DIFFERENTIATED_TWICE, "functional_sam")  # which refuse it: below
def test_a_closure_may_run_backward_itself(problem, method, returned):
    ours, other, whole = twins(method, problem)

    def closure():
        ours.zero_grad()
        loss = problem.loss()
        loss.backward()
        return returned(loss)

    for _ in range(3):
        assert float(ours.step(closure)) == pytest.approx(float(whole.step(other.loss)), rel=1e-6)
    assert same(problem.weights(), other.weights())


def test_functional_sam_refuses_closures_without_outputs_or_with_a_backward(problem):
    optimizer, before = build("functional_sam", problem), problem.weights()

    def runs_backward():
        loss, outputs = problem.loss_and_outputs()
        loss.backward()
        return loss, outputs

    def other_outputs():
        loss, outputs = problem.loss_and_outputs()
        return loss, outputs + 1

    def detached_outputs():
        loss, outputs = problem.loss_and_outputs()
        return loss, outputs.detach()

    def outputs_of_one_head():
        loss, outputs = problem.loss_and_outputs()
        return loss + other_head.square().sum(), outputs

    other_head = nn.Parameter(torch.ones(3, dtype=before[0].dtype))
    optimizer.add_param_group({"params": [other_head]})
    closures = {problem.loss: "return a pair", runs_backward: "run backward", other_outputs: "does not depend"}
    closures |= {detached_outputs: "not detached", outputs_of_one_head: "another head"}
    for closure, words in closures.items():
        with pytest.raises(bsam.BsamError, match=words):
            optimizer.step(closure)
        assert same(before, problem.weights())
    assert "return a pair" in optimizer.check(problem.loss)[0]
    with pytest.raises(bsam.BsamError, match="tuple"):  # a second loss would be ignored
        build("sam", problem).step(problem.loss_and_outputs)


@pytest.mark.parametrize("method", [*CHOOSING, "functional_sam"])
def test_plain_steps_refuse_closures_that_will_not_do_after_the_start(problem, method):
    with pytest.raises(bsam.BsamError, match=r"return|takes no argument"):
        build(method, problem, start=5).step(problem.loss)


def test_plain_steps_refuse_closures_without_samples_or_with_other_outputs(problem):
    for optimizer in (
        build("ksam", problem, start=5),
        bsam.SAM(SGD(problem.model.parameters()), problem.model, ascent=0.5, start=5),
    ):
        with pytest.raises(bsam.BsamError, match="indices"):
            optimizer.step(lambda: problem.losses())
    optimizer = build("functional_sam", problem, start=5)
    with pytest.raises(bsam.BsamError, match="does not depend on the outputs"):
        optimizer.step(lambda: (problem.loss(), problem.model(problem.x)))


def test_a_second_head_is_noticed_also_with_micro_batches(problem):
    """Functional SAM would not train it."""
    optimizer = build("functional_sam", problem)
    spare = next(problem.model.parameters())

    def closure():
        for x, y in zip(problem.x.chunk(2), problem.y.chunk(2), strict=True):
            outputs = problem.model(x)
            detached = outputs.detach().requires_grad_()  # outputs that the first layer has no part in
            yield torch.nn.functional.cross_entropy(detached, y) + 0.0 * spare.sum(), detached

    with pytest.raises(bsam.BsamError, match="another head"):
        optimizer.step(closure)


def test_a_share_of_the_batch_is_what_the_closure_returns(problem):
    optimizer = bsam.SAM(SGD(problem.model.parameters()), problem.model, ascent=0.25)
    with pytest.raises(bsam.BsamError, match="must use the indices"):
        optimizer.step(lambda indices=None: problem.losses())


@pytest.mark.parametrize("method", [*CHOOSING, DIFFERENTIATED_TWICE])
def test_a_closure_that_runs_backward_itself_is_refused_where_it_cannot_work(problem, method):
    optimizer, before = build(method, problem), problem.weights()

    def closure(indices=slice(None)):
        losses = problem.losses(indices)
        losses.mean().backward()
        return losses

    expected = (
        "do not call backward in the closure"
        if chooses(method)
        else r"must not run backward itself: return \(or yield\) the loss without calling backward"
    )
    with pytest.raises(bsam.BsamError, match=expected):
        optimizer.step(closure)
    assert same(before, problem.weights())
    assert all(p.grad is None for p in problem.model.parameters())


@pytest.mark.parametrize(("where", "error"), [("forward", ValueError), ("backward", KeyboardInterrupt)])
@engine_and("ksam", "aesam-reuse", "bsam-released", DIFFERENTIATED_TWICE)
def test_a_closure_that_raises_leaves_everything_as_it_was(problem, method, where, error):
    """In every pass of a fresh and of a later step; and training goes on as if nothing had been."""
    ours, twin, undisturbed = twins(method, problem)
    passes = []
    for _ in range(3):
        for optimizer, p in ((ours, problem), (undisturbed, twin)):
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
            weights, buffers = problem.weights(), problem.buffers()
            grads = [p.grad.clone() for p in problem.model.parameters()]
            state = copy.deepcopy(ours.state_dict())
            try:
                ours.backward(closure)
            except error:
                assert calls == failing
                assert same(weights, problem.weights())
                assert same(buffers, problem.buffers())
                assert same(grads, [p.grad for p in problem.model.parameters()])
                assert alike(state, ours.state_dict())
                with pytest.raises(bsam.BsamError, match="last backward raised"):
                    ours.step()
        passes.append(calls)
        undisturbed.backward(closure_of(method, twin))
        ours.step()
        undisturbed.step()
    assert same(problem.weights(), twin.weights())
    assert alike(ours.state_dict(), undisturbed.state_dict())
    own = {"sam": (2, 2), "bsam": (3, 3), "bsam-released": (3, 3), "gam-paper": (4, 4), "esam": (2, 3), "ksam": (2, 3)}
    fewest, most = own.get(method, (1, 2))
    assert all(fewest <= n <= most for n in passes)


@all_methods
def test_a_nan_perturbation_leaves_the_weights_as_they_were(problem, method):
    """And a step that is not taken is not remembered."""
    optimizer, twin, undisturbed = twins(method, problem)
    for _ in range(3):
        before = problem.weights()
        optimizer.backward(lambda *indices: times(closure_of(method, problem)(*indices), float("nan")))
        assert same(before, problem.weights())
        optimizer.zero_grad()
        optimizer.step(closure_of(method, problem))
        undisturbed.step(closure_of(method, twin))
        assert same(problem.weights(), twin.weights())


def reduced(method, losses, outputs):
    if needs_outputs(method):
        return losses.mean(), outputs
    return losses if chooses(method) else losses.mean()


@all_methods
def test_a_parameter_no_pass_reaches_stays_untouched(problem, method, make_base):
    problem.model.append(nn.Linear(4, 4).double())
    idle = list(problem.model[-1].parameters())
    optimizer, before = build(method, problem, make_base), detached(idle)

    def closure(indices=slice(None)):
        outputs = problem.model[:-1](problem.x[indices])
        losses = nn.functional.cross_entropy(outputs, problem.y[indices], reduction="none")
        return reduced(method, losses, outputs)

    for _ in range(3):
        optimizer.step(closure)
        assert all(p.grad is None for p in idle)
        assert same(before, detached(idle))
        assert all(p.grad is not None for p in problem.model[0].parameters())


@all_methods
def test_a_step_without_a_head_is_that_of_a_network_in_which_it_is_frozen(plain, method):
    """What was remembered of the head counts in no length: it is used in some steps, with large gradients."""
    plain.model.head = nn.Linear(6, 3).double()
    optimizer = build(method, plain)

    def closure_with(problem, with_head):
        def closure(indices=slice(None)):
            x = problem.x[indices]
            outputs = problem.model[:5](x) + (20 * problem.model.head(x) if with_head else 0.0)
            return reduced(method, nn.functional.cross_entropy(outputs, problem.y[indices], reduction="none"), outputs)

        return closure

    for with_head in (True, True, False, False, True, False, False):
        if with_head:
            optimizer.step(closure_with(plain, with_head=True))
            continue
        twin, frozen = copy.deepcopy((plain, optimizer))
        twin.model.head.requires_grad_(False)
        losses = optimizer.step(closure_with(plain, False)), frozen.step(closure_with(twin, False))
        assert close(plain.weights(), twin.weights(), atol=1e-14)
        assert close(losses[:1], losses[1:], atol=1e-14)
        assert all(p.grad is None for p in plain.model.head.parameters())
    assert optimizer.t == 7


@all_but("msam")  # which has no later pass
def test_a_parameter_reached_by_a_later_pass_only_is_used(plain, method):
    extra = plain.model.extra = nn.Linear(6, 3).double()
    optimizer = build(method, plain, **({"p": 1.0} if method.endswith("rst") else {}))  # or this step may have none
    calls = 0

    def closure(indices=slice(None)):
        nonlocal calls
        calls += 1
        x = plain.x[indices]
        out = plain.model[:5](x) + (extra(x) if calls > 1 else 0.0)
        return reduced(method, nn.functional.cross_entropy(out, plain.y[indices], reduction="none"), out)

    optimizer.backward(closure)
    assert extra.weight.grad is not None
    assert extra.weight.grad.abs().sum() > 0


@all_methods
def test_frozen_parameters_stay(problem, method):
    frozen = list(problem.model[0].parameters())
    optimizer = build(method, problem)
    optimizer.step(closure_of(method, problem))  # memory and momentum of what is frozen then
    optimizer.zero_grad()
    problem.model[0].requires_grad_(False)
    before = detached(frozen)
    train(problem, optimizer, 3, closure_of(method, problem))
    assert same(before, detached(frozen))
    assert all(p.grad is None and not p.requires_grad for p in frozen)
    problem.model[0].requires_grad_(True)
    optimizer.step(closure_of(method, problem))
    assert not same(before, detached(frozen))


@pytest.mark.parametrize("base", BASES)
@all_methods
def test_zero_gradient_moves_nothing_by_nan(problem, method, base):
    """Nor with a memory and a momentum of zeros; and what comes after is finite."""
    optimizer, before = build(method, problem, partial(BASES[base], weight_decay=0.0)), problem.weights()
    for _ in range(6):
        optimizer.step(lambda *indices: times(closure_of(method, problem)(*indices), 0.0))
        assert same(before, problem.weights())
    train(problem, optimizer, 2, closure_of(method, problem))
    assert not same(before, problem.weights())
    assert all(torch.isfinite(w).all() for w in problem.weights())


@pytest.mark.parametrize(
    ("method", "base", "steps"),
    [*((name, "sgd", 60) for name in sorted(variants())), *((name, "adamw", 60) for name in ENGINE)],
)
def test_a_quadratic_converges(method, base, steps):
    torch.manual_seed(0)
    # near enough for AdamW, which moves an entry by at most the sum of its learning rates
    w = nn.Parameter(0.3 * torch.randn(10, dtype=torch.float64))
    scale = torch.linspace(0.5, 2.0, 10, dtype=torch.float64)
    start = float(w.detach().norm())

    def quadratic(indices):  # an entry is a sample
        outputs = w[indices] * 1
        return 5 * scale[indices] * outputs**2, outputs

    small = {
        "asam": {"rho": 0.05},
        "bsam-adaptive": {"rho_max": 0.05, "rho_min": 0.05},
        "msam": {"rho": 0.05},
        "gam": {"rho_norm": 0.05},
    }
    base = BASES[base]([w], **({"lr": 0.025} if base == "adamw" else {}))
    optimizer = variants()[method](base, None, **small.get(method, {}))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    for _ in range(steps):
        optimizer.step(lambda indices=slice(None): reduced(method, *quadratic(indices)))
        scheduler.step()
    assert start > 0.8
    assert float(w.detach().norm()) < 0.1  # from 0.9: within two radii of the minimum


@engine_and("friendly_sam", "aesam-reuse")
def test_accumulation_adds_one_direction_per_call(plain, method, make_base):
    ours, twin, apart = twins(method, plain, make_base)

    def on_half(problem, half):
        return closure_of(method, type(problem)(problem.model, problem.x[half], problem.y[half]))

    for _ in range(3):
        alone = []
        for half in (slice(0, 12), slice(12, 24)):
            ours.backward(on_half(plain, half))
            apart.backward(on_half(twin, half))
            alone.append([p.grad.clone() for p in twin.model.parameters()])
            for p in twin.model.parameters():
                p.grad.zero_()
        sums = [a + b for a, b in zip(*alone, strict=True)]
        assert_close([p.grad for p in plain.model.parameters()], sums, atol=1e-15)
        for p, total in zip(twin.model.parameters(), sums, strict=True):
            p.grad = total
        for optimizer in (ours, apart):
            optimizer.step()
            optimizer.zero_grad()
    assert close(plain.weights(), twin.weights())


@engine_and("bsam-released")
def test_backward_then_step_is_step(problem, method, make_base):
    ours, other, whole = twins(method, problem, make_base)
    for _ in range(6):
        ours.zero_grad()
        ours.backward(closure_of(method, problem))
        assert ours.step() is None
        whole.step(closure_of(method, other))
    assert same(problem.weights(), other.weights())


@pytest.mark.parametrize("clip", [False, True])
@engine_and("fisher_sam", "aesam-reuse", DIFFERENTIATED_TWICE)
def test_a_scaler_changes_nothing(problem, method, clip):
    """Bit for bit: scales are powers of two, and gradients are unscaled before they are used."""
    ours, other, plain = twins(method, problem)
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


@engine_and("friendly_sam", "aesam-reuse", "bsam-released", DIFFERENTIATED_TWICE)
def test_an_overflow_in_any_pass_skips_the_step_and_lowers_the_scale(problem, method):
    """And it is not remembered: training goes on bit for bit as if that step had not been tried."""
    optimizer, twin, undisturbed = twins(method, problem)
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
        undisturbed.step(closure_of(method, twin))
        assert same(problem.weights(), twin.weights())
    assert max(overflows) == {"gam-paper": 4, "bsam": 3, "bsam-released": 3}.get(method, 2)


@engine_and("aesam-reuse")
def test_deepcopy_and_pickle_go_on_bit_for_bit(problem, method, make_base):
    optimizer = build(method, problem, make_base)
    torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=9)  # patches `step` on the instance
    train(problem, optimizer, 2, closure_of(method, problem))  # into the middle of LookSAM's cycle
    for duplicate in (copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))):
        twin_problem, twin = duplicate((problem, optimizer))
        own = {id(p) for g in twin.param_groups for p in g["params"]}
        assert own == {id(p) for p in twin_problem.model.parameters()}
        assert alike(twin.state_dict(), optimizer.state_dict())
        reference, original = copy.deepcopy((problem, optimizer))
        train(twin_problem, twin, 5, closure_of(method, twin_problem))
        train(reference, original, 5, closure_of(method, reference))
        assert same(twin_problem.weights(), reference.weights())
        assert not same(twin_problem.weights(), problem.weights())
