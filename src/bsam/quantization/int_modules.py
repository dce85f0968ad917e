"""Layers with integer weights, for inference."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .fake_quantize import code_range, quantize_codes
from .modules import geometry

EXACT = 2**24  # float32 holds all integers below it


@dataclass(frozen=True)
class Codes:
    """What a layer with integer weights holds.

    Args:
        weight: the codes of the weights as int8, also those of fewer bits.
        weight_scale: one for each output channel.
        input_scale, input_zero_point: of one element each.
        bias: in floating point, if the layer has one.
        weight_bits, activation_bits: of the codes.
    """

    weight: Tensor
    weight_scale: Tensor
    input_scale: Tensor
    input_zero_point: Tensor
    bias: Tensor | None
    weight_bits: int
    activation_bits: int


class IntLayer(nn.Module):
    r"""What :class:`IntConv2d` and :class:`IntLinear` share: codes, scales, and the arithmetic.

    The input becomes codes :math:`q_x`, the layer sums products of integers :math:`(q_x - z)\, q_w`, and the sums are
    multiplied by :math:`s_x s_w`; then the bias is added. The integers are held in float32, where sums are exact below
    :math:`2^{24}`; a layer whose largest possible sum is not below it computes in float64.
    """

    weight: Tensor
    bias: Any  # nn.Conv2d and nn.Linear declare it differently
    weight_scale: Tensor
    input_scale: Tensor
    input_zero_point: Tensor
    channel_dims: tuple[int, ...]  # the shape of a number for each channel

    def take(self, codes: Codes) -> None:
        """Take the codes in the place of the float layer's parameters."""
        del self.weight, self.bias
        for name in ("weight", "weight_scale", "input_scale", "input_zero_point", "bias"):
            self.register_buffer(name, getattr(codes, name))
        self.weight_bits, self.activation_bits = codes.weight_bits, codes.activation_bits
        self.qmin, self.qmax = code_range(codes.activation_bits, signed=False)
        self.sum_dtype = torch.float32 if self.largest_sum() < EXACT else torch.float64
        self.eval()

    def largest_sum(self) -> int:
        """Return the largest absolute value that a sum of products can reach, for any input."""
        z = int(self.input_zero_point)
        return int(self.weight.flatten(1).long().abs().sum(1).max()) * max(self.qmax - z, z - self.qmin)

    @abstractmethod
    def sums(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return the sums of products."""

    def forward(self, x: Tensor) -> Tensor:
        """Compute the layer by integers. The result has the type of ``x``."""
        q = quantize_codes(x, self.input_scale, self.input_zero_point, self.qmin, self.qmax) - self.input_zero_point
        with torch.autocast(x.device.type, enabled=False):
            sums = self.sums(q.to(self.sum_dtype), self.weight.to(self.sum_dtype))
        out = sums * (self.input_scale * self.weight_scale).view(self.channel_dims)
        return (out if self.bias is None else out + self.bias.view(self.channel_dims)).to(x.dtype)

    def extra_repr(self) -> str:
        """Return the settings that ``print`` shows."""
        return f"{super().extra_repr()}, weight_bits={self.weight_bits}, activation_bits={self.activation_bits}"


class IntConv2d(IntLayer, nn.Conv2d):
    """A convolution with integer weights.

    Args:
        layer: a convolution of the same geometry.
        codes: its weights and scales.
    """

    channel_dims = (-1, 1, 1)

    def __init__(self, layer: nn.Conv2d, codes: Codes) -> None:
        nn.Conv2d.__init__(self, **geometry(layer), bias=codes.bias is not None, device="meta")
        self.take(codes)

    def sums(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return the sums of products."""
        return self._conv_forward(x, weight, None)


class IntLinear(IntLayer, nn.Linear):
    """A linear layer with integer weights.

    Args:
        layer: a linear layer of the same shape.
        codes: its weights and scales.
    """

    channel_dims = (-1,)

    def __init__(self, layer: nn.Linear, codes: Codes) -> None:
        nn.Linear.__init__(self, layer.in_features, layer.out_features, codes.bias is not None, device="meta")
        self.take(codes)

    def sums(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return the sums of products."""
        return F.linear(x, weight)


def int_layer(layer: nn.Module, codes: Codes) -> IntLayer:
    """Return the layer with integer weights for a convolution or a linear layer."""
    return IntConv2d(layer, codes) if isinstance(layer, nn.Conv2d) else IntLinear(layer, codes)  # type: ignore[arg-type]
