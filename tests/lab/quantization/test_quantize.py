"""Which layers are quantized, calibration, and parameter groups."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from bsam.lab.models import build
from bsam.lab.quantization import calibrate, parameter_groups, quantize
from bsam.lab.quantization.quant_layers import QuantConv2d, QuantLayer, QuantLinear
from helpers import same


def layers(model):
    return [m for m in model.modules() if isinstance(m, QuantLayer)]


def small():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(4, 3)
    )


def test_quantize_returns_a_copy_with_quantized_layers():
    model = build("resnet8", seed=0)
    before = copy.deepcopy(model.state_dict())
    quantized = quantize(model)
    assert not layers(model)
    assert [type(m) for m in layers(quantized)] == [QuantConv2d] * 9 + [QuantLinear]
    bits = [(m.weight_quantizer.bits, m.input_quantizer.bits) for m in layers(quantized)]
    assert bits == [(8, 8), *[(4, 4)] * 8, (8, 8)]
    assert before.keys() <= quantized.state_dict().keys()
    with torch.no_grad():
        for p in quantized.parameters():
            p.add_(1)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    quantized.load_state_dict(model.state_dict())
    assert quantized(torch.randn(4, 3, 32, 32)).shape == (4, 10)
    model.stages.eval()
    model.conv.requires_grad_(False)
    assert not quantize(model).conv.weight.requires_grad
    modes = {name: m.training for name, m in model.named_modules()}
    quantized_modes = {name: m.training for name, m in quantize(model).named_modules()}
    assert {name: quantized_modes[name] for name in modes} == modes
    assert not quantized_modes["stages.0.0.conv1.input_quantizer"]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"first_last_bits": None}, [(4, 4)] * 3),
        ({"weight_bits": 2, "activation_bits": 6, "first_last_bits": None}, [(2, 6)] * 3),
        ({"weight_bits": 3, "activation_bits": 5, "first_last_bits": 7}, [(7, 7), (3, 5), (7, 7)]),
    ],
)
def test_bits(settings, expected):
    quantized = quantize(small(), **settings)
    assert [(m.weight_quantizer.bits, m.input_quantizer.bits) for m in layers(quantized)] == expected


def test_more_bits_are_closer_to_the_float_network():
    model, x = small().eval(), torch.randn(64, 2, 5, 5)
    errors = []
    for scheme in ("lsq", "minmax"):
        for bits in (2, 4, 8):
            quantized = quantize(model, bits, bits, scheme=scheme, first_last_bits=None)
            calibrate(quantized, x)
            with torch.no_grad():
                errors.append(((quantized(x) - model(x)).norm() / model(x).norm()).item())
    assert errors[0] > 2 * errors[1] > 6 * errors[2]
    assert errors[3] > 2 * errors[4] > 6 * errors[5]
    assert max(errors[2], errors[5]) < 0.02


def test_single_layers_shared_layers_and_tied_weights():
    alone = quantize(nn.Linear(3, 2))
    assert isinstance(alone, QuantLinear)
    conv = nn.Conv2d(2, 2, 1)
    shared = quantize(nn.Sequential(conv, nn.ReLU(), conv))
    assert shared[0] is shared[2]
    tied = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    tied[2].weight = tied[0].weight
    quantized = quantize(tied)
    assert quantized[2].weight is quantized[0].weight
    assert quantized[0].weight is not tied[0].weight


def test_calibration_changes_only_input_scales():
    x = torch.randn(16, 2, 5, 5)
    for scheme in ("lsq", "minmax"):
        model = quantize(small(), scheme=scheme)
        model[3].eval()
        modes = [m.training for m in model.modules()]
        before = copy.deepcopy(model.state_dict())
        calibrate(model, x)
        assert [m.training for m in model.modules()] == modes
        changed = {name for name, t in model.state_dict().items() if not torch.equal(t, before[name])}
        names = {"scale", "zero_point", "low", "high"}
        assert {name.rpartition(".")[2] for name in changed} <= names
        assert all(".input_quantizer." in name for name in changed)
        assert all(m.input_quantizer.initialized for m in layers(model))
        after = copy.deepcopy(model.state_dict())
        calibrate(model, 3 * x)
        moved = not all(torch.equal(t, after[name]) for name, t in model.state_dict().items())
        assert moved == (scheme == "minmax")
        with pytest.raises(RuntimeError):
            calibrate(model, torch.randn(2))
        assert [m.training for m in model.modules()] == modes


def test_parameter_groups():
    model = quantize(small())
    weights, scales = parameter_groups(model, lr=0.01, weight_decay=0.0)
    assert weights == {"params": [p for name, p in model.named_parameters() if "quantizer" not in name]}
    assert same(scales.pop("params"), [p for name, p in model.named_parameters() if "quantizer" in name])
    assert scales == {"perturb": False, "lr": 0.01, "weight_decay": 0.0}
    assert parameter_groups(model, perturb_scales=True)[1]["perturb"] is True
    (only,) = parameter_groups(quantize(small(), scheme="minmax"))
    assert len(only["params"]) == 8
