"""``L.restart``: the passes so far leave nothing, and the next one is the first."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import bsam
from bsam.core.optimizer import SharpnessAware
from helpers import alike, same, sgd


class Restarting(SharpnessAware):
    """SAM, after ``wrong`` passes at another point that it discards."""

    def __init__(self, base, model, wrong, **options):
        super().__init__(base, model, {"rho": 0.1}, **options)
        self.wrong = wrong

    def direction(self, L):
        e = self.vector([torch.full_like(p, 0.3) for p in self.params]) if self.wrong else None
        for _ in range(self.wrong):
            L.grad(at=e)
        if self.wrong:
            L.restart()
            assert L.loss is None
            assert not any(L.reached)
        return L.grad(at=self.epsilon(L.grad(), "rho"))


def run(wrong, *, fail=False, scaler=False, discriminator=False):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 3)).double()
    other = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).double()
    x, y = torch.randn(24, 6).double(), torch.randint(0, 3, (24,))
    optimizer = Restarting(sgd(model.parameters()), [model, other], wrong)
    scale = torch.amp.GradScaler("cpu", init_scale=64.0) if scaler else None
    losses, calls = [], 0

    def closure():
        nonlocal calls
        calls += 1
        if fail and calls == wrong + 2:
            raise KeyboardInterrupt
        return F.cross_entropy(other(model(x)) if discriminator else model(x), y)

    for t in range(3):
        optimizer.zero_grad()
        calls = 0
        for _ in range(2):  # the second adds to the first's direction
            losses.append(optimizer.backward(closure, scale if t else None) if not fail else 0)
        if scaler and t:
            scale.step(optimizer)
            scale.update()
        else:
            optimizer.step()
    frozen = [p.requires_grad for p in other.parameters()]
    grads = [p.grad for p in model.parameters()]
    state = [*model.state_dict().values(), *other.state_dict().values()]
    return [state, optimizer.state_dict(), losses, torch.get_rng_state(), frozen, grads]


@pytest.mark.parametrize("wrong", [1, 2, 3])
@pytest.mark.parametrize("options", [{}, {"scaler": True}, {"discriminator": True}])
def test_discarded_passes_leave_nothing(wrong, options):
    assert alike(run(wrong, **options), run(0, **options))


def test_an_interrupt_after_a_restart_restores_everything(problem):
    optimizer = Restarting(sgd(problem.model.parameters()), problem.model, wrong=2)
    optimizer.step(problem.loss)
    optimizer.zero_grad()
    for call in range(1, 5):
        weights, buffers, calls = problem.weights(), problem.buffers(), 0

        def closure(call=call):
            nonlocal calls
            calls += 1
            if calls == call:
                raise KeyboardInterrupt
            return problem.loss()

        with pytest.raises(KeyboardInterrupt):
            optimizer.backward(closure)
        assert same(weights, problem.weights())
        assert same(buffers, problem.buffers())
        assert all(p.grad is None for p in problem.model.parameters())


def test_an_overflow_in_a_discarded_pass_does_not_skip_the_step(problem):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    optimizer = Restarting(sgd(problem.model.parameters()), problem.model, wrong=1)
    factors = iter([float("inf"), 1.0, 1.0])
    optimizer.backward(lambda: problem.loss() * next(factors), scaler)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0
    assert all(torch.isfinite(w).all() for w in problem.weights())


@pytest.mark.parametrize("sizes", [(24, 10, 24), (9, 24, 24)])
def test_loss_and_statistics_of_a_share_are_those_of_this_batch(problem, sizes):
    """After a batch of another size, the step is that of an optimizer which knew the size."""
    twin, ours = problem.clone(), bsam.SAM(sgd(problem.model.parameters()), problem.model, ascent=0.3)
    knowing = bsam.SAM(sgd(twin.model.parameters()), twin.model, ascent=0.3)
    for n in sizes:
        losses = []
        for p, optimizer in ((problem, ours), (twin, knowing)):
            part = type(p)(p.model, p.x[:n], p.y[:n])
            if optimizer is knowing and optimizer.t:
                optimizer.param_groups[0]["batch_size"] = n
            losses.append(optimizer.step(part.losses))
        assert torch.equal(*losses)
        assert same(problem.buffers(), twin.buffers())
        assert same(problem.weights(), twin.weights())


def test_the_share_of_a_batch_is_exact(plain):
    """Shares are written as decimals or fractions; 0.28 * 25 is 7.000000000000001."""
    seen = []
    x, y = torch.zeros(200, 6).double(), torch.zeros(200, dtype=torch.int64)

    def of(n):
        def closure(indices=slice(None)):
            seen.append(len(y[:n][indices]))
            return F.cross_entropy(plain.model(x[:n][indices]), y[:n][indices], reduction="none")

        return closure

    shares = [(p, 100) for p in (7, 14, 28, 29, 55, 56, 57, 58)] + [(1, 3), (2, 3), (5, 6), (1, 7), (3, 7), (1, 49)]
    for p, q in shares:
        n = {100: 25, 49: 196}.get(q, 24 * q // 3)
        optimizer = bsam.SAM(sgd(plain.model.parameters()), plain.model, ascent=p / q)
        seen.clear()
        optimizer.backward(of(n))
        assert seen == [n, -(-p * n // q), n]
        optimizer = bsam.ESAM(sgd(plain.model.parameters()), plain.model, gamma=p / q)
        seen.clear()
        optimizer.backward(of(n))
        assert seen == [n, n, max(1, p * n // q)]
    optimizer = bsam.SAM(sgd(plain.model.parameters()), plain.model, ascent=1e-9)
    optimizer.backward(of(4))
    assert seen[-3:] == [4, 1, 4]
