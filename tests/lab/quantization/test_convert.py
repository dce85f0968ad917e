"""Networks with integer weights equal fake quantization in eval mode, bit for bit."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bsam.lab.models import build
from bsam.lab.quantization import calibrate, convert, quantize
from bsam.lab.quantization.quant_layers import IntConv2d, IntLayer, IntLinear
from helpers import alike


def trained(**settings):
    """A quantized ResNet-8 after two steps, in eval mode."""
    torch.manual_seed(0)
    model = quantize(build("resnet8", seed=0), **settings)
    x, y = torch.randn(8, 3, 12, 12), torch.randint(0, 10, (8,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model.eval()


@pytest.mark.parametrize(("scheme", "bits"), [("lsq", 2), ("lsq", 4), ("minmax", 4), ("minmax", 8)])
def test_outputs_equal_bit_for_bit(scheme, bits):
    model = trained(weight_bits=bits, activation_bits=bits, scheme=scheme, fold_batch_norm=bits == 4)
    before = copy.deepcopy(model.state_dict())
    converted = convert(model.train())
    assert alike(dict(model.state_dict()), dict(before))
    assert model.training
    assert not any(m.training for m in converted.modules())
    x = torch.randn(16, 3, 12, 12)
    with torch.no_grad():
        expected = model.eval()(x)
        assert torch.equal(converted(x), expected)
        model.train()
        for m in model.modules():
            if isinstance(m, nn.BatchNorm2d):
                m.eval()
        torch.testing.assert_close(model(x).mean(), expected.mean(), atol=0.1, rtol=0.1)
    layers = [m for m in converted.modules() if isinstance(m, IntLayer)]
    assert [type(m) for m in layers] == [IntConv2d] * 9 + [IntLinear]
    for layer in layers[1:-1]:
        assert layer.weight.dtype == torch.int8
        assert -(2 ** (bits - 1)) <= layer.weight.min() < 0 < layer.weight.max() <= 2 ** (bits - 1) - 1
        assert layer.weight_bits == layer.activation_bits == bits
        assert layer.weight_scale.shape == (layer.out_channels,)
        assert not list(layer.parameters())
    assert not layers[-1].bias.requires_grad


def test_simcc():
    torch.manual_seed(0)
    model, x = quantize(build("simcc_resnet8", seed=0, side=32)), torch.randn(4, 3, 32, 32)
    calibrate(model, x)
    with torch.no_grad():
        assert torch.equal(convert(model)(x), model.eval()(x))


def test_converted_network_is_independent_of_the_original():
    model = trained()
    converted, x = convert(model), torch.randn(2, 3, 12, 12)
    with torch.no_grad():
        before = converted(x)
        for t in [*model.parameters(), *model.buffers()]:
            t.add_(1)
        assert torch.equal(converted(x), before)
