"""Radii that follow the learning rate, with every scheduler, built before or after the optimizer."""

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


# The scheduler, and its largest learning rate; None if that is not known from the start.
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
    """The distance of the last pass of a step from ``w``, measured from the weights."""
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


following = partial(bsam.BSAM, rho_min=RHO, rho_min_floor=FLOOR, lr_min=LR_MIN)


@pytest.fixture
def small(plain):
    """A problem with a single layer, for many steps."""
    plain.model = torch.nn.Linear(6, 3).double()
    return plain


def scheduled_optimizer(problem, name, first, method=following):
    """A method whose radius follows the learning rate, and a scheduler, built in either order."""
    base = torch.optim.SGD(problem.model.parameters(), lr=LR, momentum=0.9)
    make, _ = SCHEDULES[name]
    if first == "the scheduler":
        scheduler = make(base)
        return method(base, problem.model), scheduler
    optimizer = method(base, problem.model)
    return optimizer, make(optimizer)


@pytest.mark.parametrize("first", ["the scheduler", "the optimizer"])
@pytest.mark.parametrize("name", sorted(SCHEDULES))
@pytest.mark.filterwarnings("ignore:The epoch parameter")  # from SequentialLR itself, in torch 2.8
def test_the_radius_follows_every_scheduler(small, name, first):
    _, known = SCHEDULES[name]
    optimizer, scheduler = scheduled_optimizer(small, name, first)
    base = optimizer.base
    largest = base.param_groups[0].get("initial_lr", LR)
    radii = set()
    for t in range(STEPS):
        lr = base.param_groups[0]["lr"]
        largest = max(largest, lr)
        radius = radius_of_a_step(small, optimizer)
        assert radius == pytest.approx(expected_radius(lr, known or largest), rel=1e-9)
        radii.add(round(radius, 9))
        scheduler.step(*([float(t)] if name == "plateau" else []))
    assert len(radii) > 1


@pytest.mark.parametrize("name", ["cosine", "lambda, rising", "one-cycle", "cyclic", "plateau", "swa"])
def test_sam_equals_a_loop_with_that_radius(small, name):
    """A hand-written loop of SAM and SGD with momentum; saved and resumed in the middle."""
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


def test_sam_without_a_floor_has_a_fixed_radius(small):
    """Bit for bit, with a learning rate that changes; a floor of half the radius changes the steps."""
    ends = []
    for arguments in ({}, {"rho_floor": None, "lr_max": 0.3}, {"rho_floor": 0.1}, {"rho_floor": 0.05}):
        problem = small.clone()
        optimizer = bsam.SAM(torch.optim.SGD(problem.model.parameters(), lr=LR), problem.model, rho=0.1, **arguments)
        scheduler = S.CosineAnnealingLR(optimizer, T_max=5)
        for _ in range(5):
            optimizer.step(problem.loss)
            scheduler.step()
        ends.append(torch.cat([w.flatten() for w in problem.weights()]))
    assert torch.equal(ends[0], ends[1])
    assert torch.equal(ends[0], ends[2])
    assert not torch.allclose(ends[0], ends[3], atol=1e-6)


def test_a_state_dict_from_before_sam_had_a_floor(plain):
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


def test_the_maximum_of_a_tensor_learning_rate_is_a_tensor(plain):
    """It is written in place, so that a CUDA graph of the step can update it."""
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
    """Like timm.scheduler.Scheduler: sets the scheduled rate times ``lr_scale``, from its construction on."""

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
    """As in MAE's fine-tuning: the loop sets the rate before each step, and there is no ``initial_lr``."""

    def __init__(self, optimizer, schedule):
        self.optimizer, self.schedule = optimizer, schedule
        self.base = [group["lr"] for group in optimizer.param_groups]


def layers(model):
    """Groups like those of timm.optim.param_groups_layer_decay."""
    kinds = [layer for layer in model if list(layer.parameters())]
    scales = [0.3**i for i in reversed(range(len(kinds)))]
    return [{"params": list(layer.parameters()), "lr_scale": s} for layer, s in zip(kinds, scales, strict=True)]


