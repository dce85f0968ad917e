"""What a method remembers takes effect with the step."""

from __future__ import annotations

import torch

from bsam.core.optimizer import SharpnessAware
from helpers import sgd


class Remembering(SharpnessAware):
    """The gradient; it is remembered where the test says so."""

    vectors, numbers = ("gradient",), ("size",)
    remembering = True

    def __init__(self, base, model):
        super().__init__(base, model, {})

    def direction(self, L):
        g = L.grad()
        if self.remembering:
            self.remember("gradient", g)
            self.remember("size", float(g.norm()))
        return g


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
