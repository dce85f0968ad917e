"""What backward leaves for step, also where a framework wraps the optimizer."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn import functional as F

import bsam
from bsam.core.other_modules import OtherModules
from bsam.core.wrapper import METHOD
from helpers import same, sgd


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
        with pytest.raises(bsam.BsamError, match="nothing to step with"):
            step.step()
        backward.zero_grad()
        whole.zero_grad()
        assert same(problem.weights(), other.weights())
    assert inner.t == whole.t == outer.t == 4


class Shifted(bsam.SAM):
    """A method with an attribute of its class that an instance replaces, and whose direction refers to the weights."""

    factor = 1.0

    def __init__(self, base, model, *, factor, **options):
        super().__init__(base, model, **options)
        self.factor = factor

    def direction(self, L):
        super().direction(L)
        return self.factor * self.vector(self.params)


@pytest.mark.parametrize("wrap", [Looking, Copying, lambda optimizer: optimizer])
def test_a_method_of_ones_own_that_refers_to_the_weights_and_to_its_attributes(plain, wrap):
    optimizer = wrap(Shifted(sgd(plain.model.parameters()), plain.model, factor=0.5, rho=0.3, same_draws=False))
    optimizer.backward(plain.loss)
    assert same([p.grad for p in plain.model.parameters()], [0.5 * w for w in plain.weights()])
    with pytest.raises(bsam.BsamError, match="Shifted has no argument rho_max"):
        Shifted(sgd(plain.model.parameters()), plain.model, factor=0.5, rho_max=0.1)


def test_an_overflow_in_a_pass_that_the_direction_does_not_contain_skips_the_step(plain):
    optimizer, before = Shifted(sgd(plain.model.parameters()), plain.model, factor=0.5), plain.weights()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**100)
    for factor, moves in ((1e300, False), (1.0, True)):
        optimizer.backward(lambda: factor * plain.loss(), scaler)
        scaler.step(optimizer)
        scaler.update(1.0)
        assert same(before, plain.weights()) is not moves
        optimizer.zero_grad()


def test_an_interrupt_between_restoring_one_thing_and_the_next(problem, monkeypatch):
    optimizer, restore, calls = bsam.SAM(sgd(problem.model.parameters()), problem.model), OtherModules.restore, []

    def interrupted(modules):
        restore(modules)
        calls.append(modules)
        if len(calls) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(OtherModules, "restore", interrupted)
    before = problem.weights(), problem.buffers()
    with pytest.raises(KeyboardInterrupt):
        optimizer.backward(problem.loss)
    assert same(before[0], problem.weights())
    assert same(before[1], problem.buffers())
    assert all(p.grad is None for p in problem.model.parameters())
    optimizer.step(problem.loss)
    assert int(problem.model[1].num_batches_tracked) == 1


@pytest.mark.parametrize("wrap", [Looking, Copying])
def test_a_wrapped_optimizer_saves_and_loads_as_its_method(problem, wrap):
    inner = bsam.BSAM(sgd(problem.model.parameters()), problem.model, rho_max=0.3)
    inner.step(problem.loss)
    saved = wrap(inner).state_dict()
    assert saved["param_groups"][0][METHOD] == "BSAM"
    other = bsam.BSAM(sgd(problem.model.parameters()), problem.model)
    wrap(other).load_state_dict(copy.deepcopy(saved))
    assert (other.t, other.param_groups[0]["rho_max"]) == (1, 0.3)


def test_step_with_nothing_prepared_is_refused(problem):
    optimizer = bsam.BSAM(sgd(problem.model.parameters()), problem.model)
    with pytest.raises(bsam.BsamError, match="nothing to step with"):
        optimizer.step()
    problem.loss().backward()  # an ordinary gradient is no direction
    with pytest.raises(bsam.BsamError, match="nothing to step with"):
        optimizer.step()
    optimizer.zero_grad()
    optimizer.backward(problem.loss)
    optimizer.step()
    with pytest.raises(bsam.BsamError, match="nothing to step with"):
        optimizer.step()
    optimizer.backward(problem.loss)
    optimizer.zero_grad()
    with pytest.raises(bsam.BsamError, match="nothing to step with"):
        optimizer.step()


def test_after_an_exception_the_next_backward_counts(problem):
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


def test_loading_forgets_what_was_prepared(problem):
    optimizer = bsam.BSAM(sgd(problem.model.parameters()), problem.model)
    saved = optimizer.state_dict()
    optimizer.backward(problem.loss)
    optimizer.load_state_dict(saved)
    with pytest.raises(bsam.BsamError, match="nothing to step with"):
        optimizer.step()


def test_clearing_the_gradients_clears_the_start_of_the_step(problem):
    """An overflow under start_from_min, cleared by the model and not by the optimizer, must not reach the next step."""
    other = problem.clone()
    ours, whole = (bsam.BSAM(sgd(p.model.parameters()), p.model, start_from_min=True) for p in (problem, other))
    ours.backward(lambda: problem.loss() * float("inf"))
    problem.model.zero_grad()
    problem.model.load_state_dict(other.model.state_dict())  # the batch statistics of the pass before
    ours.backward(problem.loss)
    ours.step()
    whole.step(other.loss)
    assert same(problem.weights(), other.weights())


def test_a_closure_that_clears_keeps_the_starts_of_earlier_calls(plain):
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
