"""What a method remembers takes effect with the step."""

from __future__ import annotations

import pytest
import torch

from bsam.core.optimizer import SharpnessAware
from helpers import alike, sgd


class Remembering(SharpnessAware):
    """A gradient uphill; the one at w is remembered where the test says so."""

    vectors, numbers = ("gradient",), ("size",)
    remembering = True

    def __init__(self, base, model):
        super().__init__(base, model, {})

    def direction(self, L):
        g = L.grad()
        if self.remembering:
            self.remember("gradient", g)
            self.remember("size", float(g.norm()))
        return L.grad(at=0.01 * g)


def test_a_backward_that_is_not_followed_by_its_step_is_not_remembered(plain):
    optimizer = Remembering(sgd(plain.model.parameters()), plain.model)
    optimizer.backward(plain.loss)
    assert optimizer.recall("gradient") is optimizer.recall("size") is None
    optimizer.zero_grad()
    optimizer.remembering = False
    optimizer.step(plain.loss)
    assert optimizer.recall("gradient") is optimizer.recall("size") is None
    optimizer.remembering = True
    expected = torch.autograd.grad(plain.loss(), list(plain.model.parameters()))
    optimizer.step(plain.loss)
    for ours, g in zip(optimizer.recall("gradient").tensors(), expected, strict=True):
        torch.testing.assert_close(ours, g, rtol=1e-12, atol=1e-15)
    assert optimizer.recall("size") > 0


def test_what_is_remembered_is_not_touched_by_a_backward_that_raises(plain):
    """Neither at once nor by the next step: in its second pass, when the first one is remembered already."""
    optimizer = Remembering(sgd(plain.model.parameters()), plain.model)
    optimizer.step(plain.loss)
    optimizer.zero_grad()
    optimizer.remembering = False
    optimizer.backward(plain.loss)  # gradients that keep the next backward from starting afresh
    before, losses = optimizer.state_dict(), iter([plain.loss()])
    optimizer.remembering = True
    with pytest.raises(StopIteration):
        optimizer.backward(lambda: next(losses))
    assert alike(before, optimizer.state_dict())
    optimizer.remembering = False
    optimizer.backward(plain.loss)
    expected = [t.clone() for t in optimizer.recall("gradient").tensors()], optimizer.recall("size")
    optimizer.step()
    assert alike(expected, (optimizer.recall("gradient").tensors(), optimizer.recall("size")))
