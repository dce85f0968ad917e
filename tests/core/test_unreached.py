"""Lengths and reused parts count only the parameters that got a gradient in the step."""

from __future__ import annotations

import copy
import math
import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import bsam
from bsam.core.optimizer import SharpnessAware
from helpers import alike, same, sgd

REMEMBERING = [bsam.VaSSO, bsam.FriendlySAM, bsam.MSAM]


class TwoHeads(nn.Module):
    """A trunk and an auxiliary head with much larger gradients."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
        self.head = nn.Linear(8, 3).double()
        self.x, self.y = torch.randn(24, 6).double(), torch.randint(0, 3, (24,))

    def loss(self, with_head: bool) -> torch.Tensor:
        loss = F.cross_entropy(self.trunk(self.x), self.y)
        return loss + 20 * self.head(self.trunk[:2](self.x)).square().mean() if with_head else loss


def distance_of_reached(model, optimizer, loss) -> float:
    """How far the last pass of the next step moves the parameters that get a gradient in it."""
    w = [p.detach().clone() for p in model.parameters()]
    squares = []

    def closure():
        moved = zip(model.parameters(), w, strict=True)
        squares.append([float((p.detach() - before).square().sum()) for p, before in moved])
        return loss()

    optimizer.step(closure)
    reached = [p.grad is not None for p in model.parameters()]
    return math.sqrt(sum(square for square, counts in zip(squares[-1], reached, strict=True) if counts))


@pytest.mark.parametrize("method", REMEMBERING)
def test_a_head_that_was_used_earlier_does_not_shorten_the_perturbation(method):
    """Before, the means and the momentum of the head counted: |e| of the others was a tenth of the radius."""
    model = TwoHeads()
    optimizer = method(sgd(model.parameters(), lr=0.01), model, rho=0.05)
    for t in range(30):
        e = distance_of_reached(model, optimizer, lambda t=t: model.loss(with_head=t < 5))
        assert e == pytest.approx(0.0 if (t == 0 and method is bsam.MSAM) else 0.05, rel=1e-9)


@pytest.mark.parametrize("method", REMEMBERING)
def test_layers_that_are_dropped_at_random(method):
    """All passes of a step drop the same layers. Before, MSAM's |e| was 0.44 of 0.5 on average."""
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4)).double()
    x = torch.randn(16, 6).double()

    def loss():
        h = torch.tanh(layers[0](x))
        for layer in layers[1:]:
            h = h + torch.tanh(layer(h)) if torch.rand(()) < 0.5 else h
        return (h - 1).square().mean()

    optimizer = method(sgd(layers.parameters(), lr=0.01), layers, rho=0.5)
    e = [distance_of_reached(layers, optimizer, loss) for _ in range(40)]
    assert e[1:] == [pytest.approx(0.5, rel=1e-9)] * 39


@pytest.mark.parametrize("make", [
    partial(bsam.LookSAM, k=2, alpha=0.2),
    partial(bsam.AESAM, total_steps=10, lambda_1=0.0, lambda_2=0.0, alpha=0.2),
])  # fmt: skip
def test_the_reused_part_has_its_length(make):
    """A step with the head and SAM's gradient, then one without either: |d - g| is alpha |g|. Before, it was less."""
    model = TwoHeads()
    optimizer = make(sgd(model.parameters(), lr=1e-3), model, rho=0.05)
    optimizer.step(lambda: model.loss(with_head=True))
    optimizer.zero_grad()
    trunk = list(model.trunk.parameters())
    g = torch.autograd.grad(model.loss(with_head=False), trunk)
    optimizer.backward(lambda: model.loss(with_head=False))
    added = torch.cat([(p.grad - t).flatten() for p, t in zip(trunk, g, strict=True)])
    assert float(added.norm() / torch.cat([t.flatten() for t in g]).norm()) == pytest.approx(0.2, rel=1e-9)


@pytest.mark.parametrize("method", [bsam.VaSSO, bsam.FriendlySAM])
def test_means_of_parameters_without_gradient_stay(method):
    model = TwoHeads()
    optimizer = method(sgd(model.parameters(), lr=0.01), model, rho=0.05)
    optimizer.step(lambda: model.loss(with_head=True))
    before = optimizer.state[model.head.weight]["gradient_mean"].clone()
    assert before.abs().sum() > 0
    for _ in range(3):
        optimizer.step(lambda: model.loss(with_head=False))
        assert torch.equal(optimizer.state[model.head.weight]["gradient_mean"], before)


def test_a_mean_is_not_replaced_by_a_later_pass():
    """The head gets a gradient in the second pass only, after the mean was computed without it."""
    model = TwoHeads()
    optimizer = bsam.VaSSO(sgd(model.parameters(), lr=0.01), model, rho=0.05)
    optimizer.step(lambda: model.loss(with_head=True))
    before = optimizer.state[model.head.weight]["gradient_mean"].clone()
    passes = iter((False, True))
    optimizer.step(lambda: model.loss(with_head=next(passes)))
    assert model.head.weight.grad is not None
    assert torch.equal(optimizer.state[model.head.weight]["gradient_mean"], before)


class Asking(SharpnessAware):
    """Recalls its vector before and after the first pass."""

    vectors = ("gradient",)
    running_means = vectors

    def __init__(self, base, model):
        super().__init__(base, model, {})

    def direction(self, L):
        self.first = self.recall("gradient")
        g = L.grad()
        self.after = self.recall("gradient")
        self.remember("gradient", g)
        return g


