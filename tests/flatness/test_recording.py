"""Products inside ``H.linearized()`` equal plain ones."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader, TensorDataset

from bsam.flatness import HessianOperator, spectral_density, top_eigenvalues, trace
from bsam.flatness.recording import Recorder
from bsam.flatness.second_derivatives import Substitutes

PLENTY = 1 << 40


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 7, 5), nn.Tanh(), nn.Flatten(), nn.Linear(7, 4)).double()


@pytest.fixture
def small():
    """A network and batches of one shape, which is recorded once."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(18, 2, 5, 5, dtype=torch.float64, generator=generator)
    y = torch.randint(4, (18,), generator=generator)
    parts = zip(x.split(6), y.split(6), strict=True)
    return network(), [(x.clone(), y) for x, y in parts]  # in separate memory, as from a loader


def of_sizes(data, *sizes):
    """Batches of these sizes, from the first samples."""
    (x, y), *_ = data
    return [(x[:n], y[:n]) for n in sizes]


@pytest.fixture
def recordings(monkeypatch):
    """A list with an entry for each recorded graph."""
    calls, record = [], Recorder.record

    def counted(self, *arguments, **keywords):
        calls.append(keywords["forward"])
        return record(self, *arguments, **keywords)

    monkeypatch.setattr(Recorder, "record", counted)
    return calls


def product(H, seed=0):
    return H.times(H.random(torch.Generator().manual_seed(seed)))


def apart(actual, expected):
    return float((actual - expected).norm() / expected.norm())


def error(H, exact, seed=0):
    return apart(product(H, seed), exact @ H.random(torch.Generator().manual_seed(seed)))


def check_same(H, recorded=None, reason=""):
    """Check that a product inside the scope equals the one outside; return the recording."""
    expected = product(H)
    with H.linearized(PLENTY) as recording:
        assert apart(product(H), expected) < 1e-12 or not expected.any()
        assert recorded in (None, recording.recorded)
        assert reason in recording.note
    return recording


@pytest.mark.parametrize(("net", "mode"), [("mlp", "eval"), ("batch norm", "eval"), ("batch norm", "train")])
def test_products_equal_those_with_the_dense_hessian(nets, unchanged, net, mode):
    model, data, exact = nets["reference"](nets[net], mode)
    H = HessianOperator(model, F.cross_entropy, data, mode=mode)
    with unchanged(model), H.linearized(PLENTY) as recording:
        assert max(error(H, exact, seed) for seed in range(2)) < 1e-12
    assert H.products == 2
    assert (recording.recorded, recording.batches, recording.reason, recording.note) == (3, 3, "", "")
    assert recording.bytes > 0


def test_changes_after_the_scope_take_effect(small):
    data, model = small[1][:2], Net(lambda net, x: net.inner(x) * net.held[0].norm())
    H = HessianOperator(model, F.cross_entropy, data)
    with H.linearized(PLENTY):
        before = product(H)
    model.held[0] = 2 * model.held[0].detach()
    model.inner[0].weight.data.mul_(2.0)
    model.inner[1] = nn.Sigmoid()
    changed = product(H)
    assert torch.equal(changed, product(HessianOperator(model, F.cross_entropy, data)))
    assert apart(changed, before) > 0.01


def test_nested_scopes_share_the_recording(small, recordings):
    H = HessianOperator(small[0], F.cross_entropy, of_sizes(small[1], 6, 6, 3))
    with H.linearized(PLENTY) as outer:
        assert len(recordings) == 2  # one for each shape
        with H.linearized() as inner:
            product(H)
        assert inner is outer
        trace(H, samples=6)
        assert outer.recorded == 3
    assert len(recordings) == 2


MEASURES = {
    "top_eigenvalues": lambda H: top_eigenvalues(H, k=1, tol=1e-7).values,
    "trace": lambda H: trace(H, samples=6).value,
    "spectral_density": lambda H: spectral_density(H, steps=4, probes=2).nodes,
}


@pytest.mark.parametrize("measure", MEASURES)
def test_measurements_record_if_it_pays(small, recordings, monkeypatch, measure):
    H = HessianOperator(small[0], F.cross_entropy, small[1])
    plain = MEASURES[measure](H)
    assert not recordings  # too little work
    monkeypatch.setattr("bsam.flatness.hessian.MIN_WORK", 18 * H.size + 1)
    MEASURES[measure](H)
    assert not recordings
    monkeypatch.setattr("bsam.flatness.hessian.MIN_WORK", 18 * H.size)
    np.testing.assert_allclose(MEASURES[measure](H), plain, rtol=1e-10)
    assert len(recordings) == 1


