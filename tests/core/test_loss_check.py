"""A loss, or a part of one, that was not computed in the current pass."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import bsam
from helpers import detached, same, sgd


def quiet_layer():
    """A layer whose graph can be used twice, because it saves nothing that depends on the weights."""
    torch.manual_seed(0)
    layer, x = nn.Linear(3, 1).double(), torch.randn(8, 3, dtype=torch.float64)
    return layer, x


def test_a_loss_from_outside_the_closure_raises():
    """SAM would otherwise equal SGD on a single layer."""
    layer, x = quiet_layer()
    optimizer = bsam.SAM(sgd(layer.parameters()), layer, rho=0.5)

    def own_backward(loss):
        loss.backward(retain_graph=True)
        return loss

    for _ in range(2):  # in later steps, too
        before = detached(layer.parameters())
        for closure in (
            lambda loss: loss,
            own_backward,
            lambda loss: iter([(layer(x) ** 2).mean(), loss]),
            lambda loss: ((layer(x) ** 2).mean(), loss)[1],
        ):
            loss = (layer(x) ** 2).mean()
            with pytest.raises(bsam.BsamError, match="detach"):
                optimizer.step(lambda: closure(loss))
            assert same(before, detached(layer.parameters()))
        optimizer.step(lambda: (layer(x) ** 2).mean())


def test_a_loss_from_outside_raises_with_a_single_pass():
    layer, x = quiet_layer()
    optimizer = bsam.MSAM(sgd(layer.parameters()), layer, rho=0.5)
    optimizer.step(lambda: (layer(x) ** 2).mean())
    loss = (layer(x) ** 2).mean()
    with pytest.raises(bsam.BsamError, match="detach"):
        optimizer.step(lambda: loss)


def test_a_closure_may_use_threads(plain):
    """Autograd numbers nodes per thread: a loss from another thread is not old."""
    other = plain.clone()
    for problem, closure in (
        (plain, lambda: pool.submit(plain.loss).result()),
        (other, other.loss),
    ):
        with ThreadPoolExecutor(1) as pool:
            optimizer = bsam.BSAM(sgd(problem.model.parameters()), problem.model)
            for _ in range(3):
                optimizer.step(closure)
    assert same(plain.weights(), other.weights())


def test_parts_that_may_come_from_outside(plain):
    """Detached features, outputs of other networks with their graphs; and a gradient penalty inside the closure."""
    other = nn.Parameter(torch.randn(6, dtype=torch.float64))
    frozen = plain.model[:2](plain.x).detach()
    fake = other + plain.x  # a graph that can be used several times

    def penalised():
        x = plain.x.clone().requires_grad_()
        out = F.cross_entropy(plain.model(x), plain.y)
        (g,) = torch.autograd.grad(out, x, create_graph=True)
        return out + g.pow(2).sum()

    for closure in (
        lambda: F.cross_entropy(plain.model[2:](frozen), plain.y),
        lambda: plain.loss() + plain.model(fake).square().mean(),
        lambda: plain.loss() + fake.sum(),
        penalised,
    ):
        bsam.SAM(sgd(plain.model.parameters()), plain.model).step(closure)
