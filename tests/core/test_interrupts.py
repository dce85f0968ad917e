"""Ctrl-C at each point where CPython looks for signals: nothing stays perturbed, and a step is taken whole or not."""

from __future__ import annotations

import copy
import warnings
from contextlib import suppress
from functools import partial

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.attention import _cur_sdpa_kernel_backends
from torch.overrides import _get_current_function_mode_stack, _pop_mode

import bsam
from bsam.core.tensors import Bucket
from bsam.core.undo import Undo
from bsam.flatness import HessianOperator, Probe, landscape, sharpness
from helpers import alike, same, sgd
from signal_points import interrupt, signal_points

NOTHING = "nothing to step with"
KERNELS = {*_cur_sdpa_kernel_backends()}


@pytest.fixture(autouse=True)
def _gradients():
    yield
    # after a failed test
    torch.set_grad_enabled(True)
    nn.modules.module._global_forward_pre_hooks.clear()
    for _ in _get_current_function_mode_stack():
        _pop_mode()


class Training:
    """A small network with batch norm, dropout and a gradient from half a batch."""

    def __init__(self, method, **settings):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, affine=False), nn.Dropout(0.5))
        self.x = torch.randn(4, 3)
        self.optimizer = method(sgd(self.model.parameters()), self.model, **settings)
        for _ in range(3):
            self.optimizer.step(self.loss)
        self.optimizer.zero_grad()
        self.grads = [torch.ones_like(p) for p in self.model.parameters()]
        self.state = copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict(), torch.get_rng_state()))

    def loss(self, indices=slice(None)):
        return self.model(self.x[indices]).square().mean(1)

    def reset(self):
        """Begin again from the first state."""
        model, optimizer, generator = copy.deepcopy(self.state)
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)
        torch.set_rng_state(generator)
        for p, g in zip(self.model.parameters(), self.grads, strict=True):
            p.grad = g

    def current(self):
        return self.model.state_dict(), self.optimizer.state_dict(), torch.get_rng_state()

    def check_unchanged(self):
        """Weights, buffers, gradients and the optimizer's state are the first ones; torch is as it was."""
        model, optimizer, _ = self.current()
        assert alike([model, optimizer], [*self.state[:2]])
        for p, g in zip(self.model.parameters(), self.grads, strict=True):
            assert p.grad is g
            assert g.eq(1).all()
            assert p.requires_grad
        check_torch()


def check_torch():
    assert torch.is_grad_enabled()
    assert not nn.modules.module._global_forward_pre_hooks
    assert not _get_current_function_mode_stack()
    assert {*_cur_sdpa_kernel_backends()} == KERNELS
    assert torch.backends.mha.get_fastpath_enabled()
    assert torch._dynamo.eval_frame._stance.stance == "default"
    assert forward_ad._current_level == -1
    with forward_ad.dual_level():  # torch counts the levels twice
        pass


@pytest.mark.parametrize(
    ("method", "settings", "every"),
    [
        (bsam.SAM, {}, 1),
        (bsam.BSAM, {"start_from_min": True}, 1),
        (bsam.LookSAM, {"k": 1}, 23),
        (bsam.VaSSO, {}, 23),
        (bsam.ESAM, {}, 23),
        (bsam.CRSAM, {}, 23),
    ],
)
def test_an_interrupted_backward_changes_nothing(method, settings, every):
    """And the next step is the one that would have been taken."""
    training = Training(method, **settings)
    optimizer = training.optimizer

    def backward():
        optimizer.backward(training.loss)

    points = signal_points(backward, training.reset)
    optimizer.step()
    expected = training.current()
    training.reset()
    for point in points[::every]:
        torch.set_rng_state(training.state[2])
        interrupt(backward, point)
        training.check_unchanged()
        # as after the first pass, or as this pass found them
        assert any(torch.equal(torch.get_rng_state(), states[2]) for states in (training.state, expected))
        with pytest.raises(bsam.BsamError, match=NOTHING):
            optimizer.step()
    torch.set_rng_state(training.state[2])
    backward()
    optimizer.step()
    assert alike(expected, training.current())


