"""Scales and zero points of inputs: initial values, updates, and the gradient scale of learned ones."""

from __future__ import annotations

import copy

import pytest
import torch

from bsam.common.errors import BsamRuntimeError
from bsam.lab.quantization.arithmetic import EPS
from bsam.lab.quantization.quantizers import LearnedInputQuantizer, MinMaxInputQuantizer

CPU = {"dtype": torch.float32, "device": torch.device("cpu")}
INPUT_QUANTIZERS = [LearnedInputQuantizer, MinMaxInputQuantizer]


def batch(seed=0, low=-1.0, high=2.0):
    return low + (high - low) * torch.rand(16, 3, 4, 4, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("batch_size", [1, 6])
def test_gradient_scale_counts_the_values_of_a_sample(batch_size):
    x = batch()[:batch_size]
    inputs = LearnedInputQuantizer(4, **CPU)
    inputs(batch())
    s, z = inputs.scale.detach(), inputs.zero_point
    v = x / s
    code = v.round() + z
    by_scale = torch.where((code >= 0) & (code <= 15), v.round() - v, code.clamp(0, 15) - z).sum()
    inputs(x).sum().backward()
    torch.testing.assert_close(inputs.scale.grad.squeeze(), by_scale / (48 * 15) ** 0.5)


def affine(low, high, levels):
    low, high = min(low, 0.0), max(high, 0.0)
    scale = max((high - low) / levels, EPS)
    return scale, min(max(round(-low / scale), 0), levels)


def test_moving_ranges_equal_a_loop():
    quantizer = MinMaxInputQuantizer(4, **CPU)
    low = high = None
    for seed in range(5):
        x = batch(seed, -1.0 - seed, 2.0 + seed)
        quantizer(x)
        low = x.min().item() if low is None else 0.9 * low + 0.1 * x.min().item()
        high = x.max().item() if high is None else 0.9 * high + 0.1 * x.max().item()
        scale, zero_point = quantizer.current_scale()
        expected = affine(low, high, 15)
        assert scale.item() == pytest.approx(expected[0], rel=1e-5)
        assert zero_point.item() == expected[1]


@pytest.mark.parametrize("bits", [2, 8])
@pytest.mark.parametrize(("low", "high"), [(-1, 2), (0.5, 2), (-3, -1)])
def test_learned_scales_start_from_the_first_batch(bits, low, high):
    quantizer, levels = LearnedInputQuantizer(bits, **CPU), 2**bits - 1
    x = batch(0, low, high)
    quantizer(x)
    scale, zero_point = affine(x.min().item(), x.max().item(), levels)
    assert quantizer.scale.item() == pytest.approx(min(scale, 2 * x.abs().mean().item() / levels**0.5), rel=1e-5)
    assert quantizer.zero_point.item() == zero_point
    assert (zero_point == 0) == (low >= 0)
    before = copy.deepcopy(quantizer.state_dict())
    quantizer(batch(1, -9, 9))
    assert all(torch.equal(t, before[name]) for name, t in quantizer.state_dict().items())
    assert not quantizer(torch.zeros(2, 3)).any()  # zero is among the values


@pytest.mark.parametrize("kind", INPUT_QUANTIZERS)
@pytest.mark.parametrize("value", [0.0, 1.7, -1.7])
def test_inputs_that_are_all_equal(kind, value):
    quantizer = kind(8, **CPU)
    for mode in (True, False):
        out = quantizer.train(mode)(torch.full((4, 6), value))
        torch.testing.assert_close(out, torch.full((4, 6), value), atol=1e-6, rtol=1e-6)
    assert quantizer.initialized


@pytest.mark.parametrize("kind", INPUT_QUANTIZERS)
def test_nothing_changes_in_eval_mode(kind):
    quantizer = kind(4, **CPU).eval()
    with pytest.raises(BsamRuntimeError, match="not initialized"):
        quantizer(batch())
    assert not quantizer.initialized
    quantizer.train()
    quantizer(batch())
    before = copy.deepcopy(quantizer.state_dict())
    quantizer.eval()
    quantizer(batch(1, -9, 9))
    assert all(torch.equal(t, before[name]) for name, t in quantizer.state_dict().items())


@pytest.mark.parametrize("kind", INPUT_QUANTIZERS)
def test_initialization_is_read_from_the_tensors(kind):
    """State dicts, averages of weights, and DDP write to them directly."""
    fresh, used = kind(4, **CPU), kind(4, **CPU)
    average = copy.deepcopy(fresh)
    used(batch())
    assert used.initialized
    with torch.no_grad():
        for t, source in zip(average.state_dict().values(), used.state_dict().values(), strict=True):
            t.copy_(source)
    assert torch.equal(average.eval()(batch()), used(batch()).detach())
    restored = kind(4, **CPU).eval()
    restored.load_state_dict(used.state_dict())
    assert torch.equal(restored(batch()), average(batch()))
    used.load_state_dict(fresh.state_dict())
    with pytest.raises(BsamRuntimeError, match="not initialized"):
        used.eval()(batch())
    used.train()(batch())
    assert used.initialized
