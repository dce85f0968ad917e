"""Moving the weights and restoring them, with any memory layout."""

from __future__ import annotations

import pytest
import torch
from torch import nn

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
