"""Micro-batches, selected samples and selected parameters."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import bsam
from bsam.core.optimizer import SharpnessAware
from bsam.core.vector import Vector
from helpers import sgd


def test_each_micro_batch_frees_its_graph_before_the_next_is_built(plain):
    alive: list[weakref.ref] = []
    most = 0

    def micro_batches():
        nonlocal most
        for x, y in zip(plain.x.chunk(4), plain.y.chunk(4), strict=True):
            hidden = plain.model[:2](x)
            alive.append(weakref.ref(hidden))
            most = max(most, sum(r() is not None for r in alive))
            loss = F.cross_entropy(plain.model[2:](hidden), y)
            del hidden
            yield loss
            del loss

    bsam.SAM(sgd(plain.model.parameters()), plain.model).backward(micro_batches)
    assert len(alive) == 8
    assert most == 1


def test_methods_that_select_samples_and_parameters(plain):
    seen = []

    class Selecting(SharpnessAware):
        def __init__(self, base, model):
            super().__init__(base, model, {})

        def direction(self, L):
            self.part: Vector = L.grad(wrt=[p.dim() > 1 for p in plain.model.parameters()])
            self.mean = L.value(at=self.part * 0.1)
            return L.grad(subset=torch.tensor([0, 5]))

    def closure(indices=None):
        seen.append(indices)
        x, y = (plain.x, plain.y) if indices is None else (plain.x[indices], plain.y[indices])
        return F.cross_entropy(plain.model(x), y, reduction="none")

    optimizer = Selecting(sgd(plain.model.parameters()), plain.model)
    g = torch.autograd.grad(plain.loss(), list(plain.model.parameters()))
    optimizer.backward(closure)
    for ours, t in zip(optimizer.part.tensors(), g, strict=True):
        torch.testing.assert_close(ours, t if t.dim() > 1 else torch.zeros_like(t))
    moved = plain.clone()
    with torch.no_grad():
        for p, t in zip(moved.model.parameters(), g, strict=True):
            p.add_(t if t.dim() > 1 else 0.0, alpha=0.1)
    torch.testing.assert_close(optimizer.mean, moved.loss().detach())
    expected = torch.autograd.grad(
        F.cross_entropy(plain.model(plain.x[[0, 5]]), plain.y[[0, 5]]), list(plain.model.parameters())
    )
    for p, t in zip(plain.model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, t)
    assert [None if s is None else s.tolist() for s in seen] == [None, None, [0, 5]]


def test_a_generator_is_closed_when_its_micro_batch_fails(plain):
    optimizer = bsam.SAM(sgd(plain.model.parameters()), plain.model)
    closed = []

    def closure():
        try:
            yield plain.loss()
            yield plain.loss().detach()
        finally:
            closed.append(True)

    with pytest.raises(bsam.BsamError, match="grad") as error:
        optimizer.backward(closure)
    assert closed == [True]
    assert error.value is not None  # the traceback would otherwise keep the generator open


@pytest.mark.parametrize(
    "closure", [lambda m, x: (x @ m.mH).abs().pow(2).mean(), lambda m, x: (m.conj() * x[:1].mT).abs().pow(2).sum()]
)
def test_gradients_that_autograd_left_conjugated(closure):
    torch.manual_seed(0)
    m, x = nn.Parameter(torch.randn(4, 4, dtype=torch.complex128)), torch.randn(3, 4, dtype=torch.complex128)
    optimizer = bsam.SAM(torch.optim.SGD([m], lr=0.01), None, rho=0.1)
    (g,) = torch.autograd.grad(closure(m, x), [m])
    moved = (m + 0.1 * g / torch.linalg.vector_norm(g)).detach().requires_grad_()
    (expected,) = torch.autograd.grad(closure(moved, x), [moved])
    optimizer.backward(lambda: closure(m, x))
    torch.testing.assert_close(m.grad, expected.resolve_conj(), rtol=1e-10, atol=1e-12)


def test_gradients_at_several_points(problem):
    """In turn on a CPU, also with ``side_by_side``; against gradients of a moved copy."""

    class Sides(SharpnessAware):
        side_by_side = True

        def direction(self, L):
            g = L.grad()
            self.sides = L.grads(0.1 * g, -0.2 * g)
            return g

    params = list(problem.model.parameters())
    g = torch.autograd.grad(problem.loss(), params)
    expected = []
    for factor in (0.1, -0.2):
        moved = problem.clone()
        with torch.no_grad():
            for p, t in zip(moved.model.parameters(), g, strict=True):
                p.add_(t, alpha=factor)
        expected.append(torch.autograd.grad(moved.loss(), list(moved.model.parameters())))
    optimizer = Sides(sgd(params), problem.model, {})
    optimizer.backward(problem.loss)
    for side, gradient in zip(optimizer.sides, expected, strict=True):
        torch.testing.assert_close(side.tensors(), list(gradient), rtol=1e-10, atol=1e-12)