@pytest.mark.parametrize(
    ("kind", "first", "tensors"),
    [
        (TimmScheduler, "the scheduler", False),
        (TimmScheduler, "the optimizer", True),
        (ByHand, "the scheduler", True),
        (ByHand, "the optimizer", False),
    ],
)
def test_layer_wise_decay_does_not_lower_the_radius(plain, kind, first, tensors):
    """Warm-up over 3 steps, then down: all layers have the radius of the schedule without their scales."""

    def schedule(t):
        return 0.1 + 0.9 * t / 3 if t < 3 else 1 - (t - 3) / 5

    base = torch.optim.AdamW(layers(plain.model), lr=torch.tensor(LR, dtype=torch.float64) if tensors else LR)
    if first == "the scheduler":
        scheduler = kind(base, schedule)
        optimizer = following(base, plain.model)
    else:
        optimizer = following(base, plain.model)
        radii = [float(optimizer.radius(group, "rho_min")) for group in optimizer.param_groups]
        assert radii == [pytest.approx(RHO)] * 3  # before the scheduler sets a rate
        scheduler = kind(optimizer, schedule)
    for t in range(8):
        scheduler.step(t)
        scales = [float(group["lr"]) / (LR * schedule(t)) for group in base.param_groups]
        assert scales == pytest.approx([0.09, 0.3, 1.0])
        for group in optimizer.param_groups:
            expected = expected_radius(LR * schedule(t), LR)
            assert float(optimizer.radius(group, "rho_min")) == pytest.approx(expected, rel=1e-9)
        optimizer.step(plain.loss)


def test_lr_max_does_not_change(plain):
    base = torch.optim.SGD([{"params": plain.model.parameters(), "lr_scale": 0.5}], lr=LR)
    optimizer = bsam.BSAM(base, plain.model, rho_min=RHO, lr_max=0.4)
    (group,) = base.param_groups
    for lr in (0.1, 0.3, 0.05):
        group["lr"] = 0.5 * lr
        optimizer.step(plain.loss)
        assert top_lr(group) == 0.4
        assert optimizer.radius(group, "rho_min") == pytest.approx(RHO * lr / 0.4)


class WithoutRate(torch.optim.Optimizer):
    """A base without lr, or with ``lr=None``, such as one that chooses its step length."""

    def __init__(self, params, **defaults):
        super().__init__(params, {"decay": 0.0, **defaults})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(0.1 * p.grad)


@pytest.mark.parametrize("defaults", [{}, {"lr": None}])
def test_a_base_without_a_learning_rate(plain, defaults):
    """It works with fixed radii, and raises if a radius follows the learning rate."""
    for method in (bsam.SAM, partial(bsam.BSAM, rho_min_floor=0.05)):
        other, reference = plain.clone(), plain.clone()
        ours = method(WithoutRate(other.model.parameters(), **defaults), other.model)
        whole = method(torch.optim.SGD(reference.model.parameters(), lr=0.1), reference.model)
        for _ in range(3):
            ours.step(other.loss)
            whole.step(reference.loss)
        assert_close(other.weights(), reference.weights(), atol=1e-15)
    with pytest.raises(bsam.BsamError, match=r"rho_min_floor=0\.05"):
        bsam.BSAM(WithoutRate(plain.model.parameters(), **defaults), plain.model)


def test_rates_that_already_include_their_scale(plain):
    """With a torch scheduler, each restart has the largest radius again."""
    base = torch.optim.SGD([{"params": plain.model.parameters(), "lr": LR * 0.1, "lr_scale": 0.1}], lr=LR)
    optimizer = bsam.BSAM(base, plain.model, rho_min=RHO)
    scheduler = S.CosineAnnealingWarmRestarts(optimizer, T_0=4)
    for _ in range(9):
        radius = radius_of_a_step(plain, optimizer)
        assert radius == pytest.approx(RHO * base.param_groups[0]["lr"] / (LR * 0.1), rel=1e-9)
        scheduler.step()


def test_the_largest_rate_is_remembered_without_its_scale(plain):
    """The loop sets rates times lr_scale, which rise above the known rate and fall again."""
    base = torch.optim.SGD([{"params": plain.model.parameters(), "lr_scale": 0.1}], lr=1e-3)
    optimizer = bsam.BSAM(base, plain.model, rho_min=RHO)
    largest = 1e-3
    for rate in (5e-4, 0.01, 0.08, 0.01, 0.02):
        base.param_groups[0]["lr"] = rate * 0.1
        largest = max(largest, rate)
        assert radius_of_a_step(plain, optimizer) == pytest.approx(RHO * rate / largest, rel=1e-9)
