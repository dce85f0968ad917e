"""Optimizers as frameworks wrap them, and base optimizers as other libraries write them."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import bsam
from bsam.core.optimizer import SharpnessAware
from bsam.core.wrapper import METHOD


def sgd(parameters, lr=0.1):
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)


def same(a, b):
    return len(a) == len(b) and all(torch.equal(s, t) for s, t in zip(a, b, strict=True))


# Wrappers of Lightning and Fabric


class Looking:
    """As the wrappers of Lightning and Fabric 2.6: of a derived class, it looks attributes up in the optimizer."""

    def __init__(self, optimizer):
        self._optimizer = optimizer
        self.__class__ = type("Lightning" + type(optimizer).__name__, (type(self), type(optimizer)), {})

    def step(self, closure=None):
        return self._optimizer.step(closure)

    def __getattr__(self, name):
        return getattr(self._optimizer, name)


class Copying(Looking):
    """As both were before: the wrapper has a copy of the optimizer's ``__dict__``."""

    def __init__(self, optimizer):
        self.__dict__ = {k: v for k, v in optimizer.__dict__.items() if k not in ("state_dict", "step")}
        super().__init__(optimizer)


class LightningManual(Looking):
    """As Lightning in manual optimization: ``step()`` passes a closure that does nothing."""

    def step(self, closure=None):
        return self._optimizer.step(closure or (lambda: None))


@pytest.mark.parametrize("wrap", [Looking, Copying, LightningManual])
@pytest.mark.parametrize("released", [False, True])
def test_backward_on_the_wrapper_and_step_on_the_optimizer(problem, wrap, released):
    other = problem.clone()
    inner = bsam.BSAM(sgd(problem.model.parameters()), problem.model, start_from_min=released)
    whole = bsam.BSAM(sgd(other.model.parameters()), other.model, start_from_min=released)
    outer = wrap(inner)
    assert isinstance(outer, bsam.BSAM)
    for backward, step in ((outer, outer), (outer, inner), (inner, outer), (inner, inner)):
        for half in (slice(0, 12), slice(12, 24)):
            ours = type(problem)(problem.model, problem.x[half], problem.y[half])
            theirs = type(problem)(other.model, other.x[half], other.y[half])
            assert torch.equal(backward.backward(ours.loss), whole.backward(theirs.loss))
        step.step()
        whole.step()
        with pytest.raises(bsam.BsamError, match=r"nothing to step with|returned None"):
            step.step()
        backward.zero_grad()
        whole.zero_grad()
        assert same(problem.weights(), other.weights())
    assert inner.t == whole.t == outer.t == 4


def test_a_closure_that_does_nothing_leaves_what_was_prepared(problem):
    """Its memory, too. With nothing prepared it is refused, and so is one that ran backward and returned no loss."""
    other = problem.clone()
    ours, whole = (bsam.FriendlySAM(sgd(p.model.parameters()), p.model) for p in (problem, other))
    for _ in range(3):
        ours.zero_grad()
        ours.backward(problem.loss)
        assert ours.step(lambda: None) is None
        whole.step(other.loss)
        assert same(problem.weights(), other.weights())
    assert str(ours.state_dict()) == str(whole.state_dict())
    with pytest.raises(bsam.BsamError, match="returned None"):
        ours.step(lambda: None)
    ours.zero_grad()
    ours.backward(problem.loss)
    with pytest.raises(bsam.BsamError, match="returned None"):
        ours.step(lambda: problem.loss().backward())


@pytest.mark.parametrize("wrap", [Looking, Copying])
def test_a_wrapped_optimizer_saves_and_loads_as_its_method(problem, wrap):
    inner = bsam.BSAM(sgd(problem.model.parameters()), problem.model, rho_max=0.3)
    inner.step(problem.loss)
    saved = wrap(inner).state_dict()
    assert saved["param_groups"][0][METHOD] == "BSAM"
    other = bsam.BSAM(sgd(problem.model.parameters()), problem.model)
    wrap(other).load_state_dict(copy.deepcopy(saved))
    assert (other.t, other.param_groups[0]["rho_max"]) == (1, 0.3)


