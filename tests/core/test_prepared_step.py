"""From backward to step, also if a framework wraps the optimizer."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn import functional as F

import bsam
from bsam.core.wrapper import METHOD
from helpers import same, sgd


class Looking:
    """Like the wrappers of Lightning and Fabric 2.6: a derived class that reads attributes of the optimizer."""

    def __init__(self, optimizer):
        self._optimizer = optimizer
        self.__class__ = type("Lightning" + type(optimizer).__name__, (type(self), type(optimizer)), {})

    def step(self, closure=None):
        return self._optimizer.step(closure)

    def __getattr__(self, name):
        return getattr(self._optimizer, name)


class Copying(Looking):
    """Like older versions of them: the wrapper has a copy of the optimizer's ``__dict__``."""

    def __init__(self, optimizer):
        self.__dict__ = {k: v for k, v in optimizer.__dict__.items() if k not in ("state_dict", "step")}
        super().__init__(optimizer)


@pytest.mark.parametrize("clear", [lambda ours, model: ours.zero_grad(), lambda _, model: model.zero_grad(False)])
def test_after_an_overflow_no_pass_sees_nan_and_the_next_step_is_as_ever(plain, clear):
    """A loss such as binary cross-entropy raises at NaN weights; a skipped step leaves no offset."""
    other = plain.clone()
    ours, whole = (bsam.BSAM(sgd(p.model.parameters()), p.model, start_from_min=True) for p in (plain, other))
    scaler, passes = torch.amp.GradScaler("cpu", init_scale=2.0**100), []

    def closure(factor):
        passes.append(all(p.isfinite().all() for p in plain.model.parameters()))
        return factor * plain.loss()

    for factor in (1e300, 1.0):
        ours.backward(lambda factor=factor: closure(factor), scaler)
        scaler.step(ours)
        scaler.update(1.0)
        clear(ours, plain.model)
    whole.step(other.loss)
    assert passes == [True] * 6
    assert ours.t == 1
    torch.testing.assert_close(plain.weights(), other.weights())


@pytest.mark.parametrize("wrap", [Looking, Copying])
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
        with pytest.raises(bsam.BsamError, match="backward"):
            step.step()
        backward.zero_grad()
        whole.zero_grad()
        assert same(problem.weights(), other.weights())
    assert inner.t == whole.t == outer.t == 4


class Shifted(bsam.SAM):
    """Overrides a class attribute in the instance, and returns a direction that shares memory with the weights."""

    factor = 1.0

    def __init__(self, base, model, *, factor, **options):
        super().__init__(base, model, **options)
        self.factor = factor

    def direction(self, L):
        super().direction(L)
        return self.factor * self.vector(self.params)


@pytest.mark.parametrize("wrap", [Looking, Copying, lambda optimizer: optimizer])
def test_a_user_method_with_attributes(plain, wrap):
    optimizer = wrap(Shifted(sgd(plain.model.parameters()), plain.model, factor=0.5, rho=0.3, same_draws=False))
    optimizer.backward(plain.loss)
    assert same([p.grad for p in plain.model.parameters()], [0.5 * w for w in plain.weights()])
    with pytest.raises(bsam.BsamError, match="rho_max"):
        Shifted(sgd(plain.model.parameters()), plain.model, factor=0.5, rho_max=0.1)


def test_an_overflow_that_the_direction_does_not_contain_skips_the_step(plain):
    optimizer, before = Shifted(sgd(plain.model.parameters()), plain.model, factor=0.5), plain.weights()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**100)
    for factor, moves in ((1e300, False), (1.0, True)):
        optimizer.backward(lambda: factor * plain.loss(), scaler)
        scaler.step(optimizer)
        scaler.update(1.0)
        assert same(before, plain.weights()) is not moves
        optimizer.zero_grad()


@pytest.mark.parametrize("wrap", [Looking, Copying])
def test_a_wrapped_optimizer_saves_and_loads_as_its_method(problem, wrap):
    inner = bsam.BSAM(sgd(problem.model.parameters()), problem.model, rho_max=0.3)
    inner.step(problem.loss)
    saved = wrap(inner).state_dict()
    assert saved["param_groups"][0][METHOD] == "BSAM"
    other = bsam.BSAM(sgd(problem.model.parameters()), problem.model)
    wrap(other).load_state_dict(copy.deepcopy(saved))
    assert (other.t, other.param_groups[0]["rho_max"]) == (1, 0.3)


def test_accumulation_goes_on_after_an_exception(problem):
    other = problem.clone()
    ours, whole = (bsam.BSAM(sgd(p.model.parameters()), p.model) for p in (problem, other))
    ours.backward(problem.loss)
    with pytest.raises(ZeroDivisionError):
        ours.backward(lambda: 1 / 0)
    ours.backward(problem.loss)
    ours.step()
    whole.backward(other.loss)
    whole.backward(other.loss)
    whole.step()
    assert same(problem.weights(), other.weights())


def test_clearing_the_gradients_clears_the_offset(problem):
    """An overflow with start_from_min, cleared with model.zero_grad, must not affect the next step."""
    other = problem.clone()
    ours, whole = (bsam.BSAM(sgd(p.model.parameters()), p.model, start_from_min=True) for p in (problem, other))
    ours.backward(lambda: problem.loss() * float("inf"))
    problem.model.zero_grad()
    problem.model.load_state_dict(other.model.state_dict())  # batch norm saw the discarded pass
    ours.backward(problem.loss)
    ours.step()
    whole.step(other.loss)
    assert same(problem.weights(), other.weights())


def test_a_closure_that_clears_keeps_earlier_offsets(plain):
    other = plain.clone()
    ours, whole = (bsam.BSAM(sgd(p.model.parameters()), p.model, start_from_min=True) for p in (plain, other))

    def closure(x, y):
        ours.zero_grad()
        loss = F.cross_entropy(plain.model(x), y)
        loss.backward()
        return loss

    for x, y in zip(plain.x.chunk(2), plain.y.chunk(2), strict=True):
        ours.backward(lambda: closure(x, y))
        whole.backward(lambda: F.cross_entropy(other.model(x), y))
    ours.step()
    whole.step()
    assert same(plain.weights(), other.weights())
