"""Quantized layers compared with the float operation on values that numpy quantized."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bsam.lab.quantization.quant_layers import QuantConv2d, QuantLinear
from bsam.lab.quantization.quantizers import SCHEMES

GEOMETRIES = [
    {},
    {"stride": 2, "padding": 1, "bias": False},
    {"padding": "same", "dilation": 2, "groups": 2},
    {"padding": 1, "padding_mode": "reflect"},
    {"padding": (0, 1), "groups": 4, "kernel_size": (1, 3)},
]


def conv(**settings):
    torch.manual_seed(0)
    return nn.Conv2d(4, 8, **{"kernel_size": 3, **settings})


def images(seed=1):
    return torch.randn(6, 4, 7, 7, generator=torch.Generator().manual_seed(seed))


def quantized(x, scale, zero_point, qmin, qmax):
    x, scale, zero_point = (t.detach().numpy() for t in (x, scale, zero_point))
    return torch.tensor(scale * (np.clip(np.rint(x / scale) + zero_point, qmin, qmax) - zero_point))


@pytest.mark.parametrize("settings", GEOMETRIES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_convolutions_use_quantized_values(settings, scheme):
    layer, x = conv(**settings), images()
    ours = QuantConv2d(layer, 4, 8, scheme)
    assert ours.weight is layer.weight
    assert ours.bias is layer.bias
    out = ours(x)
    weight = quantized(layer.weight, ours.weight_quantizer.current_scale(layer.weight), torch.zeros(()), -8, 7)
    inputs = quantized(x, *ours.input_quantizer.current_scale(), 0, 255)
    assert torch.equal(out, layer._conv_forward(inputs, weight, layer.bias))
    with torch.no_grad():
        torch.testing.assert_close(ours.eval()(x), out, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_linear_layers_use_quantized_values(scheme):
    torch.manual_seed(0)
    layer, x = nn.Linear(5, 3), torch.randn(7, 2, 5)
    ours = QuantLinear(layer, 8, 4, scheme)
    out = ours(x)
    weight = quantized(layer.weight, ours.weight_quantizer.current_scale(layer.weight), torch.zeros(()), -128, 127)
    inputs = quantized(x, *ours.input_quantizer.current_scale(), 0, 15)
    assert torch.equal(out, F.linear(inputs, weight, layer.bias))
    with torch.no_grad():
        torch.testing.assert_close(ours.eval()(x), out, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_gradients_are_the_same_in_eval_and_training_mode(scheme):
    ours = QuantConv2d(conv(), scheme=scheme).double()
    x = images().double()
    ours(x)
    ours.input_quantizer.eval()
    results = []
    for mode in (True, False):
        ours.training = mode
        ours.zero_grad()
        inputs = x.clone().requires_grad_()
        ours(inputs).tanh().sum().backward()
        results.append([inputs.grad, *(p.grad for p in ours.parameters())])
    assert len(results[0]) == (5 if scheme == "lsq" else 3)
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)  # sums of integers are held in float32
        assert a.abs().sum() > 0
    with torch.no_grad():
        value = ours(x)
    assert torch.equal(ours(x), value)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_state_dicts_of_float_layers_load(scheme):
    other = nn.Sequential(conv())
    with torch.no_grad():
        other[0].weight.mul_(3)
    ours = nn.Sequential(QuantConv2d(conv(), scheme=scheme))
    ours(images())
    ours.load_state_dict(other.state_dict())
    expected = QuantConv2d(other[0], scheme=scheme)
    assert torch.equal(ours[0].weight, other[0].weight)
    assert not ours[0].input_quantizer.initialized
    assert torch.equal(ours(images()), expected(images()))  # new scales
    assert list(other.state_dict()) == ["0.weight", "0.bias"]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_state_dicts_of_quantized_layers_load_bit_for_bit(scheme):
    ours, other = (nn.Sequential(QuantConv2d(conv(), scheme=scheme)) for _ in range(2))
    ours(images())
    with torch.no_grad():
        for p in ours.parameters():
            p.mul_(1.3)
    other.load_state_dict(ours.state_dict())
    assert torch.equal(other.eval()(images(2)), ours.eval()(images(2)))
    incomplete = {k: v for k, v in ours.state_dict().items() if k != "0.input_quantizer.zero_point"}
    del incomplete["0.weight"]
    with pytest.raises(RuntimeError, match=r"Missing key.*0\.weight"):
        other.load_state_dict(incomplete)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_autocast_and_channels_last(scheme):
    ours = QuantConv2d(conv(), scheme=scheme).to(memory_format=torch.channels_last)
    x = images().to(memory_format=torch.channels_last)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = ours(x)
    assert out.dtype == torch.bfloat16
    assert out.is_contiguous(memory_format=torch.channels_last)
    out.float().sum().backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.abs().sum() > 0 for p in ours.parameters())
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        exact = ours.eval()(x)
    assert exact.dtype == torch.float32  # autocast does not apply to integers
    torch.testing.assert_close(out.float(), exact, atol=0.05, rtol=0.02)


# torch.compile instantiates torch.autograd.Function, and ignores the warning unless it is an error
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("scheme", SCHEMES)
def test_layers_compile_without_graph_breaks(scheme):
    ours = QuantConv2d(conv(), scheme=scheme)
    ours(images())
    ours.input_quantizer.eval()
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    results = []
    for layer in (compiled, ours):
        ours.zero_grad()
        out = layer(images())
        out.square().sum().backward()
        results.append([out, *(p.grad for p in ours.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    if scheme == "lsq":
        ours.eval()
        with torch.no_grad():
            assert torch.equal(compiled(images()), ours(images()))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("scheme", SCHEMES)
def test_loaded_layers_compile_without_graph_breaks(scheme):
    used, ours = QuantLinear(nn.Linear(4, 3), scheme=scheme), QuantLinear(nn.Linear(4, 3), scheme=scheme)
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    used(x)
    ours.load_state_dict(used.state_dict())
    compiled = torch.compile(ours, backend="eager", fullgraph=True)
    for _ in range(2):
        assert torch.equal(compiled(x), used(x))


def test_building_a_layer_draws_no_random_numbers():
    layer = conv()
    before = torch.get_rng_state()
    QuantConv2d(layer)
    assert torch.equal(torch.get_rng_state(), before)
