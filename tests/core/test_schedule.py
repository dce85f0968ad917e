"""Radii that follow the learning rate: every scheduler, built before the optimizer or after; layer-wise decay."""

from __future__ import annotations

import copy
import math
from functools import partial

import pytest
import torch
from torch.optim import lr_scheduler as S

import bsam
from bsam.core.schedule import LR_MAX, LR_SEEN, LR_START, top_lr
from bsam.core.schedule import LR_MIN as GROUP_LR_MIN
from helpers import assert_close, detached

STEPS, LR, RHO, FLOOR, LR_MIN = 20, 0.1, 0.05, 0.01, 0.001


def warm_up_and_cosine(o):
    parts = [S.LinearLR(o, start_factor=0.01, total_iters=5), S.CosineAnnealingLR(o, T_max=15)]
    return S.SequentialLR(o, parts, milestones=[5])


# The scheduler, and the largest learning rate of its course; None where that cannot be known from the beginning.
SCHEDULES = {
    "constant": (lambda o: S.ConstantLR(o, factor=0.5, total_iters=7), LR),
    "lambda": (lambda o: S.LambdaLR(o, lambda t: 1.0 - t / 20), LR),
    "lambda, rising": (lambda o: S.LambdaLR(o, lambda t: 3.0 if t == 4 else 0.5 + t / 10), None),
    "multiplicative": (lambda o: S.MultiplicativeLR(o, lambda t: 0.9), LR),
    "multiplicative, rising": (lambda o: S.MultiplicativeLR(o, lambda t: 1.2 if t < 7 else 0.8), None),
    "step": (lambda o: S.StepLR(o, 5), LR),
    "steps": (lambda o: S.MultiStepLR(o, [7, 14]), LR),
    "linear": (lambda o: S.LinearLR(o, start_factor=0.01, total_iters=10), LR),
    "exponential": (lambda o: S.ExponentialLR(o, 0.8), LR),
    "cosine": (lambda o: S.CosineAnnealingLR(o, T_max=20), LR),
    "restarts": (lambda o: S.CosineAnnealingWarmRestarts(o, T_0=6), LR),
    "polynomial": (lambda o: S.PolynomialLR(o, total_iters=20), LR),
    "one-cycle": (lambda o: S.OneCycleLR(o, max_lr=0.5, total_steps=21), 0.5),
    "one-cycle, lower": (lambda o: S.OneCycleLR(o, max_lr=0.04, total_steps=21), 0.04),
    "cyclic, lower": (lambda o: S.CyclicLR(o, base_lr=0.01, max_lr=0.05, step_size_up=4), None),
    "cyclic": (lambda o: S.CyclicLR(o, base_lr=0.01, max_lr=0.3, step_size_up=4), None),
    "plateau": (lambda o: S.ReduceLROnPlateau(o, patience=0, threshold=10.0), LR),
    "warm-up, cosine": (warm_up_and_cosine, LR),
    "chained": (
        lambda o: S.ChainedScheduler([S.LinearLR(o, start_factor=0.2, total_iters=5), S.ExponentialLR(o, 0.9)]),
        LR,
    ),
    "swa": (lambda o: torch.optim.swa_utils.SWALR(o, swa_lr=0.02, anneal_epochs=8), LR),
}


def radius_of_a_step(problem, optimizer):
    """How far the last pass of a step went from ``w``, found from the weights alone."""
    points = []

    def closure():
        points.append(detached(problem.model.parameters()))
        return problem.loss()

    optimizer.step(closure)
    w, *_, last = points
    return math.sqrt(sum(float(((a - b) ** 2).sum()) for a, b in zip(w, last, strict=True)))


def expected_radius(lr, top):
    share = (lr - LR_MIN) / (top - LR_MIN)
    return FLOOR + (RHO - FLOOR) * min(max(share, 0.0), 1.0)


METHODS = {
    "rho_min": partial(bsam.BSAM, rho_min=RHO, rho_min_floor=FLOOR, lr_min=LR_MIN),
    "rho": partial(bsam.SAM, rho=RHO, rho_floor=FLOOR, lr_min=LR_MIN),
}


