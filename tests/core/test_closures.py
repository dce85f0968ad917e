"""What the closure runs beside the model, and what it must not reuse."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

import bsam


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def same(a, b):
    return len(a) == len(b) and all(torch.equal(s, t) for s, t in zip(a, b, strict=True))


# A loss from outside


def quiet_layer():
    """One layer whose graph can be used twice, as it keeps nothing that depends on the weights."""
    torch.manual_seed(0)
    layer, x = nn.Linear(3, 1).double(), torch.randn(8, 3, dtype=torch.float64)
    return layer, x


def test_a_loss_from_outside_the_closure_is_refused():
    """The case of the issue: SAM would equal SGD on a single layer."""
    layer, x = quiet_layer()
    optimizer = bsam.SAM(sgd(layer.parameters()), layer, rho=0.5)

    def own_backward(loss):
        loss.backward(retain_graph=True)
        return loss

    for _ in range(2):  # not in the first step alone
        before = [p.detach().clone() for p in layer.parameters()]
        for closure in (
            lambda loss: loss,
            own_backward,
            lambda loss: iter([(layer(x) ** 2).mean(), loss]),
            lambda loss: ((layer(x) ** 2).mean(), loss)[1],
        ):
            loss = (layer(x) ** 2).mean()
            with pytest.raises(bsam.BsamError, match="computed outside this pass"):
                optimizer.step(lambda: closure(loss))
            assert same(before, [p.detach() for p in layer.parameters()])
        optimizer.step(lambda: (layer(x) ** 2).mean())


def test_a_part_from_outside_the_closure_is_refused(plain):
    optimizer = bsam.SAM(sgd(plain.model.parameters()), plain.model)

    def own_backward():
        loss = F.cross_entropy(plain.model[2:](features), plain.y)
        loss.backward(retain_graph=True)
        return loss

    for closure in (
        lambda: F.cross_entropy(plain.model[2:](features), plain.y),
        own_backward,
        lambda: F.cross_entropy(plain.model(plain.x), plain.y) + penalty,
    ):
        features, penalty = plain.model[:2](plain.x), sum(p.sum() for p in plain.model.parameters())
        with pytest.raises(bsam.BsamError, match="computed outside this pass, in part or as a whole"):
            optimizer.step(closure)
        optimizer.zero_grad()
    other = plain.clone()
    optimizer.step(lambda: F.cross_entropy(plain.model(plain.x), plain.y))
    bsam.SAM(sgd(other.model.parameters()), other.model).step(other.loss)
    assert same(plain.weights(), other.weights())


def test_a_part_from_outside_is_noticed_in_a_later_step_too(plain):
    optimizer = bsam.SAM(sgd(plain.model.parameters()), plain.model)
    optimizer.step(plain.loss)
    features = plain.model[:2](plain.x)

    def retained():
        loss = F.cross_entropy(plain.model[2:](features), plain.y)
        loss.backward(retain_graph=True)
        return loss

    with pytest.raises(bsam.BsamError, match="computed outside this pass"):
        optimizer.step(retained)


def test_a_weight_that_is_cached_between_the_passes_is_refused():
    """Else SAM would equal SGD."""

    class Symmetric(nn.Module):
        def forward(self, w):
            return w.triu() + w.triu(1).T

    torch.manual_seed(0)
    layer, x = nn.Linear(3, 3).double(), torch.randn(8, 3, dtype=torch.float64)
    parametrize.register_parametrization(layer, "weight", Symmetric())
    optimizer = bsam.SAM(sgd(layer.parameters()), layer, rho=0.5)
    with parametrize.cached(), pytest.raises(bsam.BsamError, match="computed outside this pass"):
        optimizer.step(lambda: layer(x).square().mean())
    optimizer.step(lambda: layer(x).square().mean())


def test_a_loss_from_outside_is_refused_by_a_method_of_one_pass():
    layer, x = quiet_layer()
    optimizer = bsam.MSAM(sgd(layer.parameters()), layer, rho=0.5)
    optimizer.step(lambda: (layer(x) ** 2).mean())
    loss = (layer(x) ** 2).mean()
    with pytest.raises(bsam.BsamError, match="computed outside this pass"):
        optimizer.step(lambda: loss)


def test_a_closure_may_use_threads(plain):
    """Nodes are numbered by thread: a loss from another one is not old."""
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


def test_what_may_come_from_outside(plain):
    """Detached features, other networks' outputs with their graphs, a gradient penalty that the closure computes."""
    other = nn.Parameter(torch.randn(6, dtype=torch.float64))
    frozen = plain.model[:2](plain.x).detach()
    fake = other + plain.x  # a graph that may be used several times

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


# Other modules


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
        assert same([p.detach() for p in g.parameters()], [p.detach() for p in alone_g.parameters()])
        assert all(p.grad is h and p.requires_grad for p, h in zip(d.parameters(), held, strict=True))
        assert all(h is None or torch.equal(h, v) for h, v in zip(held, values, strict=True))
    assert not backwards  # no work was spent on them
    assert d[1].track_running_stats is True


def test_a_closure_that_raises_gives_the_discriminator_back(gan):
    g, d, z = gan
    d[0].weight.requires_grad_(False)
    optimizer = bsam.BSAM(sgd(g.parameters()), [g, d])
    for failing in (1, 2, 3):
        calls = 0

        def closure():
            nonlocal calls
            calls += 1
            if calls == failing:
                raise KeyboardInterrupt
            return loss_of(g, d, z)

        with pytest.raises(KeyboardInterrupt):
            optimizer.step(closure)
        assert [p.requires_grad for p in d.parameters()] == [False] + [True] * 5
        assert d[1].track_running_stats is True
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