# Whose state it is


class MySAM(bsam.SAM):
    """A user's class that changes nothing of the method."""


class MyDirection(bsam.SAM):
    """And one that does."""

    def direction(self, L):
        return L.grad()


def test_the_state_of_another_method_is_not_taken_for_ones_own(problem):
    """The case of the issue: SAM(rho=0.5) into ASAM(rho=2.0)."""
    saver = bsam.SAM(sgd(problem.model.parameters()), problem.model, rho=0.5)
    for _ in range(3):
        saver.step(problem.loss)
    saved = copy.deepcopy(saver.state_dict())
    other = bsam.ASAM(sgd(problem.model.parameters(), lr=0.7), problem.model, rho=2.0)
    with pytest.warns(UserWarning, match="the state of SAM, loaded into ASAM"):
        other.load_state_dict(saved)
    (group,) = other.param_groups
    assert (group["rho"], other.t, group[METHOD], group["lr"]) == (2.0, 0, "ASAM", 0.1)
    for i, p in enumerate(problem.model.parameters()):
        assert torch.equal(other.state[p]["momentum_buffer"], saved["state"][i]["momentum_buffer"])
    clean = problem.clone()
    fresh = bsam.ASAM(sgd(clean.model.parameters()), clean.model, rho=2.0)
    fresh.base.load_state_dict(bare(copy.deepcopy(saved)))
    fresh.param_groups[0].update({k: v for k, v in group.items() if k != "params"})
    other.step(problem.loss)
    fresh.step(clean.loss)
    assert same(problem.weights(), clean.weights())


def bare(saved):
    """The state of SGD alone, by the names that SGD has."""
    known = set(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1).param_groups[0])
    groups = [{k: v for k, v in group.items() if k in known} for group in saved["param_groups"]]
    return {
        "state": {i: {"momentum_buffer": entry["momentum_buffer"]} for i, entry in saved["state"].items()},
        "param_groups": groups,
    }


def test_memory_of_another_method_reaches_nobody(problem):
    """LookSAM and AE-SAM keep vectors under one name, and BSAM has none: neither the method nor the base takes it."""
    saver = bsam.LookSAM(sgd(problem.model.parameters()), problem.model, rho=0.2)
    saver.step(problem.loss)
    saved = copy.deepcopy(saver.state_dict())
    assert "g_v" in saved["state"][0]
    aesam = bsam.AESAM(sgd(problem.model.parameters()), problem.model, total_steps=9, alpha=0.5)
    with pytest.warns(UserWarning, match="LookSAM, loaded into AESAM"):
        aesam.load_state_dict(saved)
    assert aesam.recall("g_v") is None
    bilateral = bsam.BSAM(sgd(problem.model.parameters()), problem.model)
    with pytest.warns(UserWarning, match="LookSAM, loaded into BSAM"):
        bilateral.load_state_dict(saved)
    assert "rho" not in bilateral.param_groups[0]
    assert set(bilateral.state_dict()["state"][0]) == {"momentum_buffer"}
    fresh = bsam.BSAM(sgd(problem.model.parameters()), problem.model)
    assert bilateral.param_groups[0].keys() == fresh.param_groups[0].keys()


def test_ones_own_state_comes_back_and_so_does_that_of_a_base_alone(problem):
    saver = MySAM(sgd(problem.model.parameters()), problem.model, rho=0.3)
    saver.step(problem.loss)
    for cls in (bsam.SAM, MySAM):
        loader = cls(sgd(problem.model.parameters()), problem.model)
        loader.load_state_dict(saver.state_dict())
        assert (loader.t, loader.param_groups[0]["rho"]) == (1, 0.3)
    with pytest.warns(UserWarning, match="SAM, loaded into MyDirection"):
        MyDirection(sgd(problem.model.parameters()), problem.model).load_state_dict(saver.state_dict())
    older = saver.state_dict()
    (group,) = older["param_groups"]
    older["param_groups"] = [{k: v for k, v in group.items() if not k.startswith("sharpness_")}]
    loader = bsam.ASAM(sgd(problem.model.parameters()), problem.model, rho=2.0)
    loader.load_state_dict(older)  # nothing says whose it is
    assert (loader.t, loader.param_groups[0]["rho"]) == (1, 0.3)


