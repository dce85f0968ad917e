"""Products that keep what they share: equal to the exact Hessian, cheaper in operations, and never of weights that are gone."""

from __future__ import annotations

import gc
import weakref
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

import bsam
from bsam.flatness import HessianOperator, top_eigenvalues

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
    kept, rest = H._kept.now()
    assert (len(kept), len(list(rest))) == (round(share * len(data)), round((1 - share) * len(data)))
    assert error(H, exact, seed=2) < 1e-12


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
    kept, _ = H._kept.now()
    assert 0 < len(kept) < 5
    held = [place % 5 for place, reference in enumerate(handed) if reference() is not None]
    assert set(held) <= set(range(len(kept)))


def test_the_data_is_walked_once_so_that_a_shuffling_loader_counts_every_sample_once(nets):
    model, data = nets["made"](nets["mlp"], sizes=(24,))
    walks = Counter()

    class Counted(TensorDataset):
        def __getitem__(self, index):
            walks[int(index)] += 1
            return super().__getitem__(index)

    loader = DataLoader(Counted(*data[0]), batch_size=5, shuffle=True)
    one = HessianOperator(model, F.cross_entropy, loader, keep_bytes=PLENTY)
    exact = nets["exact"](model, F.cross_entropy, data)
    torch.manual_seed(0)
    assert max(error(one, exact, seed) for seed in range(3)) < 1e-12
    assert walks == Counter(range(24))


def test_a_shuffling_loader_is_refused_where_the_memory_does_not_hold_all_of_it(nets):
    model, data = nets["made"](nets["mlp"], sizes=(24,))
    exact = nets["exact"](model, F.cross_entropy, data)
    torch.manual_seed(0)
    loaders = [DataLoader(TensorDataset(*data[0]), batch_size=5, shuffle=shuffle) for shuffle in (False, True)]
    straight, shuffled = (HessianOperator(model, F.cross_entropy, loader, keep_bytes=20_000) for loader in loaders)
    assert max(error(straight, exact, seed) for seed in range(3)) < 1e-12
    assert straight._kept.now()[0]
    assert list(straight._kept.now()[1])
    with pytest.raises(bsam.Refusal, match="another order on each walk; keep_bytes needs the same order: shuffle=False, or keep_bytes large enough"):
        error(shuffled, exact)
    nothing = HessianOperator(model, F.cross_entropy, loaders[1], keep_bytes=1)  # where none is kept the order does not matter
    assert error(nothing, exact) < 1e-12


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
