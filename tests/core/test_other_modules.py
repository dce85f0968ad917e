"""Modules that the closure runs besides the trained one."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import bsam
from helpers import alike, detached, interrupted, same, sgd


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 6)).double()

    def forward(self, z):
        return self.layers(z)


def discriminator():
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1)).double()


@pytest.fixture
def gan():
    torch.manual_seed(3)
    return Generator(), discriminator(), torch.randn(16, 4, dtype=torch.float64)


def loss_of(g, d, z):
    return F.softplus(-d(g(z))).mean()


@pytest.mark.parametrize("own_backward", [False, True])
def test_a_step_of_the_generator_leaves_the_discriminator(gan, own_backward):
    """Its gradients stay, its batch norm is updated once, and the generator's step is the same."""
    g, d, z = gan
    alone_g, alone_d = copy.deepcopy(g), copy.deepcopy(d).requires_grad_(False).train()
    optimizer = bsam.BSAM(sgd(g.parameters()), [g, d])
    reference = bsam.BSAM(sgd(alone_g.parameters()), alone_g)
    d(torch.randn(16, 6, dtype=torch.float64)).mean().backward()  # gradients for its own step
    alone_d.load_state_dict(d.state_dict())
    d[0].bias.grad = None
    grads = [p.grad for p in d.parameters()]
    values = copy.deepcopy(grads)
    backwards = []
    d[3].weight.register_hook(lambda t: backwards.append(1))

    def closure():
        loss = loss_of(g, d, z)
        if own_backward:
            loss.backward()
        return loss

    for t in range(1, 4):
        expected = copy.deepcopy((alone_g, alone_d))
        loss_of(*expected, z)  # one pass moves batch norm once
        assert torch.equal(optimizer.step(closure), reference.step(lambda: loss_of(alone_g, alone_d, z)))
        alone_d.load_state_dict(expected[1].state_dict())
        assert same(list(d.buffers()), list(alone_d.buffers()))
        assert int(d[1].num_batches_tracked) == t + 1
        assert int(g.layers[1].num_batches_tracked) == t
        assert same(detached(g.parameters()), detached(alone_g.parameters()))
        assert all(p.grad is g and p.requires_grad for p, g in zip(d.parameters(), grads, strict=True))
        assert alike(grads, values)
    assert not backwards  # gradients of d were not computed


def test_a_closure_that_raises_restores_the_discriminator(gan):
    g, d, z = gan
    d[0].weight.requires_grad_(False)
    optimizer = bsam.BSAM(sgd(g.parameters()), [g, d])
    for failing in (1, 2, 3):
        with pytest.raises(KeyboardInterrupt):
            optimizer.step(interrupted(lambda: loss_of(g, d, z), failing))
        assert [p.requires_grad for p in d.parameters()] == [False] + [True] * 5
        assert int(d[1].num_batches_tracked) == 0
        assert all(p.grad is None for p in d.parameters())


def test_parameters_of_another_module_that_base_has_are_trained(gan):
    g, d, z = gan
    shared = nn.Linear(6, 1).double()
    head = nn.Sequential(shared)
    optimizer = bsam.SAM(sgd([*g.parameters(), *shared.parameters()]), [g, head, d])
    optimizer.backward(lambda: head(g(z)).square().mean())
    assert shared.weight.grad.abs().sum() > 0
    assert shared.weight.requires_grad


def test_two_trained_modules_in_a_list_are_one_model(plain):
    """ASAM uses the names of all parameters."""
    ends = []
    for listed in (True, False):
        torch.manual_seed(0)
        a, b = nn.Linear(6, 5).double(), nn.Sequential(nn.LayerNorm(5), nn.Linear(5, 3)).double()
        params = [*a.parameters(), *b.parameters()]
        optimizer = bsam.ASAM(sgd(params), [a, b] if listed else nn.ModuleList([a, b]))
        for _ in range(2):
            optimizer.step(lambda: F.cross_entropy(b(a(plain.x)), plain.y))
        ends.append(detached(params))
    assert same(*ends)
