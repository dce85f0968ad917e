"""Products that keep what they share: equal to the exact Hessian, cheaper in operations, and never of weights that are gone."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

import bsam
from bsam.flatness import HessianOperator, top_eigenvalues
from bsam.flatness.dataset_loss import DatasetLoss
from bsam.flatness.linearized import Linearizer

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


def error(H, exact, seed=0):
    v = torch.randn(H.size, dtype=H.dtype, generator=torch.Generator().manual_seed(seed))
    expected = exact @ v.double()
    return float((H.times(v).double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("mode", ["eval", "train"])
@pytest.mark.parametrize("net", ["mlp", "batch norm"])
def test_kept_products_are_those_with_the_exact_hessian(nets, unchanged, net, mode):
    model, data = nets["made"](nets[net], sizes=(7, 2, 7))
    exact = nets["exact"](model, F.cross_entropy, data, mode)
    with unchanged(model):
        H = HessianOperator(model, F.cross_entropy, data, mode=mode, keep_bytes=PLENTY)
        assert error(H, exact) < 1e-12
        assert error(H, exact, seed=1) < 1e-12
    assert H.products == 2


def test_a_product_is_six_convolutions_for_three_of_the_gradient(nets):
    model, data = nets["made"](nets["batch norm"], sizes=(7, 7))
    H = HessianOperator(model, F.cross_entropy, data, keep_bytes=PLENTY)
    v = H.random(torch.Generator().manual_seed(0))
    H.times(v)
    with Operations() as gradient, H.loss.measuring():
        H.loss.value_and_grad()
    with Operations() as product:
        H.times(v)
    layers = 2 * len(data)
    assert gradient.convolutions == 3 * layers - len(data)  # nobody needs the derivative by the images
    assert product.convolutions == 6 * layers - 4 * len(data)  # of the first layer two: its input neither varies with v nor is differentiated by


@pytest.mark.parametrize("share", [0.4, 0.8])
def test_what_the_memory_does_not_hold_is_computed_anew(nets, share):
    model, data = nets["made"](nets["mlp"], sizes=(8, 8, 8, 8, 8))
    exact = nets["exact"](model, F.cross_entropy, data)
    whole = HessianOperator(model, F.cross_entropy, data, keep_bytes=PLENTY)
    v = whole.random(torch.Generator().manual_seed(0))
    whole.times(v)
    per_batch = sum(whole._kept._linearizer.linearized((list(map(torch.Tensor.detach, whole.params)), dict(model.named_buffers()), *data[0]))[1:])
    H = HessianOperator(model, F.cross_entropy, data, keep_bytes=int(share * len(data) * per_batch) + 1)
    assert error(H, exact) < 1e-12
    assert len(H._kept._entries) == round(share * len(data))
    assert error(H, exact, seed=2) < 1e-12
    assert len(H._kept._entries) == round(share * len(data))


def test_batches_beyond_the_memory_are_not_held(nets):
    model, data = nets["made"](nets["mlp"], sizes=(6,) * 5)
    exact = nets["exact"](model, F.cross_entropy, data)
    handed = []

    class Fresh:
        """Batches that nobody else holds, as a loader gives them."""

        def __iter__(self):
            for x, y in data:
                fresh = x.clone()
                handed.append(weakref.ref(fresh))
                yield fresh, y
                del fresh

    H = HessianOperator(model, F.cross_entropy, Fresh(), keep_bytes=20_000)
    assert max(error(H, exact, seed) for seed in range(3)) < 1e-12
    gc.collect()
    kept = len(H._kept._entries)
    assert 0 < kept < 5
    held = [place % 5 for place, reference in enumerate(handed) if reference() is not None]
    assert set(held) <= set(range(kept))


@pytest.mark.parametrize("keep_bytes", [0, 20_000, PLENTY])
def test_the_data_is_walked_once_for_each_product(nets, keep_bytes):
    model, data = nets["made"](nets["mlp"], sizes=(24,))
    walks = Counter()

    class Counted(TensorDataset):
        def __getitem__(self, index):
            walks[int(index)] += 1
            return super().__getitem__(index)

    H = HessianOperator(model, F.cross_entropy, DataLoader(Counted(*data[0]), batch_size=5), keep_bytes=keep_bytes)
    exact = nets["exact"](model, F.cross_entropy, data)
    assert max(error(H, exact, seed) for seed in range(3)) < 1e-12
    assert walks == Counter(dict.fromkeys(range(24), 3))


@pytest.mark.parametrize("keep_bytes", [20_000, PLENTY])
def test_batches_that_differ_from_walk_to_walk_are_refused(nets, keep_bytes):
    model, data = nets["made"](nets["mlp"], sizes=(24,))
    loader = DataLoader(TensorDataset(*data[0]), batch_size=5, shuffle=True, generator=torch.Generator().manual_seed(0))
    H = HessianOperator(model, F.cross_entropy, loader, keep_bytes=keep_bytes)
    exact = nets["exact"](model, F.cross_entropy, data)
    assert error(H, exact) < 1e-12
    with pytest.raises(bsam.Refusal, match="other batches on each walk, and keep_bytes needs the same ones: shuffle=False, or keep_bytes=0"):
        error(H, exact)
    nothing = HessianOperator(model, F.cross_entropy, loader, keep_bytes=1)  # where none is kept the order does not matter
    assert max(error(nothing, exact, seed) for seed in range(2)) < 1e-12


def test_data_that_ends_early_on_a_later_walk_is_refused(nets):
    model, data = nets["made"](nets["mlp"], sizes=(6,) * 5)
    H = HessianOperator(model, F.cross_entropy, data, keep_bytes=20_000)
    H.times(torch.ones(H.size, dtype=H.dtype))
    data.pop()
    with pytest.raises(bsam.Refusal, match="30 samples on the first walk and 24 on a later one"):
        H.times(torch.ones(H.size, dtype=H.dtype))


def test_other_weights_other_products(nets):
    model, data = nets["made"](nets["batch norm"], sizes=(7, 7))
    H = HessianOperator(model, F.cross_entropy, data, keep_bytes=PLENTY)
    assert error(H, nets["exact"](model, F.cross_entropy, data)) < 1e-12
    for what in ("weight", "buffer", "data of a weight"):
        with torch.no_grad():
            match what:
                case "weight":
                    model[0].weight.mul_(1.5)
                case "buffer":
                    model[1].running_var.mul_(1.5)
                case _:
                    model[0].weight.data = model[0].weight.data * 1.5
        assert error(H, nets["exact"](model, F.cross_entropy, data)) < 1e-12


def test_losses_without_a_forward_derivative_go_the_other_way(nets):
    model, data = nets["made"](nets["mlp"], sizes=(9, 9))
    data = [(x, F.one_hot(y, 5).double()) for x, y in data]
    H = HessianOperator(model, F.mse_loss, data, keep_bytes=PLENTY)
    assert error(H, nets["exact"](model, F.mse_loss, data)) < 1e-12


@pytest.mark.parametrize("keep_bytes", [0, PLENTY])
def test_attention_has_a_hessian(nets, keep_bytes):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(4, 2, 6, batch_first=True, dtype=torch.float64)
    model = nn.Sequential(layer, nn.Flatten(), nn.Linear(12, 3, dtype=torch.float64))
    data = [(torch.randn(5, 3, 4, dtype=torch.float64), torch.randint(3, (5,)))]
    H = HessianOperator(model, F.cross_entropy, data, keep_bytes=keep_bytes)
    assert error(H, _dense(H)) < 1e-12
    v, step = torch.randn(H.size, dtype=H.dtype, generator=torch.Generator().manual_seed(0)), 1e-6
    slopes = []
    for sign in (1, -1):
        with torch.no_grad():
            for p, t in zip(H.params, H.vector(v).tensors(), strict=True):
                p.add_(t, alpha=sign * step)
        slopes.append(torch.cat([g.reshape(-1) for g in torch.autograd.grad(F.cross_entropy(model.eval()(data[0][0]), data[0][1]), H.params)]))
        with torch.no_grad():
            for p, t in zip(H.params, H.vector(v).tensors(), strict=True):
                p.add_(t, alpha=-sign * step)
    difference = (slopes[0] - slopes[1]) / (2 * step)
    assert float((H.times(v) - difference).norm() / difference.norm()) < 1e-6


def _dense(H):
    return torch.stack([H.times(e) for e in torch.eye(H.size, dtype=H.dtype)], dim=1)


def test_frozen_and_unused_parameters(nets):
    model, data = nets["made"](nets["mlp"], sizes=(9, 9))
    model[0].weight.requires_grad_(False)
    model.register_parameter("unused", nn.Parameter(torch.ones(3, dtype=torch.float64)))
    H = HessianOperator(model, F.cross_entropy, data, keep_bytes=PLENTY)
    plain = HessianOperator(model, F.cross_entropy, data)
    v = H.random(torch.Generator().manual_seed(0))
    assert float((H.times(v) - plain.times(v)).norm() / plain.times(v).norm()) < 1e-12


def test_eigenvalues_come_out_alike(trained):
    model, data, exact = trained
    H = HessianOperator(model, F.cross_entropy, data, keep_bytes=PLENTY)
    expected = torch.linalg.eigvalsh(exact).flip(0)[:20]
    assert top_eigenvalues(H, k=20, tol=1e-8).values == pytest.approx(expected.numpy(), rel=1e-6)


class Tokens(nn.Module):
    """Divides by a number that depends on the data."""

    def __init__(self, count):
        super().__init__()
        self.linear, self.count = nn.Linear(4, 3, dtype=torch.float64), count

    def forward(self, x):
        return self.linear(x) / self.count(x)


COUNTS = {
    "nonzero": lambda x: len(torch.nonzero(x[:, 0] > 0)),
    "unique": lambda x: torch.unique((2 * x).round()).numel(),
    "a mask": lambda x: x[x[:, 0] > 0].shape[0],
    "masked_select": lambda x: len(x[:, 0].masked_select(x[:, 0] > 0)),
    "item": lambda x: (x[:, 0] > 0).sum().item(),
    "tolist": lambda x: sum(value > 0 for value in x[:, 0].tolist()),
    "numpy": lambda x: int((x[:, 0].numpy() > 0).sum()),
}


@pytest.fixture
def tokens():
    torch.manual_seed(0)
    x, y = torch.randn(20, 4, dtype=torch.float64), torch.randint(0, 3, (20,))
    x[:10, 0], x[10:, 0] = torch.tensor([1.0] * 3 + [-1.0] * 7), torch.tensor([1.0] * 6 + [-1.0] * 4)
    return list(zip(x.split(10), y.split(10), strict=True))


@pytest.mark.parametrize("count", COUNTS.values(), ids=COUNTS)
def test_numbers_that_python_took_from_the_first_batch_are_not_used_for_the_others(tokens, count):
    model = Tokens(count)
    HessianOperator(model, F.cross_entropy, tokens).times(torch.ones(15, dtype=torch.float64))
    with pytest.raises(bsam.Refusal, match=r"leave (keep_bytes|it) 0"):
        HessianOperator(model, F.cross_entropy, tokens, keep_bytes=PLENTY).times(torch.ones(15, dtype=torch.float64))


def test_sizes_from_the_targets_are_refused_in_words_and_tensors_are_not(tokens):
    def masked(out, y):
        return F.cross_entropy(out[y != 0], y[y != 0])

    def weighed(out, y):
        return (F.cross_entropy(out, y, reduction="none") * (y != 0)).sum() / (y != 0).sum() + out[torch.arange(2)].square().mean()

    model = nn.Linear(4, 3, dtype=torch.float64)
    v = torch.randn(15, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with pytest.raises(bsam.Refusal, match=r"^this network \(or loss\) takes sizes from the data: leave keep_bytes 0$"):
        HessianOperator(model, masked, tokens, keep_bytes=PLENTY).times(v)
    kept, plain = (HessianOperator(model, weighed, tokens, keep_bytes=keep_bytes).times(v) for keep_bytes in (PLENTY, 0))
    assert float((kept - plain).norm() / plain.norm()) < 1e-12


class Broken(nn.Linear):
    def forward(self, x):
        raise RuntimeError("by the model itself")


class Counting(nn.Linear):
    """Moves a buffer, in eval mode too."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


