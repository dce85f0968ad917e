"""Parameters in half precision: running means in float32, and coefficients that exceed float16."""

from __future__ import annotations

import copy
import io
import pickle
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import bsam
from bsam.common.method_info import Need
from bsam.core.vector import Vector
from bsam.methods import METHODS
from helpers import alike, assert_close, same, sgd

HALF = [torch.bfloat16, torch.float16]
MEANS = {
    "vasso": partial(bsam.VaSSO, theta=0.002),
    "friendly": partial(bsam.FriendlySAM, decay=0.998),
}
EVERY = {name: method for name, method in METHODS.items() if name != "aesam"} | {
    "aesam": partial(bsam.AESAM, total_steps=6),
    "aesam-reuse": partial(bsam.AESAM, total_steps=6, alpha=0.2),
    "bsam-2": partial(bsam.BSAM, passes=2),
    "bsam-adaptive": partial(bsam.BSAM, adaptive=True),
    "bsam-every": partial(bsam.BSAM, every=3),
    "bsam-released": partial(bsam.BSAM, start_from_min=True),
    "gam-paper": partial(bsam.GAM, form="paper"),
    "sam-share": partial(bsam.SAM, ascent=0.5),
}


@pytest.mark.parametrize("dtype", [*HALF, torch.float32, torch.float64])
@pytest.mark.parametrize("make", MEANS.values(), ids=MEANS)
def test_running_means_move(make, dtype):
    """From 1 towards 2, by 0.002 of the way in each step; in bfloat16 it stayed at 1."""
    w = nn.Parameter(torch.ones(3, dtype=dtype))
    optimizer = make(torch.optim.SGD([w], lr=0.0), None, rho=0.01)
    for t in range(60):
        optimizer.step(lambda t=t: (w * (1.0 if t == 0 else 2.0)).sum())
    mean = optimizer.state[w]["gradient_mean"]
    assert mean.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert mean.tolist() == [pytest.approx(2 - 0.998**59, abs=1e-3)] * 3


def half_problem(dtype, steps, make):
    """Steps of a small network, each with a batch of its own."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)
    optimizer = make(sgd(model.parameters(), lr=0.1), model)
    x, y = torch.randn(60, 16, 6).to(dtype), torch.randint(0, 3, (60, 16))

    def step(t, model=model, optimizer=optimizer):
        optimizer.step(lambda: F.cross_entropy(model(x[t]).float(), y[t]))

    for t in range(steps):
        step(t)
    return model, optimizer, step


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("make", MEANS.values(), ids=MEANS)
def test_means_in_float32_survive_checkpoints_and_copies(make, dtype):
    """torch's load_state_dict casts the state to the type of the parameters."""
    model, optimizer, step = half_problem(dtype, 5, make)
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict()], file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    fresh, loaded, _ = half_problem(dtype, 0, make)
    fresh.load_state_dict(saved[0])
    loaded.load_state_dict(saved[1])
    pairs = [(fresh, loaded), copy.deepcopy((model, optimizer)), pickle.loads(pickle.dumps((model, optimizer)))]
    assert all(alike(other.state_dict(), optimizer.state_dict()) for _, other in pairs)
    for t in range(5, 8):
        step(t)
        for other in pairs:
            step(t, *other)
    for other, twin in pairs:
        assert same([p.detach() for p in other.parameters()], [p.detach() for p in model.parameters()])
        assert alike(twin.state_dict(), optimizer.state_dict())
    means = [entry["gradient_mean"] for entry in optimizer.state.values()]
    assert all(t.dtype == torch.float32 for t in means)
    written = [entry["gradient_mean"] for entry in saved[1]["state"].values()]
    assert not any(a.data_ptr() == b["gradient_mean"].data_ptr() for a, b in zip(written, loaded.state.values()))  # noqa: B905


def test_means_of_older_checkpoints_are_cast_to_float32():
    model, optimizer, _ = half_problem(torch.bfloat16, 3, MEANS["vasso"])
    state = copy.deepcopy(optimizer.state_dict())
    for entry in state["state"].values():
        entry["gradient_mean"] = entry["gradient_mean"].bfloat16()
    optimizer.load_state_dict(state)
    means = [optimizer.state[p]["gradient_mean"] for p in model.parameters()]
    assert all(t.dtype == torch.float32 for t in means)
    assert same([t.bfloat16() for t in means], [entry["gradient_mean"] for entry in state["state"].values()])


