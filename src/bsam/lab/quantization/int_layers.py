"""Layers with integer weights, for inference, and the conversion of a quantized network to them."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from .arithmetic import Codes, integer_output
from .quant_layers import init_like, quant_layers, replace


class IntLayer(nn.Module):
    """A layer with integer weights; codes and scales are buffers.

    Args:
        layer: a layer with the same shape.
        codes: the weights and scales.
    """

    weight: Tensor
    bias: Any  # nn.Conv2d and nn.Linear declare it differently
    weight_scale: Tensor
    input_scale: Tensor
    input_zero_point: Tensor

    def __init__(self, layer: nn.Module, codes: Codes) -> None:
        init_like(self, layer, bias=codes.bias is not None)
        del self.weight, self.bias
        for name in ("weight", "weight_scale", "input_scale", "input_zero_point", "bias"):
            self.register_buffer(name, getattr(codes, name))
        self.weight_bits, self.activation_bits = codes.weight_bits, codes.activation_bits
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        """Compute the layer with integers. The result has the dtype of ``x``."""
        codes = Codes(
            self.weight, self.weight_scale, self.input_scale, self.input_zero_point, self.bias,
            self.weight_bits, self.activation_bits,
        )  # fmt: skip
        return integer_output(self, codes, x)

    def extra_repr(self) -> str:
        """Return the settings that ``print`` shows."""
        return f"{super().extra_repr()}, weight_bits={self.weight_bits}, activation_bits={self.activation_bits}"


class IntConv2d(IntLayer, nn.Conv2d):
    """A convolution with integer weights."""


class IntLinear(IntLayer, nn.Linear):
    """A linear layer with integer weights."""


def int_layer(layer: nn.Module, codes: Codes) -> IntLayer:
    """Return an integer layer in place of a convolution or linear layer."""
    return IntConv2d(layer, codes) if isinstance(layer, nn.Conv2d) else IntLinear(layer, codes)


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