def test_errors_are_the_users_own_or_say_what_to_do(unchanged):
    data = [(torch.ones(3, 2), torch.zeros(3, 1))]
    with pytest.raises(RuntimeError, match=r"^by the model itself$"):
        HessianOperator(Broken(2, 1), F.mse_loss, data, keep_bytes=PLENTY).times(torch.zeros(3))
    model = Counting(2, 1)
    with unchanged(model), pytest.raises(bsam.Refusal, match="cannot be recorded as a graph, which keep_bytes needs: leave it 0"):
        HessianOperator(model, F.mse_loss, data, keep_bytes=PLENTY).times(torch.zeros(3))
    with pytest.raises(bsam.Refusal, match="reaches no trainable parameter"):
        HessianOperator(nn.Linear(2, 1), lambda out, y: out.detach().mean(), data, keep_bytes=PLENTY).times(torch.zeros(3))


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(2))

    def forward(self, x):
        return x @ self.w if x.sum() > 0 else x @ self.w**2


@pytest.mark.parametrize(
    ("model", "data", "keep_bytes", "text"),
    [
        (Branching(), [(torch.ones(3, 2), torch.zeros(3))], PLENTY, "cannot be recorded as a graph, which keep_bytes needs: leave it 0"),
        (nn.Linear(2, 1), [(torch.ones(3, 2), [0.0, 1.0, 2.0])], PLENTY, "keep_bytes needs batches whose inputs and targets are tensors"),
        (nn.Linear(2, 1), [(torch.ones(3, 2), torch.zeros(3))], -1, "keep_bytes must be"),
    ],
    ids=["branches on data", "a list as target", "negative"],
)
def test_refused(model, data, keep_bytes, text):
    with pytest.raises(bsam.Refusal, match=text):
        HessianOperator(model, lambda out, y: out.square().mean(), data, keep_bytes=keep_bytes).times(torch.zeros(sum(p.numel() for p in model.parameters())))


