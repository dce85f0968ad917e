"""A method remembers values when the step is taken."""

from __future__ import annotations

import pytest
import torch

import bsam
from bsam.core.optimizer import SharpnessAware
from helpers import alike, assert_close, sgd


class Remembering(SharpnessAware):
    """Uses a gradient uphill, and remembers the one at w if ``remembering``."""

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


def test_a_backward_without_a_step_is_not_remembered(plain):
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
    assert_close(optimizer.recall("gradient").tensors(), expected, atol=1e-15)
    assert optimizer.recall("size") > 0


def test_a_backward_that_raises_changes_no_memory(plain):
    """It raises in the second pass, after ``remember``; the next step must not store its values either."""
    optimizer = Remembering(sgd(plain.model.parameters()), plain.model)
    optimizer.step(plain.loss)
    optimizer.zero_grad()
    optimizer.remembering = False
    optimizer.backward(plain.loss)  # so that the next backward accumulates
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


def test_vectors_keep_their_memory(plain):
    """A CUDA graph reads the memory that it was captured with. A vector of another dtype needs new memory."""
    optimizer = Remembering(sgd(plain.model.parameters()), plain.model)
    pointers, gradients = set(), []
    for _ in range(3):
        gradients.append(torch.autograd.grad(plain.loss(), list(plain.model.parameters())))
        optimizer.step(plain.loss)
        kept = [optimizer.state_dict()["state"][i]["gradient"] for i in range(len(gradients[-1]))]
        pointers.add(tuple(t.data_ptr() for t in kept))
        assert_close(kept, gradients[-1], atol=1e-15)
    assert len(pointers) == 1
    plain.model.float()
    plain.x = plain.x.float()
    optimizer.step(plain.loss)
    assert optimizer.state_dict()["state"][0]["gradient"].dtype == torch.float32


def test_a_parameter_whose_gradient_was_cleared_has_no_entry(plain):
    """AdamW takes an entry in its state as a sign that it has initialized the parameter."""
    params = list(plain.model.parameters())
    optimizer = Remembering(torch.optim.AdamW(params, lr=0.01), plain.model)
    optimizer.backward(plain.loss)
    params[0].grad = None
    optimizer.step()
    assert params[0] not in optimizer.base.state
    assert set(optimizer.base.state[params[1]]) == {"step", "exp_avg", "exp_avg_sq", "gradient"}
    optimizer.step(plain.loss)
    assert "gradient" in optimizer.base.state[params[0]]


def test_vectors_are_in_the_state_of_their_member(plain):
    """SGD without momentum has no state of its own."""
    params = list(plain.model.parameters())
    members = [torch.optim.SGD(params[:2], lr=0.1), torch.optim.AdamW(params[2:], lr=0.01)]
    optimizer = Remembering(bsam.CombinedOptimizer(members), plain.model)
    expected = torch.autograd.grad(plain.loss(), params)
    optimizer.step(plain.loss)
    assert [set(members[0].state[p]) for p in params[:2]] == [{"gradient"}] * 2
    assert_close([optimizer.state_dict()["state"][i]["gradient"] for i in range(len(params))], expected, atol=1e-15)
    other = Remembering(bsam.CombinedOptimizer([type(m)(m.param_groups[0]["params"]) for m in members]), plain.model)
    other.load_state_dict(optimizer.state_dict())
    assert_close([other.base.state[p]["gradient"] for p in params], expected, atol=1e-15)


def test_a_step_after_the_gradients_were_cleared(plain):
    """By the user before it, or by a hook of the base optimizer after it."""
    optimizer = Remembering(sgd(plain.model.parameters()), plain.model)
    optimizer.backward(plain.loss)
    plain.model.zero_grad()
    optimizer.step()
    assert optimizer.t == 1
    assert optimizer.recall("gradient") is None
    optimizer.base.register_step_post_hook(lambda base, *_: base.zero_grad())
    expected = torch.autograd.grad(plain.loss(), list(plain.model.parameters()))
    optimizer.step(plain.loss)
    assert_close(optimizer.recall("gradient").tensors(), expected, atol=1e-15)


def test_loaded_vectors_have_memory_of_their_own(plain):
    """Two trials can start from one state dict."""
    optimizer = Remembering(torch.optim.SGD(plain.model.parameters(), lr=0.1), plain.model)
    optimizer.step(plain.loss)
    saved = optimizer.state_dict()
    before = [entry["gradient"].clone() for entry in saved["state"].values()]
    other = Remembering(torch.optim.SGD(plain.model.parameters(), lr=0.1), plain.model)
    other.load_state_dict(saved)
    other.step(plain.loss)
    assert alike(before, [entry["gradient"] for entry in saved["state"].values()])