@pytest.mark.parametrize("held", [0, 2])
def test_batches_that_do_not_fit_are_computed_plainly(small, held):
    model, data = small
    H = HessianOperator(model, F.cross_entropy, data)
    expected = [product(H, seed) for seed in range(2)]
    with H.linearized(PLENTY) as recording:
        per_sample = recording.bytes // 18
    with H.linearized(int(per_sample * (6 * held + 2))) as recording:
        for seed in range(2):
            assert apart(product(H, seed), expected[seed]) < 1e-12
        assert recording.recorded == held
        assert recording.note.startswith(f"{3 - held} of 3 batches")
        assert "max_bytes" in recording.note


def test_shuffling_loaders(small):
    model, data = small
    x, y = (torch.cat(parts) for parts in zip(*data, strict=True))
    expected = product(HessianOperator(model, F.cross_entropy, [(x, y)]))
    H = HessianOperator(model, F.cross_entropy, DataLoader(TensorDataset(x, y), batch_size=6, shuffle=True))
    with H.linearized(PLENTY) as recording:
        assert max(apart(product(H), expected) for _ in range(2)) < 1e-12
        assert recording.recorded == 3
        size = recording.bytes
    with H.linearized(size // 2) as recording:
        for _ in range(2):
            torch.randn(1)  # does not change the order of the batches
            assert apart(product(H), expected) < 1e-12
        assert recording.recorded == 1


class Net(nn.Module):
    """``function(network, inputs)`` of a network with a buffer and a weight in a list."""

    def __init__(self, function):
        super().__init__()
        self.inner, self.function = network(), function
        self.held = [self.inner[3].weight]
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        return self.function(self, x)


def counting(net, x):
    net.calls += 1  # in eval mode, too
    return net.inner(x)


COUNTS = {
    "nonzero": lambda x: len(torch.nonzero(x > 0)) + 1,
    "a mask": lambda x: x[x > 0].shape[0] + 1,
    "item": lambda x: (x > 0).sum().item() + 1,
}
NETS = {
    "branches": lambda net, x: net.inner(x) if x.sum() > 0 else net.inner(x) ** 2,
    "random numbers": lambda net, x: net.inner(F.dropout(x, 0.3, training=True)),
    "buffers": counting,
    "weights from elsewhere": lambda net, x: net.inner[:3](x) @ net.held[0].T,
    **{name: (lambda net, x, n=count: net.inner(x) / n(x[:, 0, 0, 0])) for name, count in COUNTS.items()},
}


@pytest.mark.parametrize("net", NETS)
def test_batches_that_cannot_be_recorded_are_computed_plainly(small, monkeypatch, net):
    model, (_, (x, y), *_) = Net(NETS[net]), small[1]
    torch.manual_seed(7)  # each product begins with the same random numbers
    H = HessianOperator(model, F.cross_entropy, [(x, y), (x.flip(0).abs(), y)])
    recording = check_same(H)
    assert recording.recorded < recording.batches == 2
    assert re.match("[12] of 2 batches", recording.note)
    if net == "branches":
        monkeypatch.setattr("bsam.flatness.hessian.MIN_WORK", 1)
        assert trace(H, samples=6).note == recording.note


def test_penalties_lists_and_sparse_inputs_are_computed_plainly(small):
    model, ((x, y), *_) = small

    def penalised(out, y):
        return F.cross_entropy(out, y) + 1e-3 * sum(p.square().sum() for p in model.parameters())

    check_same(HessianOperator(model, penalised, [(x, y)]), 0, "penalty")
    lists = HessianOperator(model, lambda out, y: F.cross_entropy(out, torch.tensor(y)), [(x, y.tolist())])
    check_same(lists, 0, "dense tensors")
    x = torch.eye(3, dtype=torch.float64)
    for inputs, recorded in ((x, 1), (x.to_sparse(), 0)):  # without curvature
        H = HessianOperator(nn.Linear(3, 2).double(), lambda out, y: out.mean(), [(inputs, torch.zeros(3))])
        check_same(H, recorded)
        assert not product(H).any()


def test_number_of_shapes_is_limited_unless_a_budget_is_given(small, recordings, monkeypatch):
    H = HessianOperator(small[0], F.cross_entropy, of_sizes(small[1], 6, 3, 6, 5))
    monkeypatch.setattr("bsam.flatness.hessian.MIN_WORK", 1)
    expected = product(H)
    with H.linearized() as recording:
        assert (recording.recorded, len(recordings)) == (3, 2)
        assert recording.note.startswith("1 of 4 batches")
        assert apart(product(H), expected) < 1e-12
    with H.linearized(PLENTY) as recording:
        assert recording.recorded == 4


def test_wrong_recorded_products_are_not_used(small, monkeypatch):
    model, data = small
    linearize = Recorder.linearize

    def wrong(self, x, y):
        times, size = linearize(self, x, y)
        return lambda v: [(1 + 1e-5) * t for t in times(v)], size

    monkeypatch.setattr(Recorder, "linearize", wrong)
    H = HessianOperator(model, F.cross_entropy, data)
    check_same(H, 0, "differs")


def test_reverse_mode_is_recorded_without_a_forward_derivative(nets):
    model, data = nets["made"](nets["mlp"], sizes=(9, 9))
    data = [(x, F.one_hot(y, 5).double()) for x, y in data]  # torch's mse_loss has none where targets do not vary
    H = HessianOperator(model, F.mse_loss, data)
    with H.linearized(PLENTY) as recording:
        assert error(H, nets["exact"](model, F.mse_loss, data)) < 1e-12
        assert recording.recorded == 2


@pytest.mark.parametrize("later", [False, True])
def test_running_out_of_memory_ends_the_recording(small, monkeypatch, later):
    model, data = small
    linearize, calls = Recorder.linearize, []

    def limited(self, x, y):
        if not later and calls:
            raise torch.OutOfMemoryError("no more")
        times, size = linearize(self, x, y)

        def once(v):
            calls.append(1)
            if later and len(calls) > 4:
                raise torch.OutOfMemoryError("no more")
            return times(v)

        return once, size

    monkeypatch.setattr(Recorder, "linearize", limited)
    H = HessianOperator(model, F.cross_entropy, data)
    with H.linearized(PLENTY) as recording:
        assert recording.recorded == (3 if later else 0)
        product(H)
    calls.clear()
    assert check_same(H, 0, "out of memory").bytes == 0


def test_sizes_that_depend_on_the_targets(small):
    """The number of selected samples is constant in a graph, but differs between the batches."""

    def loss_fn(out, y):
        return F.mse_loss(out[y > 1], torch.ones_like(out[y > 1]))

    model, ((x, _), *_) = small
    data = [(x, torch.tensor([2] * n + [0] * (6 - n))) for n in (5, 1)]
    check_same(HessianOperator(model, loss_fn, data, batch_weight=lambda x, y: (y > 1).sum()))


def test_inputs_count_for_the_budget():
    wide_inputs = nn.Linear(10_000, 1, bias=False).double()
    H = HessianOperator(wide_inputs, F.mse_loss, [(torch.ones(6, 10_000).double(), torch.zeros(6, 1).double())])
    assert check_same(H, 1).bytes >= 6 * 10_000 * 8


def test_interrupts_while_recording(small, monkeypatch, unchanged):
    model, data = small

    def interrupted(function):
        raise RuntimeError("failed in the interpreter.\nKeyboardInterrupt: ")

    H = HessianOperator(model, F.cross_entropy, data)
    with monkeypatch.context() as patch:
        patch.setattr("bsam.flatness.recording.make_fx", interrupted)
        with unchanged(model), pytest.raises(KeyboardInterrupt), H.linearized(PLENTY):
            pass
    check_same(H, 3)


class Calls(TorchFunctionMode):
    """Lists the torch functions that are called."""

    def __init__(self):
        super().__init__()
        self.functions = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.functions.append(func)
        return func(*args, **kwargs or {})


def test_ldexp_is_recorded():
    x, e, v = torch.eye(3, dtype=torch.float64), torch.tensor([1, -2, 3]), torch.tensor([1.0, 2.0, -1.0]).double()
    with Calls() as calls, Substitutes():
        torch.ldexp(v, e) + v.ldexp(e)
    assert not {torch.ldexp, torch.Tensor.ldexp} & set(calls.functions)  # tracing them would end this process
    products = []
    for scaled in (lambda out: out * torch.tensor([2.0, 0.25, 8.0]), lambda out: torch.ldexp(out, e)):
        model = nn.Linear(3, 1, bias=False).double()
        nn.init.ones_(model.weight)
        H = HessianOperator(model, lambda out, y, f=scaled: f(out[:, 0]).exp().mean(), [(x, torch.zeros(3))])
        check_same(H, recorded=1)
        products.append(H.times(v))
    assert products[0].norm() > 1
    assert apart(products[1], products[0]) < 1e-12


def test_frozen_and_unused_parameters(nets):
    model, data = nets["made"](nets["mlp"], sizes=(9, 9))
    model[0].weight.requires_grad_(False)
    model.register_parameter("unused", nn.Parameter(torch.ones(3, dtype=torch.float64)))
    check_same(HessianOperator(model, F.cross_entropy, data), 2)