# Unasked.


def wide(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(2, 40, 3), nn.Tanh(), nn.Conv2d(40, 28, 3), nn.Tanh(), nn.Flatten(), nn.Linear(28, 4)).double()


@pytest.fixture
def large(monkeypatch):
    """A network and batches of two sizes, for which it is worth it."""
    model, generator = wide(), torch.Generator().manual_seed(1)
    monkeypatch.setattr("bsam.flatness.kept.WORTH", 15 * sum(p.numel() for p in model.parameters()))
    data = [(torch.randn(n, 2, 5, 5, dtype=torch.float64, generator=generator), torch.randint(4, (n,), generator=generator)) for n in (6, 6, 3)]
    return model, data


def apart(H, model=None, data=None, seed=0, loss_fn=F.cross_entropy):
    """How far a product is from one without anything kept."""
    v = H.random(torch.Generator().manual_seed(seed))
    plain = HessianOperator(model or H.loss.model, loss_fn, data or H.loss.data, keep_bytes=0).times(v)
    return float((H.times(v) - plain).norm() / plain.norm())


def test_the_second_product_for_the_same_weights_begins_to_keep(large, unchanged):
    model, data = large
    with unchanged(model):
        H = HessianOperator(model, F.cross_entropy, data)
        v, counts = H.random(torch.Generator().manual_seed(0)), []
        for _ in range(4):
            with Operations() as product:
                H.times(v)
            counts.append(product.convolutions)
        assert apart(H, seed=3) < 1e-12
    layers = 2 * len(data)
    assert counts[2] == counts[3] == 6 * layers - 4 * len(data) < counts[0] < counts[1]
    assert len(H._kept._entries) == len(data)
    with torch.no_grad():
        model[0].weight.mul_(1.1)
    assert apart(H) < 1e-12
    assert not H._kept._entries
    assert max(apart(H, seed=seed) for seed in range(3)) < 1e-12
    assert len(H._kept._entries) == len(data)