@pytest.mark.parametrize(("method", "settings"), [(bsam.BSAM, {}), (bsam.LookSAM, {"k": 1}), (bsam.ASAM, {})])
def test_an_interrupt_where_memory_is_freed_changes_nothing(method, settings, monkeypatch):
    """As on a GPU, where the backup of the weights ends with the passes, and gradients are overwritten by sums."""
    monkeypatch.setattr(Bucket, "on_cpu", False)
    freeing = ("keep_only", "free", "store", "store_", "_drop_backup", "begin_pass")
    training = Training(method, **settings)
    optimizer = training.optimizer

    def backward():
        optimizer.backward(training.loss)

    points = signal_points(backward, training.reset, within=freeing)
    training.reset()
    for point in points[::29]:
        torch.set_rng_state(training.state[2])
        interrupt(backward, point)
        training.check_unchanged()
        assert optimizer._weights._backup == []
        with pytest.raises(bsam.BsamError, match=NOTHING):
            optimizer.step()


@pytest.mark.parametrize("method", [bsam.SAM, bsam.BSAM, bsam.VaSSO])
def test_an_interrupt_after_an_error_of_the_closure_changes_nothing(method):
    """While what the passes changed is put back."""
    training = Training(method)
    calls = 0

    def second_pass_fails():
        nonlocal calls
        calls += 1
        if calls == 2:
            raise ValueError
        return training.loss()

    def run():
        nonlocal calls
        calls = 0
        with suppress(ValueError):
            training.optimizer.backward(second_pass_fails)

    points = signal_points(run, training.reset, ["end"])
    assert points
    for point in points:
        training.reset()
        interrupt(run, point)
        assert calls == 2
        training.check_unchanged()
        with pytest.raises(bsam.BsamError, match=NOTHING):
            training.optimizer.step()


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        (bsam.SAM, {"rho_floor": 0.01, "warmup": 10}),
        (bsam.BSAM, {"start_from_min": True}),
        (bsam.VaSSO, {}),
        (bsam.AESAM, {"total_steps": 100}),
    ],
)
def test_an_interrupted_step_is_taken_whole_or_not_at_all(method, settings):
    training = Training(method, **settings)
    optimizer = training.optimizer

    def prepare():
        training.reset()
        optimizer.backward(training.loss)

    points = signal_points(optimizer.step, prepare)
    expected = training.current()
    taken = 0
    for point in points:
        prepare()
        interrupt(optimizer.step, point)
        check_torch()
        taken += not optimizer.is_ready
        if optimizer.is_ready:
            assert same([*training.model.parameters()], [*training.state[0].values()][:2])
            assert optimizer.t == 3
            optimizer.step()
        assert alike(expected, training.current())
    assert 0 < taken < len(points)


@pytest.mark.parametrize("method", [bsam.SAM, bsam.MSAM])
def test_an_interrupted_step_with_a_closure_leaves_no_step_with_a_part_of_a_gradient(method):
    training = Training(method)
    optimizer = training.optimizer

    def step():
        optimizer.step(training.loss)

    points = signal_points(step, training.reset)
    after = training.current()
    for point in points[::19]:
        training.reset()
        optimizer.backward(training.loss)
        interrupt(step, point)
        check_torch()
        stepped = optimizer.t == 4
        assert same([*training.model.parameters()], [*(after if stepped else training.state)[0].values()][:2])
        if not optimizer.is_ready:
            with pytest.raises(bsam.BsamError, match=NOTHING):
                optimizer.step()
        optimizer.step(training.loss)
        assert optimizer.t == 4 + stepped


def test_an_interrupted_check_changes_nothing(capsys):
    training = Training(bsam.SAM)

    def check():
        training.optimizer.check(training.loss)

    points = signal_points(check, training.reset)
    for point in points[::23]:
        interrupt(check, point)
        training.check_unchanged()
        assert torch.equal(torch.get_rng_state(), training.state[2])
        with pytest.raises(bsam.BsamError, match=NOTHING):
            training.optimizer.step()
    capsys.readouterr()


def mean_square(out, y):
    return (out - y).square().mean()


