"""Layers with integer weights, for inference."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from .arithmetic import Codes, integer_output
from .modules import geometry


class IntLayer(nn.Module):
    """What :class:`IntConv2d` and :class:`IntLinear` share: codes and scales as buffers, and the arithmetic."""

    weight: Tensor
    bias: Any  # nn.Conv2d and nn.Linear declare it differently
    weight_scale: Tensor
    input_scale: Tensor
    input_zero_point: Tensor

    def take(self, codes: Codes) -> None:
        """Take the codes in the place of the float layer's parameters."""
        del self.weight, self.bias
        for name in ("weight", "weight_scale", "input_scale", "input_zero_point", "bias"):
            self.register_buffer(name, getattr(codes, name))
        self.weight_bits, self.activation_bits = codes.weight_bits, codes.activation_bits
        self.eval()

    @abstractmethod
    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the convolution or the linear map."""

    def forward(self, x: Tensor) -> Tensor:
        """Compute the layer by integers. The result has the type of ``x``."""
        codes = Codes(
            self.weight, self.weight_scale, self.input_scale, self.input_zero_point, self.bias,
            self.weight_bits, self.activation_bits,
        )  # fmt: skip
        return integer_output(self, codes, x)

    def extra_repr(self) -> str:
        """Return the settings that ``print`` shows."""
        return f"{super().extra_repr()}, weight_bits={self.weight_bits}, activation_bits={self.activation_bits}"


class IntConv2d(IntLayer, nn.Conv2d):
    """A convolution with integer weights.

    Args:
        layer: a convolution of the same geometry.
        codes: its weights and scales.
    """

    def __init__(self, layer: nn.Conv2d, codes: Codes) -> None:
        nn.Conv2d.__init__(self, **geometry(layer), bias=codes.bias is not None, device="meta")
        self.take(codes)

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the convolution."""
        return self._conv_forward(x, weight, bias)


class IntLinear(IntLayer, nn.Linear):
    """A linear layer with integer weights.

    Args:
        layer: a linear layer of the same shape.
        codes: its weights and scales.
    """

    def __init__(self, layer: nn.Linear, codes: Codes) -> None:
        nn.Linear.__init__(self, layer.in_features, layer.out_features, codes.bias is not None, device="meta")
        self.take(codes)

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the linear map."""
        return F.linear(x, weight, bias)


def int_layer(layer: nn.Module, codes: Codes) -> IntLayer:
    """Return the layer with integer weights for a convolution or a linear layer."""
    if isinstance(layer, nn.Conv2d):
        return IntConv2d(layer, codes)
    return IntLinear(layer, codes)  # type: ignore[arg-type]
