"""Convert a fake-quantized network to one with integer weights."""

from __future__ import annotations

import copy
import dataclasses

import torch
from torch import nn

from .int_modules import int_layer
from .modules import quant_layers, replace


def convert(model: nn.Module) -> nn.Module:
    """Return a copy of a quantized network with integer weights, in eval mode, for inference.

    The outputs equal those of the quantized network in eval mode bit for bit: both sum products of integers, see
    :func:`bsam.lab.quantization.arithmetic.integer_output`. Parts that are not quantized, such as batch norm, are kept.

    Args:
        model: a network from :func:`~bsam.lab.quantization.quantize`, trained or calibrated. It is not changed.

    Example:
        >>> from bsam.lab.quantization import calibrate, quantize
        >>> model, x = (
        ...     quantize(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))),
        ...     torch.rand(32, 4),
        ... )
        >>> calibrate(model, x)
        >>> converted = convert(model)
        >>> converted[0].weight.dtype
        torch.int8
        >>> torch.equal(converted(x), model.eval()(x))
        True
    """
    model = copy.deepcopy(model).eval()
    new: dict[nn.Module, nn.Module] = {}
    for layer in quant_layers(model):
        codes = layer.codes()
        new[layer] = int_layer(layer, dataclasses.replace(codes, weight=codes.weight.to(torch.int8)))
    return replace(model, new)
