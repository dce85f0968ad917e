"""Products inside of ``H.linearized()`` equal plain ones, take fewer operations, and leave nothing behind."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, TensorDataset

from bsam.flatness import HessianOperator, spectral_density, top_eigenvalues, trace
from bsam.flatness.linearized import Recorder, make_fx

PLENTY = 1 << 40


class Operations(TorchDispatchMode):
    """Counts convolutions, in units of one: a backward that gives two gradients is two."""

    def __init__(self):
        super().__init__()
        self.convolutions = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name()
        if name == "aten::convolution":
            self.convolutions += 1
        elif name == "aten::convolution_backward":
            self.convolutions += sum(args[-1][:2])
        return func(*args, **(kwargs or {}))


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
    return network(), [(x.clone(), y) for x, y in parts]  # as loaders give them: each in memory of its own


def of_sizes(data, *sizes):
    """Batches of the first samples."""
    (x, y), *_ = data
    return [(x[:n], y[:n]) for n in sizes]


@pytest.fixture
def recordings(monkeypatch):
    """Counts graphs that are recorded."""
    calls, right = [], Recorder.record

    def counted(self, *arguments, **keywords):
        calls.append(keywords["forward"])
        return right(self, *arguments, **keywords)

    monkeypatch.setattr(Recorder, "record", counted)
    return calls


@pytest.fixture(scope="module")
def graphs():
    return {}


@pytest.fixture
def traced_once(monkeypatch, graphs):
    """Graphs of the small network with cross entropy are traced once for each shape of a batch.

    Weights and batches are inputs of a graph. Only for tests of what is done with graphs: tracing takes most of their
    time.
    """

    def traced(function):
        def trace(*inputs):
            shapes = tuple(t.shape for t in tree_leaves(inputs))
            if shapes not in graphs:
                graphs[shapes] = make_fx(function)(*inputs)
            return graphs[shapes]

        return trace

    monkeypatch.setattr("bsam.flatness.linearized.make_fx", traced)


of_graphs = pytest.mark.usefixtures("traced_once")


def product(H, seed=0):
    return H.times(H.random(torch.Generator().manual_seed(seed)))


def apart(found, expected):
    return float((found - expected).norm() / expected.norm())


def error(H, exact, seed=0):
    return apart(product(H, seed), exact @ H.random(torch.Generator().manual_seed(seed)))


def check_same(H, recorded=None, reason=""):
    """A product inside of the scope equals the one outside; return the recording."""
    expected = product(H)
    with H.linearized(PLENTY) as recording:
        assert apart(product(H), expected) < 1e-12 or not expected.any()
        assert recorded in (None, recording.recorded)
        assert reason in recording.note
    return recording


@pytest.mark.parametrize("mode", ["eval", "train"])
@pytest.mark.parametrize("net", ["mlp", "batch norm"])
def test_products_are_those_with_the_exact_hessian(nets, unchanged, net, mode):
    model, data, exact = nets["reference"](nets[net], mode)
    H = HessianOperator(model, F.cross_entropy, data, mode=mode)
    with unchanged(model), H.linearized(PLENTY) as recording:
        assert max(error(H, exact, seed) for seed in range(2)) < 1e-12
    assert H.products == 2
    assert (recording.recorded, recording.batches, recording.reason, recording.note) == (3, 3, "", "")
    assert recording.bytes > 0


def test_a_product_is_six_convolutions_for_three_of_the_gradient_and_a_bare_one_keeps_nothing(nets):
    model, data = nets["made"](nets["batch norm"], sizes=(7, 7))
    H = HessianOperator(model, F.cross_entropy, data)
    product(H)  # the first one also checks data and loss
    with Operations() as gradient, H.loss.measuring():
        H.loss.value_and_grad()
    counts = []
    for _ in range(3):
        with Operations() as bare:
            product(H)
        counts.append(bare.convolutions)
    with H.linearized(PLENTY), Operations() as inside:
        product(H)
    with Operations() as afterwards:
        product(H)
    layers = 2 * len(data)
    assert gradient.convolutions == 3 * layers - len(data)  # nobody needs the derivative by the images
    assert inside.convolutions == 6 * layers - 4 * len(data)  # of the first layer two: its input is constant
    assert len({*counts, afterwards.convolutions}) == 1
    assert counts[0] > inside.convolutions


def test_changes_after_the_scope_count(small):
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


@of_graphs
def test_entering_again_inside_records_nothing(small, recordings):
    H = HessianOperator(small[0], F.cross_entropy, of_sizes(small[1], 6, 6, 3))
    with H.linearized(PLENTY) as outer:
        assert len(recordings) == 2  # one for each shape
        with H.linearized() as inner:
            product(H)
        assert inner is outer
        top_eigenvalues(H, k=2, tol=1e-2)
        trace(H, samples=6)
        assert outer.recorded == 3
    assert len(recordings) == 2


MEASURES = {
    "top_eigenvalues": lambda H: top_eigenvalues(H, k=1, tol=1e-7).values,
    "trace": lambda H: trace(H, samples=6).value,
    "spectral_density": lambda H: spectral_density(H, steps=4, probes=2).nodes,
}


@of_graphs
@pytest.mark.parametrize("measure", MEASURES)
def test_the_scope_is_entered_where_it_pays_and_gives_the_same_numbers(small, recordings, monkeypatch, measure):
    H = HessianOperator(small[0], F.cross_entropy, small[1])
    plain = MEASURES[measure](H)
    assert not recordings  # too little work
    monkeypatch.setattr("bsam.flatness.hessian.MIN_WORK", 18 * H.size + 1)
    MEASURES[measure](H)
    assert not recordings
    monkeypatch.setattr("bsam.flatness.hessian.MIN_WORK", 18 * H.size)
    np.testing.assert_allclose(MEASURES[measure](H), plain, rtol=1e-10)
    assert len(recordings) == 1


@of_graphs
@pytest.mark.parametrize("held", [0, 1, 2])
def test_what_the_memory_does_not_hold_is_computed_plainly(small, held):
    model, data = small
    H = HessianOperator(model, F.cross_entropy, data)
    expected = [product(H, seed) for seed in range(3)]
    with H.linearized(PLENTY) as recording:
        per_sample = recording.bytes // 18
    with H.linearized(int(per_sample * (6 * held + 2))) as recording:
        for seed in range(3):
            assert apart(product(H, seed), expected[seed]) < 1e-12
        assert recording.recorded == held
        assert recording.note.startswith(f"{3 - held} of 3 batches computed without a recording: max_bytes=")
        assert recording.note.endswith(f"={per_sample * (6 * held + 2)} is not enough for all batches")


@of_graphs
def test_a_loader_that_shuffles_is_right_recorded_or_not(small):
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
            torch.randn(1)  # other random numbers of the caller's: the order of the batches is the same
            assert apart(product(H), expected) < 1e-12
        assert recording.recorded == 1


class Net(nn.Module):
    """``function(network, inputs)`` of a network that has a buffer, and holds a weight outside of its modules."""

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
READS = "RuntimeError: |differs from the product computed without"
NETS = {
    "branches": (lambda net, x: net.inner(x) if x.sum() > 0 else net.inner(x) ** 2, "RuntimeError: "),
    "random numbers": (lambda net, x: net.inner(F.dropout(x, 0.3, training=True)), READS),
    "buffers": (counting, "RuntimeError: "),
    "weights from elsewhere": (
        lambda net, x: net.inner[:3](x) @ net.held[0].T,
        "takes weights from elsewhere than its",
    ),
    **{name: (lambda net, x, n=count: net.inner(x) / n(x[:, 0, 0, 0]), READS) for name, count in COUNTS.items()},
}


@pytest.mark.parametrize("net", NETS)
def test_what_cannot_be_recorded_is_computed_plainly_and_the_result_says_so(small, monkeypatch, net):
    function, reason = NETS[net]
    model, (_, (x, y), *_) = Net(function), small[1]
    torch.manual_seed(7)  # each product begins with the same random numbers
    H = HessianOperator(model, F.cross_entropy, [(x, y), (x.flip(0).abs(), y)])
    recording = check_same(H)
    assert recording.recorded < recording.batches == 2
    assert re.match(f"[12] of 2 batches computed without a recording: .*({reason})", recording.note)
    if net == "branches":
        monkeypatch.setattr("bsam.flatness.hessian.MIN_WORK", 1)
        assert trace(H, samples=6).note == recording.note


def test_penalties_lists_of_targets_and_sparse_inputs_are_computed_plainly(small):
    model, ((x, y), *_) = small

    def penalised(out, y):
        return F.cross_entropy(out, y) + 1e-3 * sum(p.square().sum() for p in model.parameters())

    check_same(HessianOperator(model, penalised, [(x, y)]), 0, "takes weights from elsewhere")
    lists = HessianOperator(model, lambda out, y: F.cross_entropy(out, torch.tensor(y)), [(x, y.tolist())])
    check_same(lists, 0, "inputs and targets are not dense tensors")
    x = torch.eye(3, dtype=torch.float64)
    for inputs, recorded in ((x, 1), (x.to_sparse(), 0)):  # without curvature
        H = HessianOperator(nn.Linear(3, 2).double(), lambda out, y: out.mean(), [(inputs, torch.zeros(3))])
        check_same(H, recorded)
        assert not product(H).any()


@of_graphs
def test_shapes_are_limited_unless_a_budget_is_given(small, recordings, monkeypatch):
    H = HessianOperator(small[0], F.cross_entropy, of_sizes(small[1], 6, 6, 3, 6, 5, 4))
    monkeypatch.setattr("bsam.flatness.hessian.MIN_WORK", 1)
    expected = product(H)
    with H.linearized() as recording:
        assert (recording.recorded, len(recordings)) == (4, 2)
        assert recording.note == "2 of 6 batches computed without a recording: more than 2 shapes of batches"
        assert apart(product(H), expected) < 1e-12
    with H.linearized(PLENTY) as recording:
        assert recording.recorded == 6


def test_a_recorded_product_that_is_wrong_is_not_used(small, monkeypatch, recordings):
    model, data = small
    right = Recorder.linearized

    def wrong(self, x, y):
        times, size = right(self, x, y)
        return lambda v: [(1 + 1e-5) * t for t in times(v)], size

    monkeypatch.setattr(Recorder, "linearized", wrong)
    H = HessianOperator(model, F.cross_entropy, data)
    reason = "a recorded product differs from the product computed without a recording"
    assert check_same(H).note.startswith(f"3 of 3 batches computed without a recording: {reason}")
    assert recordings == [True, False]


def test_without_a_forward_derivative_reverse_mode_is_recorded(nets, recordings):
    model, data = nets["made"](nets["mlp"], sizes=(9, 9))
    data = [(x, F.one_hot(y, 5).double()) for x, y in data]  # torch's mse_loss has none where targets do not vary
    H = HessianOperator(model, F.mse_loss, data)
    with H.linearized(PLENTY) as recording:
        assert error(H, nets["exact"](model, F.mse_loss, data)) < 1e-12
        assert recording.recorded == 2
    assert recordings == [True, False]


@of_graphs
@pytest.mark.parametrize("later", [False, True])
def test_memory_that_runs_out_is_no_failure(small, monkeypatch, later):
    model, data = small
    right, calls = Recorder.linearized, []

    def limited(self, x, y):
        if not later and calls:
            raise torch.OutOfMemoryError("no more")
        times, size = right(self, x, y)

        def once(v):
            calls.append(1)
            if later and len(calls) > 4:
                raise torch.OutOfMemoryError("no more")
            return times(v)

        return once, size

    monkeypatch.setattr(Recorder, "linearized", limited)
    H = HessianOperator(model, F.cross_entropy, data)
    with H.linearized(PLENTY) as recording:
        assert recording.recorded == (3 if later else 0)
        product(H)
    calls.clear()
    recording = check_same(H, 0)
    assert recording.note == "3 of 3 batches computed without a recording: out of memory"
    assert recording.bytes == 0


def selected(out, y):
    return F.mse_loss(out[y > 1], torch.ones_like(out[y > 1]))


@pytest.mark.parametrize("loss_fn", [selected, lambda out, y: F.cross_entropy(out[y > 1], y[y > 1])], ids=["mse", "ce"])
def test_sizes_that_depend_on_the_targets_are_right(small, loss_fn):
    """The number of chosen samples is constant in a graph, and the loss of another batch right nevertheless."""
    model, ((x, _), *_) = small
    data = [(x, torch.tensor([2] * n + [0] * (6 - n))) for n in (5, 1)]
    check_same(HessianOperator(model, loss_fn, data, batch_weight=lambda x, y: (y > 1).sum()))


def test_inputs_count_for_the_budget_and_random_numbers_stay(small, monkeypatch):
    model, ((x, y), *_) = small
    H = HessianOperator(model, F.cross_entropy, DataLoader(TensorDataset(x, y), batch_size=5))
    monkeypatch.setattr("bsam.flatness.hessian.MIN_WORK", 10**12)
    state = torch.get_rng_state()
    with H.linearized():
        pass
    assert torch.equal(torch.get_rng_state(), state)
    wide_inputs = nn.Linear(10_000, 1, bias=False).double()
    H = HessianOperator(wide_inputs, F.mse_loss, [(torch.ones(6, 10_000).double(), torch.zeros(6, 1).double())])
    assert check_same(H, 1).bytes >= 6 * 10_000 * 8


@pytest.mark.parametrize(
    "interrupt", [KeyboardInterrupt(), RuntimeError("failed in the interpreter.\nKeyboardInterrupt: ")]
)
def test_an_interrupt_while_recording_leaves_nothing(small, monkeypatch, unchanged, interrupt):
    model, data = small

    def interrupted(function):
        raise interrupt

    H = HessianOperator(model, F.cross_entropy, data)
    with monkeypatch.context() as patch:
        patch.setattr("bsam.flatness.linearized.make_fx", interrupted)
        with unchanged(model), pytest.raises(KeyboardInterrupt), H.linearized(PLENTY):
            pass
    check_same(H, 3)


def test_frozen_and_unused_parameters(nets):
    model, data = nets["made"](nets["mlp"], sizes=(9, 9))
    model[0].weight.requires_grad_(False)
    model.register_parameter("unused", nn.Parameter(torch.ones(3, dtype=torch.float64)))
    check_same(HessianOperator(model, F.cross_entropy, data), 2)