@pytest.fixture
def small(plain):
    """A network of one layer: many steps under many schedulers are taken with it."""
    plain.model = torch.nn.Linear(6, 3).double()
    return plain


def scheduled_optimizer(problem, name, first, method):
    """A method whose radius follows the learning rate, and a scheduler, in the order in which a user builds them."""
    base = torch.optim.SGD(problem.model.parameters(), lr=LR, momentum=0.9)
    make, _ = SCHEDULES[name]
    if first == "the scheduler":
        scheduler = make(base)
        return method(base, problem.model), scheduler
    optimizer = method(base, problem.model)
    return optimizer, make(optimizer)


@pytest.mark.parametrize(
    ("first", "radius"), [("the scheduler", "rho_min"), ("the optimizer", "rho_min"), ("the scheduler", "rho")]
)
@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_the_radius_follows_every_scheduler(small, name, first, radius):
    """That of SAM before a scheduler is in the test below."""
    _, known = SCHEDULES[name]
    optimizer, scheduler = scheduled_optimizer(small, name, first, METHODS[radius])
    base = optimizer.base
    largest = base.param_groups[0].get("initial_lr", LR)
    radii = set()
    for t in range(STEPS):
        lr = base.param_groups[0]["lr"]
        largest = max(largest, lr)
        found = radius_of_a_step(small, optimizer)
        assert found == pytest.approx(expected_radius(lr, known or largest), rel=1e-9)
        radii.add(round(found, 9))
        scheduler.step(*([float(t)] if name == "plateau" else []))
    assert len(radii) > 1


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_sam_equals_a_loop_with_that_radius(small, name):
    """A hand-written loop of SGD with momentum, under every scheduler; saved and resumed in the middle."""
    method = partial(bsam.SAM, rho=0.1, rho_floor=0.05)
    optimizer, scheduler = scheduled_optimizer(small, name, "the optimizer", method)
    known, w, v = SCHEDULES[name][1], small.weights(), None
    largest = optimizer.param_groups[0].get("initial_lr", LR)
    other = small.clone()

    def gradient(at):
        for p, value in zip(other.model.parameters(), at, strict=True):
            p.data = value.clone()
        return torch.autograd.grad(other.loss(), list(other.model.parameters()))

    for t in range(STEPS):
        if t == STEPS // 2:
            saved = copy.deepcopy((optimizer.state_dict(), scheduler.state_dict()))
            optimizer, scheduler = scheduled_optimizer(small, name, "the optimizer", method)
            optimizer.load_state_dict(saved[0])
            scheduler.load_state_dict(saved[1])
        lr, momentum = (optimizer.param_groups[0][key] for key in ("lr", "momentum"))
        largest = max(largest, lr)
        rho = 0.05 + 0.05 * min(max(lr / (known or largest), 0.0), 1.0)
        g = gradient(w)
        length = math.sqrt(sum(float((a**2).sum()) for a in g)) + 1e-12
        d = gradient([a + rho * b / length for a, b in zip(w, g, strict=True)])
        v = list(d) if v is None else [momentum * a + b for a, b in zip(v, d, strict=True)]
        w = [a - lr * b for a, b in zip(w, v, strict=True)]
        optimizer.step(small.loss)
        assert_close(small.weights(), w, atol=1e-12)
        scheduler.step(*([float(t)] if name == "plateau" else []))


def test_sam_without_a_floor_is_the_sam_of_a_fixed_radius(plain):
    """Bit for bit, with a learning rate that changes; and with a floor of half the radius it is not."""
    ends = []
    for arguments in ({}, {"rho_floor": None, "lr_max": 0.3}, {"rho_floor": 0.1}, {"rho_floor": 0.05}):
        problem = plain.clone()
        optimizer = bsam.SAM(torch.optim.SGD(problem.model.parameters(), lr=LR), problem.model, rho=0.1, **arguments)
        scheduler = S.CosineAnnealingLR(optimizer, T_max=STEPS)
        for _ in range(STEPS):
            optimizer.step(problem.loss)
            scheduler.step()
        ends.append(torch.cat([w.flatten() for w in problem.weights()]))
    assert torch.equal(ends[0], ends[1])
    assert torch.equal(ends[0], ends[2])
    assert not torch.allclose(ends[0], ends[3], atol=1e-6)


