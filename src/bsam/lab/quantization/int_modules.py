"""Layers with integer weights, for inference."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from .arithmetic import Codes, integer_output
from .modules import init_like


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