# Bases of other libraries


def of_another_library(name):
    import pytorch_optimizer  # not where the GPU tests run

    return getattr(pytorch_optimizer, name)


@pytest.mark.parametrize("name", ["MADGRAD", "SPAM"])
def test_state_that_belongs_to_no_parameter(problem, name):
    """These count steps beside the entries of the parameters; a resumed run goes on bit for bit."""
    base = of_another_library(name)

    def build(p):
        return bsam.FriendlySAM(base(p.model.parameters(), lr=0.01), p.model)

    second = problem.clone()
    optimizer = build(problem)
    for t in range(6):
        if t == 3:
            saved = copy.deepcopy((problem.model.state_dict(), optimizer.state_dict()))
        optimizer.step(problem.loss)
    assert any(isinstance(k, str) for k in saved[1]["state"])
    second.model.load_state_dict(saved[0])
    optimizer = build(second)
    optimizer.load_state_dict(saved[1])
    for _ in range(3):
        optimizer.step(second.loss)
    assert same(problem.weights(), second.weights())


@pytest.mark.parametrize("name", ["ScheduleFreeSGD", "ScheduleFreeAdamW"])
def test_schedule_free_optimizers(plain, name):
    """Their settings and ours stay apart (they have an lr_max), and their modes are reached through the wrapper."""
    base = of_another_library(name)
    other = plain.clone()
    optimizer = bsam.BSAM(base(plain.model.parameters(), lr=0.1, warmup_steps=2), plain.model, lr_max=0.4)
    reference = base(other.model.parameters(), lr=0.1, warmup_steps=2)
    optimizer.train()
    reference.train()
    for _ in range(5):
        optimizer.zero_grad()
        optimizer.backward(plain.loss)
        for p, q in zip(plain.model.parameters(), other.model.parameters(), strict=True):
            q.grad = p.grad.clone()
        optimizer.step()
        reference.step()
        assert optimizer.radii("rho_min") == pytest.approx(0.05 / 4)
    optimizer.eval()
    reference.eval()
    assert same(plain.weights(), other.weights())
    ours, theirs = optimizer.param_groups[0], reference.param_groups[0]
    assert {k: ours[k] for k in theirs if k != "params"} == {k: v for k, v in theirs.items() if k != "params"}
    averaged = plain.weights()
    optimizer.train()
    assert not same(averaged, plain.weights())


def test_a_base_without_modes_has_none(problem):
    optimizer = bsam.SAM(sgd(problem.model.parameters()), problem.model)
    assert not hasattr(optimizer, "train")
    with pytest.raises(AttributeError, match="train"):
        optimizer.train()
    with pytest.raises(AttributeError, match="eval"):
        optimizer.eval()


def test_a_differentiable_base_and_a_complex_loss_are_refused(problem):
    base = torch.optim.SGD(problem.model.parameters(), lr=0.1, differentiable=True)
    with pytest.raises(bsam.BsamError, match="differentiable=True"):
        bsam.BSAM(base, problem.model)
    z = nn.Parameter(torch.randn(3, dtype=torch.complex128))
    optimizer = bsam.SAM(torch.optim.SGD([z], lr=0.1), None)
    for loss in (lambda: (z * z).sum(), lambda: z * z, lambda: iter([(z * z).sum()])):
        with pytest.raises(bsam.BsamError, match=r"the loss must be real, got torch\.complex128"):
            optimizer.step(loss)
    optimizer.step(lambda: (z * z).sum().real)


# Models as libraries build them