def test_a_state_saved_before_sam_had_a_floor_is_loaded(plain):
    old = bsam.SAM(torch.optim.SGD(plain.model.parameters(), lr=LR, momentum=0.9), plain.model)
    old.step(plain.loss)
    saved = old.state_dict()
    for group in saved["param_groups"]:
        for name in ("rho_floor", LR_MAX, GROUP_LR_MIN, LR_START, LR_SEEN):
            del group[name]
    new = bsam.SAM(torch.optim.SGD(plain.model.parameters(), lr=LR, momentum=0.9), plain.model, rho_floor=0.01)
    new.load_state_dict(saved)
    new.param_groups[0]["lr"] = LR / 2
    assert new.radii("rho") == pytest.approx(0.03)
    new.step(plain.loss)


def test_the_case_of_the_issue(plain):
    """SGD(lr=1e-3) under OneCycleLR(max_lr=0.1): the same as with lr_max given, whichever is built first."""
    ends = []
    for first, given in (("scheduler", None), ("optimizer", None), ("optimizer", 0.1)):
        problem = plain.clone()
        base = torch.optim.SGD(problem.model.parameters(), lr=1e-3, momentum=0.9)
        if first == "scheduler":
            scheduler = S.OneCycleLR(base, max_lr=0.1, total_steps=31)
            optimizer = bsam.BSAM(base, problem.model, rho_max=0.2, rho_min=0.2, lr_max=given)
        else:
            optimizer = bsam.BSAM(base, problem.model, rho_max=0.2, rho_min=0.2, lr_max=given)
            scheduler = S.OneCycleLR(optimizer, max_lr=0.1, total_steps=31)
        for _ in range(30):
            optimizer.step(problem.loss)
            scheduler.step()
        ends.append(torch.cat([w.flatten() for w in problem.weights()]))
    assert torch.equal(ends[0], ends[2])
    assert torch.equal(ends[1], ends[2])


@pytest.mark.parametrize("resume", [3, 9])
def test_the_largest_learning_rate_survives_a_checkpoint(plain, resume):
    """On the way down from a maximum that was not known beforehand."""

    def parts(problem):
        optimizer = bsam.BSAM(torch.optim.SGD(problem.model.parameters(), lr=LR), problem.model, rho_min=0.3)
        return optimizer, S.LambdaLR(optimizer, lambda t: [0.1, 1, 4, 7, 5, 3, 2, 1, 0.5, 0.4, 0.3, 0.2][t])

    whole = plain.clone()
    optimizer, scheduler = parts(whole)
    for t in range(11):
        if t == resume:
            saved = copy.deepcopy((whole.model.state_dict(), optimizer.state_dict(), scheduler.state_dict()))
        optimizer.step(whole.loss)
        scheduler.step()
    second = plain.clone()
    second.model.load_state_dict(saved[0])
    optimizer, scheduler = parts(second)
    optimizer.load_state_dict(saved[1])
    scheduler.load_state_dict(saved[2])
    for _ in range(resume, 11):
        optimizer.step(second.loss)
        scheduler.step()
    assert all(torch.equal(a, b) for a, b in zip(whole.weights(), second.weights(), strict=True))
    assert optimizer.param_groups[0][LR_SEEN] == pytest.approx(0.7)


def test_a_learning_rate_on_a_device_keeps_its_maximum_there(plain):
    """As a tensor that is written in place, so that a CUDA graph of the step goes on writing to it."""
    other = plain.clone()
    lr = torch.tensor(0.01, dtype=torch.float64)
    ours = bsam.BSAM(torch.optim.AdamW(plain.model.parameters(), lr=lr), plain.model, rho_min=0.2)
    whole = bsam.BSAM(torch.optim.AdamW(other.model.parameters(), lr=0.01), other.model, rho_min=0.2)
    (group,), (numbers,) = ours.param_groups, whole.param_groups
    seen = group[LR_SEEN]
    for rate in (0.001, 0.02, 0.03, 0.015, 0.0):
        lr.fill_(rate)
        numbers["lr"] = rate
        radius, expected = ours.radii("rho_min"), whole.radii("rho_min")
        assert isinstance(radius, torch.Tensor)
        assert float(radius) == pytest.approx(expected, rel=1e-12)
        ours.step(plain.loss)
        whole.step(other.loss)
        assert group[LR_SEEN] is seen
        assert float(seen) == numbers[LR_SEEN]
    assert float(seen) == 0.03
    assert_close(plain.weights(), other.weights(), atol=1e-8)