def test_a_little_work_is_not_worth_it(large):
    model, data = large
    H = HessianOperator(model, F.cross_entropy, [data[0], (data[1][0][1:], data[1][1][1:]), data[2]])  # a sample less
    for _ in range(4):
        H.times(torch.ones(H.size, dtype=H.dtype))
    assert not H._kept._entries


def test_nor_is_it_for_many_shapes(large):
    model, data = large
    data = [*data, *((data[0][0][:n], data[0][1][:n]) for n in (6, 5, 4))]
    H = HessianOperator(model, F.cross_entropy, data)
    assert max(apart(H, seed=seed) for seed in range(4)) < 1e-12
    assert len(H._kept._entries) == 4
    assert len(H._kept._linearizer._cuts) == 2
    with torch.no_grad():
        model[0].weight.mul_(1.1)
    assert max(apart(H, seed=seed) for seed in range(3)) < 1e-12
    assert len(H._kept._entries) == 4
    asked = HessianOperator(model, F.cross_entropy, data, keep_bytes=PLENTY)
    assert apart(asked) < 1e-12
    assert len(asked._kept._entries) == 6


class Halting(nn.Module):
    """Branches on the data."""

    def __init__(self):
        super().__init__()
        self.inner = wide()

    def forward(self, x):
        return self.inner(x) if x.sum() > 0 else self.inner(x) ** 2


