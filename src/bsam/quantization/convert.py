"""From a fake-quantized network to one with integer weights."""

from __future__ import annotations

import copy

import torch
from torch import nn

from ..core.errors import BsamRuntimeError, BsamValueError
from .fake_quantize import quantize_codes
from .int_modules import Codes, int_layer
from .modules import QuantLayer, replace


def convert(model: nn.Module) -> nn.Module:
    """Return a copy of a quantized network with integer weights, in eval mode, for inference.

    Each layer computes with integers what the fake-quantized one computes in eval mode. Its output differs by rounding
    in float32 (about 1e-6 of its largest value). Where such a difference moves an input of a later layer from one side
    of a rounding boundary to the other, which is rare, it grows to a step of that layer.

    Args:
        model: what :func:`~bsam.quantization.quantize` returned, trained or calibrated. It is not changed.

    Example:
        >>> from bsam.quantization import calibrate, quantize
        >>> model, x = quantize(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))), torch.rand(32, 4)
        >>> calibrate(model, x)
        >>> converted = convert(model)
        >>> converted[0].weight.dtype
        torch.int8
        >>> torch.allclose(converted(x), model.eval()(x), atol=1e-6)
        True
    """
    names = {name: m for name, m in model.named_modules() if isinstance(m, QuantLayer)}
    if not names:
        raise BsamValueError(f"{type(model).__name__} has no quantized layer: call bsam.quantization.quantize first")
    for name, layer in names.items():
        if not layer.input_quantizer.initialized:
            raise BsamRuntimeError(
                f"the scale of the input of {name or 'the model'} is not initialized: train the model, or call "
                "bsam.quantization.calibrate with a batch"
            )
    model = copy.deepcopy(model).eval()
    layers = [m for m in model.modules() if isinstance(m, QuantLayer)]
    return replace(model, {layer: int_layer(layer, codes_of(layer)) for layer in layers})


@torch.no_grad()
def codes_of(layer: QuantLayer) -> Codes:
    """Return codes and scales of a quantized layer."""
    quantizer, weight = layer.weight_quantizer, layer.weight
    weight_scale = quantizer.current_scale(weight)
    input_scale, zero_point = layer.input_quantizer.current_scale()
    return Codes(
        weight=quantize_codes(weight, weight_scale, None, quantizer.qmin, quantizer.qmax).to(torch.int8),
        weight_scale=weight_scale.flatten().clone(),
        input_scale=input_scale.flatten().clone(),
        input_zero_point=zero_point.flatten().clone(),
        bias=None if layer.bias is None else layer.bias.detach().clone(),
        weight_bits=quantizer.bits,
        activation_bits=layer.input_quantizer.bits,
    )
