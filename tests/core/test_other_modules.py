"""Batch norm, and modules that the closure runs beside the trained one."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import bsam
from helpers import detached, interrupted, same, sgd


@pytest.mark.parametrize("momentum", [0.1, None])
def test_batch_norm_of_any_momentum_moves_once_a_step(problem, momentum):
    problem.model[1].momentum = momentum
    expected = problem.clone()
    optimizer = bsam.BSAM(sgd(problem.model.parameters(), lr=0.0), problem.model)
    for _ in range(3):
        optimizer.step(problem.loss)
        expected.loss()
    assert same(problem.buffers(), expected.buffers())
    assert problem.model[1].momentum == momentum


def test_batch_norm_without_statistics_and_in_eval_mode_is_left_alone(problem):
    problem.model[1] = nn.BatchNorm1d(12, track_running_stats=False).double()
    bsam.BSAM(sgd(problem.model.parameters()), problem.model).backward(problem.loss)
    assert problem.model[1].track_running_stats is False

    problem.model[1] = nn.BatchNorm1d(12).double().eval()
    outputs = []
    problem.model[1].register_forward_hook(lambda module, args, out: outputs.append((args[0].detach(), out.detach())))
    bsam.BSAM(sgd(problem.model.parameters()), problem.model).backward(problem.loss)
    for given, out in outputs:  # mean 0, variance 1: the running statistics as they began
        affine = problem.model[1]
        assert (
            not torch.allclose(out.mean(0), torch.zeros(12, dtype=torch.float64), atol=1e-3)
            or given.mean(0).abs().max() < 1e-3
        )
    assert int(affine.num_batches_tracked) == 0


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
    """Its gradients stay as they were, its batch norm moves once, and the generator's step is the same."""
    g, d, z = gan
    alone_g, alone_d = copy.deepcopy(g), copy.deepcopy(d).requires_grad_(False).train()
    optimizer = bsam.BSAM(sgd(g.parameters()), [g, d])
    reference = bsam.BSAM(sgd(alone_g.parameters()), alone_g)
    d(torch.randn(16, 6, dtype=torch.float64)).mean().backward()  # what its own step will use
    alone_d.load_state_dict(d.state_dict())
    d[0].bias.grad = None
    held = [p.grad for p in d.parameters()]
    values = [None if t is None else t.clone() for t in held]
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
        assert all(p.grad is h and p.requires_grad for p, h in zip(d.parameters(), held, strict=True))
        assert all(h is None or torch.equal(h, v) for h, v in zip(held, values, strict=True))
    assert not backwards  # no work was spent on them


def test_a_closure_that_raises_gives_the_discriminator_back(gan):
    g, d, z = gan
    d[0].weight.requires_grad_(False)
    optimizer = bsam.BSAM(sgd(g.parameters()), [g, d])
    for failing in (1, 2, 3):
        with pytest.raises(KeyboardInterrupt):
            optimizer.step(interrupted(lambda: loss_of(g, d, z), failing))
        assert [p.requires_grad for p in d.parameters()] == [False] + [True] * 5
        assert int(d[1].num_batches_tracked) == 0
        assert all(p.grad is None for p in d.parameters())


def test_parameters_that_both_have_stay_trained(gan):
    """A layer of the second module that belongs to base: it is ours, and gets its gradient."""
    g, d, z = gan
    shared = nn.Linear(6, 1).double()
    head = nn.Sequential(shared)
    optimizer = bsam.SAM(sgd([*g.parameters(), *shared.parameters()]), [g, head, d])
    optimizer.backward(lambda: head(g(z)).square().mean())
    assert shared.weight.grad.abs().sum() > 0
    assert shared.weight.requires_grad


def test_bad_lists_of_modules_are_refused(gan):
    g, d, _ = gan
    base = sgd(g.parameters())
    for wrong, word in [
        ([], "no module at all"),
        ([g, "d"], "Generator, str"),
        ("g", "got str"),
        ([d, g], "6 trainable"),
    ]:
        with pytest.raises(bsam.BsamError, match=word):
            bsam.SAM(base, wrong)
    optimizer = bsam.ASAM(base, (g, d))  # which looks at the model's names
    assert optimizer.model is g


def test_two_trained_modules_in_a_list_are_one_model(plain):
    """ASAM goes by the names of parameters, of all of them."""
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