def test_what_cannot_be_recorded_is_computed_plainly(large):
    _, data = large
    H = HessianOperator(Halting(), F.cross_entropy, data)
    assert max(apart(H, seed=seed) for seed in range(4)) < 1e-12
    assert not H._kept._entries


def test_batches_that_differ_are_computed_plainly(large):
    model, data = large
    x, y = (torch.cat(parts) for parts in zip(*data, strict=True))
    loader = DataLoader(TensorDataset(x, y), batch_size=5, shuffle=True, generator=torch.Generator().manual_seed(0))
    shuffled = HessianOperator(model, F.cross_entropy, loader)
    assert max(apart(shuffled, data=[(x, y)], seed=seed) for seed in range(5)) < 1e-12
    assert not shuffled._kept._entries


@pytest.mark.parametrize("micro_batch", [None, 2])
def test_a_batch_that_was_written_into_is_another_one(large, micro_batch):
    model, data = large
    H = HessianOperator(model, F.cross_entropy, data, micro_batch)
    for _ in range(2):
        H.times(torch.ones(H.size, dtype=H.dtype))
    assert H._kept._entries
    x = data[0][0]
    x.data[:3], x.data[3:] = x[3:].clone(), x[:3].clone()  # the same samples, with other labels
    H.loss.__dict__.update(DatasetLoss(model, F.cross_entropy, data, micro_batch).__dict__)  # which would notice that
    assert max(apart(H, seed=seed) for seed in range(3)) < 1e-12


def test_a_recorded_product_that_is_wrong_is_not_used(large, monkeypatch):
    model, data = large
    right = Linearizer.linearized

    def wrong(self, inputs):
        product, size = right(self, inputs)
        return lambda v: [(1 + 1e-6) * t for t in product(v)], size

    monkeypatch.setattr(Linearizer, "linearized", wrong)
    H = HessianOperator(model, F.cross_entropy, data)
    assert max(apart(H, seed=seed) for seed in range(4)) < 1e-12
    assert not H._kept._entries


def test_it_takes_what_room_there_is_and_tries_once(large, monkeypatch):
    model, data = large
    calls, right = [], Linearizer.linearized

    def counted(self, inputs):
        product, size = right(self, inputs)
        calls.append(size)
        return product, size

    monkeypatch.setattr(Linearizer, "linearized", counted)
    HessianOperator(model, F.cross_entropy, data, keep_bytes=PLENTY).times(torch.ones(sum(p.numel() for p in model.parameters()), dtype=torch.float64))
    sizes = list(calls)
    for room, kept in ((sum(sizes[:2]), 2), (sizes[0] - 1, 0)):
        monkeypatch.setattr("bsam.flatness.kept.room_on", lambda device, room=room: room)
        calls.clear()
        H = HessianOperator(model, F.cross_entropy, data)
        assert max(apart(H, seed=seed) for seed in range(5)) < 1e-12
        assert len(H._kept._entries) == kept
        assert len(calls) == kept + 1


