"""Moving the weights and restoring them, with any memory layout."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import bsam
from helpers import detached, same, sgd


def layouts() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "channels last": torch.randn(4, 3, 3, 3, dtype=torch.float64).to(memory_format=torch.channels_last),
        "transposed": torch.randn(6, 5, dtype=torch.float64).t(),
        "sliced": torch.randn(5, 8, dtype=torch.float64)[:, ::2],
        "empty": torch.randn(0, 3, dtype=torch.float64),
        "0-dim": torch.randn((), dtype=torch.float64),
    }


@pytest.mark.parametrize("layout", list(layouts()))
def test_parameters_with_any_layout(layout):
    """The steps are those of a contiguous parameter, even if the gradient has a third layout."""
    ends = []
    for order in (lambda t: t, lambda t: t.contiguous()):
        p, q = nn.Parameter(order(layouts()[layout])), nn.Parameter(torch.ones(3, dtype=torch.float64))
        optimizer = bsam.BSAM(sgd([p, q]), None, rho_max=0.3, rho_min=0.2)

        def closure():
            loss = ((p**4).sum() + (p.sum() * q).pow(2).sum()) / 100
            loss.backward()
            if p.dim() == 2 and p.grad.numel():
                p.grad = p.grad.t().contiguous().t()  # as a hook or a kernel may leave it
            return loss

        for _ in range(4):
            optimizer.step(closure)
        ends.append([p.detach().clone(), q.detach().clone()])
    for a, b in zip(*ends, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-13)


def test_the_memory_format_may_change_between_steps():
    torch.manual_seed(0)
    model, x = nn.Conv2d(3, 4, 3).double(), torch.randn(2, 3, 5, 5, dtype=torch.float64)
    optimizer = bsam.BSAM(sgd(model.parameters()), model)
    optimizer.step(lambda: model(x).pow(2).mean())
    model.to(memory_format=torch.channels_last)
    before = detached(model.parameters())
    optimizer.zero_grad()
    optimizer.backward(lambda: model(x).pow(2).mean())
    assert same(before, detached(model.parameters()))
    assert model.weight.is_contiguous(memory_format=torch.channels_last)


def test_parameters_may_be_cast_between_steps(problem):
    optimizer = bsam.SAM(torch.optim.SGD(problem.model.parameters(), lr=0.1), problem.model)
    for dtype in (torch.float32, torch.float64, torch.float32):
        problem.model.to(dtype)
        problem.x = problem.x.to(dtype)
        optimizer.zero_grad()
        before = problem.weights()
        optimizer.backward(problem.loss)
        assert same(before, problem.weights())
        assert problem.model[0].weight.grad.dtype == dtype


@pytest.mark.parametrize("method", [bsam.SAM, bsam.BSAM, bsam.MSAM])
def test_parameters_of_two_groups_that_share_memory(method):
    """Every pass starts from w, and at a learning rate of 0 the weights stay where they are."""
    embedding, head = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    head.weight.data = embedding.weight.data
    x, groups = torch.randn(8, 4), [{"params": list(m.parameters())} for m in (embedding, head)]
    optimizer = method(torch.optim.SGD(groups, lr=0.0, momentum=0.9), nn.ModuleList([embedding, head]))
    w, seen = embedding.weight.detach().clone(), []

    def closure():
        seen.append(embedding.weight.detach().clone())
        return head(embedding(x).tanh()).square().mean()

    for _ in range(5):
        optimizer.step(closure)
        assert torch.equal(embedding.weight, w)
    assert not all(torch.equal(s, w) for s in seen[-2:])  # at this learning rate, BSAM's rho_min is 0


def test_lazy_parameters():
    model, x = nn.Sequential(nn.LazyLinear(4), nn.Tanh(), nn.Linear(4, 1)), torch.randn(8, 3)
    optimizer = bsam.SAM(sgd(model.parameters()), model)
    with pytest.raises(bsam.BsamError, match=r"lazy parameters.*model\(x\)"):
        optimizer.step(lambda: model(x).square().mean())
    with torch.no_grad():
        model(x)
    first, second = (optimizer.step(lambda: model(x).square().mean()) for _ in range(2))
    assert second < first


def test_a_parametrization_that_is_cached_around_the_step():
    """The passes compute the cached weights again, so that the steps are those without the cache."""
    ends = []
    for cache in (contextlib.nullcontext, parametrize.cached):
        torch.manual_seed(0)
        layer, x = nn.utils.parametrizations.weight_norm(nn.Linear(3, 3).double()), torch.randn(8, 3).double()
        optimizer = bsam.BSAM(sgd(layer.parameters()), layer, rho_max=0.2, rho_min=0.1, every=3)
        with cache():
            with torch.no_grad():
                layer(x)
            for _ in range(5):
                optimizer.step(lambda: layer(x).square().square().mean())
        ends.append(detached(layer.parameters()))
    assert same(*ends)


def test_weights_that_an_interrupt_left_perturbed_come_back(plain):
    """Ctrl-C can arrive where nothing can restore them: the next step does, before it looks for frozen parameters."""
    optimizer = bsam.SAM(sgd(plain.model.parameters()), plain.model)
    optimizer.step(plain.loss)
    before = plain.weights()
    optimizer._weights.move(optimizer.vector([torch.ones_like(p) for p in optimizer.params]))
    optimizer.params[0].requires_grad_(False)
    optimizer.backward(plain.loss)
    assert all(torch.equal(a, b) for a, b in zip(before, plain.weights(), strict=True))