class TimmScheduler:
    """As timm.scheduler.Scheduler: it sets the value of the schedule times ``lr_scale``, also when it is built."""

    def __init__(self, optimizer, schedule):
        self.optimizer, self.schedule = optimizer, schedule
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])
        self.base = [group["initial_lr"] for group in optimizer.param_groups]
        self.step(0)

    def step(self, t):
        for group, base in zip(self.optimizer.param_groups, self.base, strict=True):
            group["lr"] = base * self.schedule(t) * group.get("lr_scale", 1.0)


class ByHand(TimmScheduler):
    """As in MAE's fine-tuning: written by the loop, before each step, and no ``initial_lr`` is noted."""

    def __init__(self, optimizer, schedule):
        self.optimizer, self.schedule, self.base = (
            optimizer,
            schedule,
            [group["lr"] for group in optimizer.param_groups],
        )


def layers(model):
    """Groups as timm.optim.param_groups_layer_decay makes them."""
    kinds = [layer for layer in model if list(layer.parameters())]
    scales = [0.3**i for i in reversed(range(len(kinds)))]
    return [{"params": list(layer.parameters()), "lr_scale": s} for layer, s in zip(kinds, scales, strict=True)]


@pytest.mark.parametrize("tensors", [False, True])
@pytest.mark.parametrize("first", ["the scheduler", "the optimizer"])
@pytest.mark.parametrize("kind", [TimmScheduler, ByHand])
def test_layer_wise_decay_does_not_lower_the_radius(plain, kind, first, tensors):
    """Warm-up over 5 steps, then down: all layers have the radius that the schedule gives without their scales."""

    def schedule(t):
        return 0.1 + 0.9 * t / 5 if t < 5 else 1 - (t - 5) / 10

    base = torch.optim.AdamW(layers(plain.model), lr=torch.tensor(LR, dtype=torch.float64) if tensors else LR)
    if first == "the scheduler":
        scheduler = kind(base, schedule)
        optimizer = bsam.BSAM(base, plain.model, rho_min=RHO, rho_min_floor=FLOOR, lr_min=LR_MIN)
    else:
        optimizer = bsam.BSAM(base, plain.model, rho_min=RHO, rho_min_floor=FLOOR, lr_min=LR_MIN)
        radii = [float(optimizer.radius(group, "rho_min")) for group in optimizer.param_groups]
        assert radii == [pytest.approx(RHO)] * 3  # no learning rate was set yet
        scheduler = kind(optimizer, schedule)
    for t in range(15):
        scheduler.step(t)
        scales = [float(group["lr"]) / (LR * schedule(t)) for group in base.param_groups]
        assert scales == pytest.approx([0.09, 0.3, 1.0])
        for group in optimizer.param_groups:
            expected = expected_radius(LR * schedule(t), LR)
            assert float(optimizer.radius(group, "rho_min")) == pytest.approx(expected, rel=1e-9)
        optimizer.step(plain.loss)


def test_lr_max_stays_as_it_was_given(plain):
    base = torch.optim.SGD([{"params": plain.model.parameters(), "lr_scale": 0.5}], lr=LR)
    optimizer = bsam.BSAM(base, plain.model, rho_min=RHO, lr_max=0.4)
    (group,) = base.param_groups
    for lr in (0.1, 0.3, 0.05):
        group["lr"] = 0.5 * lr
        optimizer.step(plain.loss)
        assert top_lr(group) == 0.4
        assert optimizer.radius(group, "rho_min") == pytest.approx(RHO * lr / 0.4)


def test_gsam_follows_a_warm_up_that_was_there_before_it(plain):
    base = torch.optim.SGD(plain.model.parameters(), lr=LR)
    scheduler = S.LinearLR(base, start_factor=0.1, total_iters=9)
    optimizer = bsam.GSAM(base, plain.model, rho=RHO, rho_floor=FLOOR)
    for t in range(12):
        share = min(0.1 + 0.1 * t, 1.0)
        assert optimizer.radii("rho") == pytest.approx(FLOOR + (RHO - FLOOR) * share)
        optimizer.step(plain.loss)
        scheduler.step()