def test_memory_that_runs_out_while_it_keeps_is_no_failure(large, monkeypatch):
    model, data = large
    right, calls = Linearizer.linearized, []

    def short(self, inputs):
        calls.append(1)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("no more")
        return right(self, inputs)

    monkeypatch.setattr(Linearizer, "linearized", short)
    H = HessianOperator(model, F.cross_entropy, data)
    assert max(apart(H, seed=seed) for seed in range(4)) < 1e-12
    assert not H._kept._entries
    calls.clear()
    with pytest.raises(torch.OutOfMemoryError):
        HessianOperator(model, F.cross_entropy, data, keep_bytes=PLENTY).times(torch.ones(H.size, dtype=H.dtype))


def test_an_interrupted_walk_goes_on_where_it_kept_last(large):
    model, data = large
    again = []

    def stopping(out, y):
        again.append(1)
        if len(again) == stop:
            raise KeyboardInterrupt
        return F.cross_entropy(out, y)

    stop = 10**9
    H = HessianOperator(model, stopping, data)
    H.times(torch.ones(H.size, dtype=H.dtype))
    stop = len(again) + 12  # while the batches are recorded
    with pytest.raises(KeyboardInterrupt):
        H.times(torch.ones(H.size, dtype=H.dtype))
    assert 0 < len(H._kept._entries) < len(data)
    assert max(apart(H, seed=seed) for seed in range(3)) < 1e-12
    assert len(H._kept._entries) == len(data)


def test_a_penalty_that_the_loss_takes_from_the_weights_is_part_of_the_hessian(large):
    model, data = large

    def penalised(out, y):
        return F.cross_entropy(out, y) + 1e-5 * sum(p.square().sum() for p in model.parameters())

    H = HessianOperator(model, penalised, data)
    assert max(apart(H, seed=seed, loss_fn=penalised) for seed in range(4)) < 1e-12
    with pytest.raises(bsam.Refusal, match=r"takes weights from the network by itself \(a penalty\?\), not by its outputs: leave keep_bytes 0"):
        HessianOperator(model, penalised, data, keep_bytes=PLENTY).times(torch.ones(H.size, dtype=H.dtype))


class Adjustable(nn.Module):
    """With a number, a tensor that is not registered, and inputs by name."""

    def __init__(self):
        super().__init__()
        self.inner, self.scale, self.mask = wide(), 1.0, torch.ones(4, dtype=torch.float64)

    def forward(self, batch):
        ((name, x),) = batch.items()
        return self.inner(x) * self.scale * self.mask + (name == "b") * self.inner(x).square()


def rename(H, model, loss_fn):
    H.loss.data[:] = [({"b": x}, y) for (x,), y in ((tuple(batch.values()), y) for batch, y in H.loss.data)]


CHANGES = {
    "class weights in place": lambda H, model, loss_fn: loss_fn.weight.mul_(torch.tensor([1.0, 2.0, 3.0, 4.0])),
    "other class weights": lambda H, model, loss_fn: setattr(loss_fn, "weight", torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)),
    "label smoothing": lambda H, model, loss_fn: setattr(loss_fn, "label_smoothing", 0.3),
    "a number": lambda H, model, loss_fn: setattr(model, "scale", 2.0),
    "a tensor in place": lambda H, model, loss_fn: model.mask[0].fill_(3.0),
    "another tensor": lambda H, model, loss_fn: setattr(model, "mask", torch.full((4,), 2.0, dtype=torch.float64)),
    "another module": lambda H, model, loss_fn: model.inner.__setitem__(1, nn.Sigmoid()),
    "a hook": lambda H, model, loss_fn: model.inner[2].register_forward_hook(lambda module, inputs, out: 2 * out),
    "the names of the inputs": rename,
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_else_a_product_depends_on_may_change(large, change):
    _, ((x, y), *_) = large
    model, loss_fn = Adjustable(), nn.CrossEntropyLoss(weight=torch.tensor([1.0, 1.0, 1.0, 2.0], dtype=torch.float64))
    H = HessianOperator(model, loss_fn, [({"a": x}, y)], keep_bytes=PLENTY)
    H.times(torch.ones(H.size, dtype=H.dtype))
    assert len(H._kept._entries) == 1
    CHANGES[change](H, model, loss_fn)
    if change == "the names of the inputs":
        with pytest.raises(bsam.Refusal, match="other batches on each walk"):
            H.times(torch.ones(H.size, dtype=H.dtype))
    else:
        assert apart(H, loss_fn=loss_fn) < 1e-12