def test_a_vector_is_whole_before_the_first_pass_and_outside_a_step():
    model = TwoHeads()
    optimizer = Asking(sgd(model.parameters()), model)
    optimizer.step(lambda: model.loss(with_head=True))
    optimizer.step(lambda: model.loss(with_head=False))
    *trunk, weight, _ = optimizer.after.tensors()
    assert not weight.any()
    assert all(t.any() for t in trunk)
    assert optimizer.first.tensors()[-2].any()
    assert optimizer.recall("gradient").tensors()[-2].any()


def test_vectors_of_parameters_with_gradient_are_not_copied():
    model = TwoHeads()
    optimizer = Asking(sgd(model.parameters()), model)
    for with_head in (True, True, False):
        optimizer.step(lambda w=with_head: model.loss(w))
        if optimizer.t > 1:
            (term,) = optimizer.after.terms
            shared = [t.data_ptr() for t in optimizer.after.layout.join(term.buckets)]
            stored = [optimizer.state[p]["gradient"].data_ptr() for p in model.parameters()]
            assert shared[:4] == stored[:4]
            assert (shared[4:] == stored[4:]) is with_head


def test_msam_repeats_a_pass_only_if_other_parameters_get_a_gradient():
    """And the step is then that of an optimizer which knew them: loss, buffers, generators and weights."""

    def run(uses, knowing):
        torch.manual_seed(1)
        trunk = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 3)).double()
        model = nn.ModuleDict({"trunk": trunk, "head": nn.Linear(8, 3).double()})
        x, y = torch.randn(24, 6).double(), torch.randint(0, 3, (24,))
        optimizer = bsam.MSAM(sgd(model.parameters()), model, rho=0.3)
        losses, calls = [], []

        def loss(with_head):
            calls[-1] += 1
            hidden = trunk[:3](x)
            return F.cross_entropy(trunk[3](hidden) + (model["head"](hidden) if with_head else 0), y)

        for with_head in uses:
            calls.append(0)
            if knowing:
                optimizer.unreached = () if with_head else (6, 7)
            losses.append(float(optimizer.step(lambda w=with_head: loss(w))))
        return calls, losses, [*model.state_dict().values()], torch.get_rng_state()

    uses = [True, True, False, False, False, True, True]
    calls, *ours = run(uses, knowing=False)
    none_repeated, *expected = run(uses, knowing=True)
    assert calls == [1, 1, 2, 1, 1, 2, 1]
    assert none_repeated == [1] * 7
    assert alike(ours, expected)


def test_msam_resumes_bit_for_bit_where_parameters_differ():
    """The state does not say which parameters the last step used: a resumed run may repeat a pass."""
    model = TwoHeads()
    optimizer = bsam.MSAM(sgd(model.parameters(), lr=0.01), model, rho=0.05)
    for with_head in (True, False, False):
        optimizer.step(lambda w=with_head: model.loss(w))
    twin = TwoHeads()
    twin.load_state_dict(model.state_dict())
    resumed = bsam.MSAM(sgd(twin.parameters(), lr=0.01), twin, rho=0.05)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for with_head in (False, True):
        losses = [o.step(lambda m=m, w=with_head: m.loss(w)) for o, m in ((optimizer, model), (resumed, twin))]
        assert torch.equal(*losses)
    assert same([p.detach() for p in model.parameters()], [p.detach() for p in twin.parameters()])


def test_a_reused_vector_is_that_of_one_step():
    """The head's entries of an older SAM step do not count beside those of the last one."""
    model = TwoHeads()
    optimizer = bsam.LookSAM(sgd(model.parameters(), lr=0.01), model, rho=0.05, k=5, alpha=0.2)
    optimizer.step(lambda: model.loss(with_head=True))
    assert "g_v" in optimizer.state[model.head.weight]
    for _ in range(5):
        optimizer.step(lambda: model.loss(with_head=False))
    assert "g_v" not in optimizer.state[model.head.weight]
    optimizer.zero_grad()
    model.loss(with_head=True).backward()
    g = [p.grad.clone() for p in model.parameters()]
    optimizer.zero_grad()
    optimizer.backward(lambda: model.loss(with_head=True))
    parts = [p.grad - t for p, t in zip(model.parameters(), g, strict=True)]
    assert not any(part.any() for part in parts[4:])
    length = torch.cat([t.flatten() for t in g]).norm().item()
    assert torch.cat([part.flatten() for part in parts]).norm().item() == pytest.approx(0.2 * length, rel=1e-5)


@pytest.mark.parametrize("same_draws", [True, False])
def test_msam_stops_to_repeat_passes_that_draw_other_layers(same_draws):
    model = TwoHeads()
    optimizer = bsam.MSAM(sgd(model.parameters(), lr=0.01), model, rho=0.3, same_draws=same_draws)
    uses = iter([True, True, False, True, False, True, False])  # not drawn by torch
    calls = 0

    def closure():
        nonlocal calls
        calls += 1
        return model.loss(with_head=next(uses))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(4):
            optimizer.step(closure)
    assert calls == (5 if same_draws else 4)  # the third step repeats its pass, which then has the head
    assert [str(w.message)[:22] for w in caught] == (["MSAM repeated a pass, "] if same_draws else [])