MEASURES = {
    "sharpness": lambda model, data: sharpness(model, mean_square, data, steps=2, random_directions=1),
    "landscape": lambda model, data: landscape(model, mean_square, data, points=3, dims=1),
    "product": lambda model, data: HessianOperator(model, mean_square, data).times(torch.ones(12)),
    "product in forward mode": lambda model, data: HessianOperator(
        model, mean_square, data, differentiation="forward"
    ).times(torch.ones(12)),
}


@pytest.mark.parametrize("mode", ["eval", "train"])
@pytest.mark.parametrize("measure", MEASURES)
def test_an_interrupted_measurement_changes_nothing(measure, mode):
    training = Training(bsam.SAM)
    model = training.model
    data = [(training.x, torch.zeros(4, 3))]

    def run():
        MEASURES[measure](model, data)

    def prepare():
        training.reset()
        model.train(mode == "train")
        model[1].eval()

    points = signal_points(run, prepare)
    for point in points[::41]:
        interrupt(run, point)
        training.check_unchanged()
        assert torch.equal(torch.get_rng_state(), training.state[2])
        assert [m.training for m in model] == [mode == "train", False, mode == "train"]
        assert model[1].running_mean is model[1]._buffers["running_mean"]


@pytest.mark.parametrize("differentiation", ["forward", "reverse"])
def test_an_interrupt_while_a_product_changes_torch(differentiation):
    """No mode, no level of forward mode and no choice of kernels stays, and KeyboardInterrupt is raised."""
    model = nn.Linear(2, 1)
    data = [(torch.ones(2, 2), torch.zeros(2, 1))]
    H = HessianOperator(model, mean_square, data, differentiation=differentiation)
    H._compared = [p._version for p in H.params]
    v = torch.ones(3)
    expected = H.times(v)

    def run():
        H.times(v)

    filters = list(warnings.filters)
    begin = signal_points(run, lambda: None, ["substitute", "_sdpa_kernel", "_attach_tangents", "enter_dual_level"])
    begin += signal_points(run, lambda: None, ["preserve"])
    end = signal_points(run, lambda: None, ["__exit__"])
    for point in begin + end[::4]:
        interrupt(run, point)
        check_torch()
        assert warnings.filters == filters
        assert torch.equal(H.times(v), expected)


@pytest.mark.parametrize("call", ["step", "check"])
def test_an_interrupt_leaves_no_global_hook(call, capsys):
    model = nn.Linear(2, 1)
    x = torch.ones(2, 2)

    def run():
        optimizer = bsam.SAM(sgd(model.parameters()), None)
        getattr(optimizer, call)(lambda: model(x).square().mean())

    points = signal_points(run, lambda: None, ["observe_calls", "_remove_global_hook"])
    assert points
    for point in points:
        interrupt(run, point)
        check_torch()
    capsys.readouterr()


def test_an_interrupted_step_with_a_probe():
    training = Training(bsam.SAM)
    training.optimizer.observers.append(Probe(every=1))

    def backward():
        training.optimizer.backward(training.loss)

    points = signal_points(backward, training.reset)
    training.reset()
    for point in points[::13]:
        torch.set_rng_state(training.state[2])
        interrupt(backward, point)
        training.check_unchanged()


def test_undo():
    """The last function first; all of them, even if one raises; an interrupted one again."""
    called = []

    def interrupted_once():
        called.append("c")
        if called.count("c") == 1:
            raise KeyboardInterrupt

    def broken():
        called.append("broken")
        raise KeyError

    def register(undo, *functions):
        undo.callback(called.append, "a")
        for function in functions:
            undo.callback(function)

    with pytest.raises(KeyboardInterrupt), Undo() as undo, undo:
        register(undo, interrupted_once, partial(called.append, "d"))
    assert called == ["d", "c", "c", "a"]
    called.clear()
    with pytest.raises(KeyError), Undo() as undo, undo:
        register(undo, broken)
    assert called == ["broken", "broken", "a"]
    with pytest.raises(RuntimeError, match="not entered twice"), Undo() as undo:
        register(undo)