def test_autocast_and_frozen_weights_are_noticed(large):
    model, data = large
    model, data = model.float(), [(x.float(), y) for x, y in data]
    H = HessianOperator(model, F.cross_entropy, data)
    v = H.random(torch.Generator().manual_seed(0))
    for _ in range(3):
        inside = H.times(v)
    with torch.autocast("cpu", torch.bfloat16):
        assert not torch.equal(H.times(v), inside)
        assert apart(H) < 1e-5
    assert apart(H) < 1e-5
    H = HessianOperator(model, F.cross_entropy, data)
    for _ in range(3):
        H.times(v)
    assert H._kept._entries
    model[0].weight.requires_grad_(False)
    with pytest.raises(bsam.Refusal, match=r"weights were frozen after this was built for them: 0\.weight"):
        H.times(v)


def test_a_network_that_draws_is_left_to_its_draws(large):
    _, data = large

    class Drawing(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = wide()

        def forward(self, x):
            return self.inner(F.dropout(x, 0.3, training=True))

    model = Drawing()
    H = HessianOperator(model, F.cross_entropy, data)
    torch.manual_seed(4)
    assert [apart(H) for _ in range(4)] == [0.0] * 4  # each product begins with the same random numbers
    with pytest.raises(bsam.Refusal, match="draws random numbers: leave keep_bytes 0"):
        HessianOperator(model, F.cross_entropy, data, keep_bytes=PLENTY).times(torch.ones(H.size, dtype=H.dtype))


@pytest.mark.parametrize("keep_bytes", [None, PLENTY])
def test_inputs_that_require_gradients(large, keep_bytes):
    model, data = large
    H = HessianOperator(model, F.cross_entropy, [(x.requires_grad_(), y) for x, y in data], keep_bytes=keep_bytes)
    assert max(apart(H, seed=seed) for seed in range(4)) < 1e-12
    assert len(H._kept._entries) == len(data)


def test_an_interrupt_that_torch_passes_on_as_an_error_is_one(large, monkeypatch):
    model, data = large

    def interrupted(function):
        raise RuntimeError("The following operation failed in the TorchScript interpreter.\nKeyboardInterrupt: ")

    monkeypatch.setattr("bsam.flatness.linearized.make_fx", interrupted)
    H = HessianOperator(model, F.cross_entropy, data)
    H.times(torch.ones(H.size, dtype=H.dtype))
    with pytest.raises(KeyboardInterrupt):
        H.times(torch.ones(H.size, dtype=H.dtype))
    monkeypatch.undo()
    assert apart(H) < 1e-12


def test_memory_that_runs_out_later_is_no_failure_either(large):
    model, data = large
    H = HessianOperator(model, F.cross_entropy, data)
    for _ in range(2):
        H.times(torch.ones(H.size, dtype=H.dtype))

    def short(v):
        raise torch.OutOfMemoryError("no more")

    H._kept._entries[1] = replace(H._kept._entries[1], product=short)
    assert max(apart(H, seed=seed) for seed in range(2)) < 1e-12
    assert not H._kept._entries


def test_a_vector_that_is_no_number_says_nothing_about_the_network(large):
    model, data = large
    H = HessianOperator(model, F.cross_entropy, data)
    H.times(torch.ones(H.size, dtype=H.dtype))
    assert H.times(torch.full((H.size,), torch.nan, dtype=H.dtype)).isnan().any()
    assert max(apart(H, seed=seed) for seed in range(3)) < 1e-12
    assert len(H._kept._entries) == len(data)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda H: pickle.loads(pickle.dumps(H))], ids=["deepcopy", "pickle"])
def test_a_copy_of_the_operator_begins_anew(large, copied):
    model, data = large
    H = HessianOperator(model, F.cross_entropy, data)
    for _ in range(3):
        H.times(torch.ones(H.size, dtype=H.dtype))
    other = copied(H)
    assert not other._kept._entries
    assert max(apart(other, seed=seed) for seed in range(3)) < 1e-12
    assert len(other._kept._entries) == len(data)