class LowRank(nn.Module):
    """As PEFT's LoRA layers: a frozen layer and a trainable product of two thin matrices beside it."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(2, layer.in_features, dtype=torch.float64) / 2)
        self.b = nn.Parameter(torch.randn(layer.out_features, 2, dtype=torch.float64) / 2)

    def forward(self, x):
        return self.layer(x) + x @ self.a.T @ self.b.T


def bsam_by_hand(params, loss, rho):
    """Algorithm 1 with plain gradients; the direction."""

    def moved(by):
        with torch.no_grad():
            for p, e in zip(params, by, strict=True):
                p.add_(e)

    g = torch.autograd.grad(loss(), params)
    length = torch.cat([t.flatten() for t in g]).norm()
    start, found = [p.detach().clone() for p in params], []
    for sign in (1, -1):
        moved([sign * rho * t / length for t in g])
        found.append(torch.autograd.grad(loss(), params))
        with torch.no_grad():
            for p, w in zip(params, start, strict=True):
                p.copy_(w)
    up, down = found
    share = torch.cat([t.flatten() for t in up]).norm() / torch.cat([t.flatten() for t in down]).norm()
    return [a + b - share * c for a, b, c in zip(g, up, down, strict=True)]


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
    "compiled": lambda model: torch.compile(model, backend="aot_eager"),
}


@pytest.mark.parametrize("name", sorted(MODELS))
def test_models_of_every_make_get_the_direction_of_the_algorithm(plain, name):
    """Against plain gradients of the model without checkpoints and compiler, which has the same parameters."""
    model = MODELS[name](plain.model)
    x, y = plain.x.clone(), plain.y

    def reference_loss():
        return F.cross_entropy(plain.model(x), y)

    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = bsam.BSAM(sgd(params), model, rho_max=0.1, rho_min=0.1)
    frozen = [p.detach().clone() for p in model.parameters() if not p.requires_grad]
    for _ in range(3):
        expected = bsam_by_hand(params, reference_loss, 0.1)
        optimizer.zero_grad()
        optimizer.backward(lambda: F.cross_entropy(model(x.clone()), y))
        for p, d in zip(params, expected, strict=True):
            torch.testing.assert_close(p.grad, d, rtol=1e-9, atol=1e-13)
        optimizer.step()
    assert same(frozen, [p.detach() for p in model.parameters() if not p.requires_grad])
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)


def test_no_method_warns_when_it_loads_its_own_state(problem):
    for method in (m.cls for m in bsam.METHODS.values() if not m.is_loss):
        options = {"total_steps": 9} if method is bsam.AESAM else {}
        optimizer = method(sgd(problem.model.parameters()), problem.model, **options)
        assert isinstance(optimizer, SharpnessAware)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            optimizer.load_state_dict(optimizer.state_dict())


def test_a_state_of_another_method_that_was_loaded_into_base_is_refused(plain):
    """As torch's distributed checkpoint does, which is given ``optimizer.base``."""
    other = bsam.SAM(sgd(plain.clone().model.parameters()), None, rho=0.5)
    optimizer = bsam.ASAM(sgd(plain.model.parameters()), plain.model, rho=2.0)
    optimizer.base.load_state_dict(other.state_dict())
    with pytest.raises(
        bsam.BsamError, match=r"base has the state of SAM, loaded into it behind ASAM.*optimizer.load_state_dict"
    ):
        optimizer.step(plain.loss)


def test_two_trained_modules_in_a_list_are_one_model(plain):
    """ASAM goes by the names of parameters, of all of them."""
    ends = []
    for listed in (True, False):
        torch.manual_seed(0)
        a, b = nn.Linear(6, 5).double(), nn.Sequential(nn.LayerNorm(5), nn.Linear(5, 3)).double()
        params = [*a.parameters(), *b.parameters()]
        optimizer = bsam.ASAM(sgd(params), [a, b] if listed else nn.ModuleList([a, b]))
        for _ in range(2):
            optimizer.step(lambda: F.cross_entropy(b(a(plain.x)), plain.y))
        ends.append([p.detach() for p in params])
    assert same(*ends)