def test_means_stay_in_float32_in_a_combined_optimizer():
    torch.manual_seed(0)
    a, b = nn.Linear(4, 4).bfloat16(), nn.Linear(4, 4).double()
    x = torch.randn(8, 4)

    def build():
        members = [sgd(a.parameters()), torch.optim.AdamW(b.parameters(), lr=0.01)]
        return bsam.VaSSO(bsam.CombinedOptimizer(members), None, theta=0.1)

    optimizer, other = build(), build()
    for _ in range(3):
        optimizer.step(lambda: b(a(x.bfloat16()).double()).square().mean())
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for o in (optimizer, other):
        types = [o.state[p]["gradient_mean"].dtype for p in (*a.parameters(), *b.parameters())]
        assert types == [torch.float32] * 2 + [torch.float64] * 2
    assert alike(optimizer.state_dict(), other.state_dict())


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("make", MEANS.values(), ids=MEANS)
def test_half_precision_is_near_float64(make, dtype):
    """The same gradients in float64: perturbations agree to the precision of the weights."""
    ends = []
    for kind in (dtype, torch.float64):
        torch.manual_seed(0)
        w = nn.Parameter(torch.linspace(-1, 1, 8, dtype=kind))
        optimizer = make(torch.optim.SGD([w], lr=0.0), None, rho=0.5)
        slopes = torch.randn(40, 8).to(dtype).to(kind)
        moved = []

        def loss(t, kind=kind, w=w, slopes=slopes, moved=moved):
            moved.append(w.detach().clone().double())
            return (w * slopes[t]).sum()

        for t in range(40):
            optimizer.step(lambda t=t: loss(t))
        ends.append(moved[-1])
    assert_close(ends[:1], ends[1:], atol=2 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("factor", [0.0, 1e-7, 1e-4])
@pytest.mark.parametrize("name", sorted(EVERY))
def test_tiny_and_zero_gradients(name, factor, dtype):
    """A radius divided by the length of a tiny gradient exceeds float16; zero gradients move nothing."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)
    x, y, ids = torch.randn(16, 6).to(dtype), torch.randint(0, 3, (16,)), torch.arange(16)
    base = sgd(model.parameters(), lr=0.01)
    loss = None
    if name == "saf":
        loss = bsam.SAF(samples=16, classes=3, start_epoch=0, epochs_back=1)
    elif name == "mesa":
        loss = bsam.MESA(model, base, start_epoch=0)
    optimizer = bsam.SAM(base, model) if loss is not None else EVERY[name](base, model)

    def closure(indices=slice(None)):
        outputs = model(x[indices])
        if loss is not None:
            return factor * loss(outputs, y, inputs=x, indices=ids)
        losses = factor * F.cross_entropy(outputs.float(), y[indices], reduction="none")
        if Need.OUTPUTS in optimizer.needs:
            return losses.mean(), outputs
        return losses if Need.PER_SAMPLE_LOSSES in optimizer.needs else losses.mean()

    before = [p.detach().clone() for p in model.parameters()]
    for t in range(4):
        if loss is not None:
            loss.set_epoch(t)
        optimizer.step(closure)
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert factor > 0 or same(before, [p.detach() for p in model.parameters()])


@pytest.mark.parametrize("c", [7e4, torch.tensor(5e10)])
def test_coefficients_beyond_float16(c):
    x = torch.tensor([6e-8, 0.0, -6e-8]).half()
    g = Vector([x.clone()], scratch=True)
    expected = (x.double() * float(c)).half()
    assert_close((c * g).tensors(), [expected], atol=4)
    y = [[torch.ones(3).half()]]
    (c * g).add_to(y, 0)
    assert_close(y[0], [(1 + expected.double()).half()], atol=4)
    assert_close((c * g).materialize_()[0], [expected], atol=4)


@pytest.mark.parametrize("dtype", HALF)
def test_sums_with_float32_terms_are_rounded_once(dtype):
    """As a running mean in float32 and a gradient in half precision are combined, evaluated and added to weights."""
    torch.manual_seed(0)
    g = Vector([torch.randn(7).to(dtype)], scratch=True)
    mean = Vector([torch.randn(7)], g.layout)
    c = 1.0 + 2.0**-12  # not representable in half precision
    v = c * g - mean / 3
    wide = c * next(iter(g.terms)).buckets[0][0].double() - next(iter(mean.terms)).buckets[0][0].double() / 3
    w = torch.randn(7).to(dtype)
    moved = [[w.clone()]]
    v.add_to(moved, 0)
    assert_close(v.tensors(wide=True), [wide.float()], atol=1e-6)
    assert same(v.tensors(), [wide.to(dtype)])
    assert same(moved[0], [(w.double() + wide).to(dtype)])
    torch.testing.assert_close(v.norm().double(), wide.norm(), rtol=1e-6, atol=0)
    torch.testing.assert_close(v.dot(g).double(), wide @ (g.tensors()[0].double()), rtol=1e-5, atol=1e-6)
    assert v.map(lambda i, t: t * 1).tensors()[0].dtype == dtype
    assert v.materialize_()[0][0].dtype == dtype
    assert (mean * 2.0).materialize_()[0][0].dtype == dtype
