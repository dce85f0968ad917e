"""Scales of weights: initial values, and the gradient scale of learned ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bsam.lab.quantization.arithmetic import EPS
from bsam.lab.quantization.quantizers import LearnedWeightQuantizer, MinMaxWeightQuantizer


def weight(seed=0):
    w = torch.randn(5, 3, 2, 2, generator=torch.Generator().manual_seed(seed))
    w[1] = 0.0
    w[2] = -0.7
    return w


@pytest.mark.parametrize(("bits", "qmax"), [(2, 1), (4, 7), (8, 127)])
def test_initial_scales(bits, qmax):
    w = weight().numpy().astype(np.float64).reshape(5, -1)
    largest = np.maximum(np.abs(w).max(1) / qmax, EPS)
    lsq = np.maximum(2 * np.abs(w).mean(1) / np.sqrt(qmax), EPS)
    for quantizer, expected in (
        (MinMaxWeightQuantizer(weight(), bits), largest),
        (LearnedWeightQuantizer(weight(), bits), np.minimum(largest, lsq)),
    ):
        scale = quantizer.current_scale(weight())
        assert scale.shape == (5, 1, 1, 1)
        np.testing.assert_allclose(scale.detach().numpy().ravel(), expected, rtol=1e-6)
        out = quantizer(weight())
        assert not out[1].any()  # a channel of zeros
        steps = out / scale
        assert (steps - steps.round()).abs().max() < 1e-4
        assert steps.round().min() >= -qmax - 1
        assert steps.round().max() <= qmax


def test_scales_follow_the_weights_or_are_learned():
    minmax, learned = MinMaxWeightQuantizer(weight(), 4), LearnedWeightQuantizer(weight(), 4)
    before = learned.current_scale(weight()).detach().clone()
    assert torch.equal(minmax.current_scale(3 * weight())[0], (3 * weight()[0]).abs().max().view(1, 1, 1) / 7)
    assert torch.equal(learned.current_scale(3 * weight()), before)
    w = weight().requires_grad_()
    minmax(w).sum().backward()
    assert w.grad.eq(1).all()  # nothing through the scale
    assert [name for name, _ in minmax.named_parameters()] == []
    assert [name for name, _ in learned.named_parameters()] == ["scale"]


def test_negative_scales_count_as_their_absolute_value():
    quantizer = LearnedWeightQuantizer(weight(), 4)
    expected = quantizer(weight()).detach()
    quantizer(weight()).square().sum().backward()
    grad = quantizer.scale.grad.clone()
    with torch.no_grad():
        quantizer.scale.neg_()
    quantizer.scale.grad = None
    out = quantizer(weight())
    out.square().sum().backward()
    assert torch.equal(out, expected)
    assert torch.equal(quantizer.scale.grad, -grad)


def test_scales_of_zero_count_as_the_smallest_scale():
    x = torch.tensor([[0.0, 1.0, -2.0]])
    quantizer = LearnedWeightQuantizer(x, 4)
    with torch.no_grad():
        quantizer.scale.zero_()
    values = quantizer(x)
    assert values.tolist() == [[0.0, 7 * EPS, -8 * EPS]]
    values.sum().backward()
    assert quantizer.scale.grad.isfinite().all()


def test_gradient_scale_counts_the_weights_of_a_channel():
    w = weight()[[0, 3, 4]]
    quantizer = LearnedWeightQuantizer(w, 4)
    s = quantizer.current_scale(w).detach()
    v = w / s
    expected = torch.where(v.round().abs() <= 7, v.round() - v, 7 * v.sign()).sum((1, 2, 3)) / (12 * 7) ** 0.5
    quantizer(w).sum().backward()
    torch.testing.assert_close(quantizer.scale.grad, expected)