class WithoutRate(torch.optim.Optimizer):
    """A base whose groups have no lr, or one of None, such as one that finds its step length by itself."""

    def __init__(self, params, **defaults):
        super().__init__(params, {"decay": 0.0, **defaults})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(0.1 * p.grad)


@pytest.mark.parametrize("defaults", [{}, {"lr": None}])
def test_a_base_without_a_learning_rate(plain, defaults):
    """Works where no radius follows it, and says so where one does."""
    for method in (bsam.SAM, bsam.ASAM, bsam.GSAM, lambda *args: bsam.BSAM(*args, rho_min_floor=0.05)):
        other, reference = plain.clone(), plain.clone()
        ours = method(WithoutRate(other.model.parameters(), **defaults), other.model)
        whole = method(torch.optim.SGD(reference.model.parameters(), lr=0.1), reference.model)
        for _ in range(3):
            ours.step(other.loss)
            whole.step(reference.loss)
        for a, b in zip(other.weights(), reference.weights(), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-15)
    with pytest.raises(bsam.BsamError, match=r"no lr in its parameter groups.*rho_min_floor=0\.05"):
        bsam.BSAM(WithoutRate(plain.model.parameters(), **defaults), plain.model)


def test_rates_that_were_scaled_before_the_scheduler_are_followed(plain):
    """Groups whose lr includes lr_scale already, under a torch scheduler: each restart has the largest radius again."""
    base = torch.optim.SGD([{"params": plain.model.parameters(), "lr": LR * 0.1, "lr_scale": 0.1}], lr=LR)
    optimizer = bsam.BSAM(base, plain.model, rho_min=RHO)
    scheduler = S.CosineAnnealingWarmRestarts(optimizer, T_0=4)
    for _ in range(9):
        found = radius_of_a_step(plain, optimizer)
        assert found == pytest.approx(RHO * base.param_groups[0]["lr"] / (LR * 0.1), rel=1e-9)
        scheduler.step()


def test_the_largest_rate_is_remembered_without_its_scale(plain):
    """A rate written by hand, times lr_scale, that rises above what was known and falls again."""
    base = torch.optim.SGD([{"params": plain.model.parameters(), "lr_scale": 0.1}], lr=1e-3)
    optimizer = bsam.BSAM(base, plain.model, rho_min=RHO)
    largest = 1e-3
    for rate in (5e-4, 0.01, 0.08, 0.01, 0.02):
        base.param_groups[0]["lr"] = rate * 0.1
        largest = max(largest, rate)
        assert radius_of_a_step(plain, optimizer) == pytest.approx(RHO * rate / largest, rel=1e-9)


@pytest.mark.parametrize("first", ["scheduler", "optimizer"])
@pytest.mark.parametrize(("lr", "max_lr"), [(1e-3, 3e-4), (0.5, 0.1)])
def test_one_cycle_below_the_rate_of_the_optimizer_reaches_the_whole_radius(plain, first, lr, max_lr):
    base = torch.optim.SGD(plain.model.parameters(), lr=lr, momentum=0.9)
    scheduler = S.OneCycleLR(base, max_lr=max_lr, total_steps=11) if first == "scheduler" else None
    optimizer = bsam.BSAM(base, plain.model, rho_min=RHO)
    scheduler = scheduler or S.OneCycleLR(optimizer, max_lr=max_lr, total_steps=11)
    for _ in range(10):
        found = radius_of_a_step(plain, optimizer)
        assert found == pytest.approx(RHO * base.param_groups[0]["lr"] / max_lr, rel=1e-9)
        scheduler.step()


def test_the_old_names_in_a_group_are_refused(plain):
    groups = [{"params": plain.model.parameters(), "lr_max": 0.4}]
    with pytest.raises(bsam.BsamError, match=r"a parameter group has lr_max, which is not used.*sharpness_lr_max"):
        bsam.BSAM(torch.optim.SGD(groups, lr=0.1), plain.model)
