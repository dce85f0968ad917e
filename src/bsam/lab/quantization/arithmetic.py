"""Integer arithmetic for a quantized layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .fake_quantize import code_range, quantize_codes

EXACT = 2**24  # float32 represents all integers below it


def sum_dtype(weight: Tensor, weight_bits: int, activation_bits: int) -> torch.dtype:
    r"""Return a dtype that holds the sums of a layer's products exactly.

    The largest possible sum is :math:`n\, 2^{b_w - 1} (2^{b_a} - 1)` for ``n`` weights in a channel. Below
    :math:`2^{24}` the dtype is float32, which is faster on GPUs, otherwise float64.

    Example:
        >>> (
        ...     sum_dtype(torch.empty(512, 512, 3, 3), 4, 4),
        ...     sum_dtype(torch.empty(512, 512, 3, 3), 8, 8),
        ... )
        (torch.float32, torch.float64)
    """
    (smallest, _), (_, largest) = code_range(weight_bits, signed=True), code_range(activation_bits, signed=False)
    return torch.float32 if weight.shape[1:].numel() * -smallest * largest < EXACT else torch.float64


@dataclass(frozen=True)
class Codes:
    """The integers and scales of a layer.

    Args:
        weight: the codes of the weight, in any dtype.
        weight_scale: one scale per output channel.
        input_scale, input_zero_point: tensors with one element.
        bias: the floating-point bias, or None.
        weight_bits, activation_bits: number of bits of the codes.
    """

    weight: Tensor
    weight_scale: Tensor
    input_scale: Tensor
    input_zero_point: Tensor
    bias: Tensor | None
    weight_bits: int
    activation_bits: int


def product(layer: nn.Module, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Apply the convolution or linear map of a layer with the given weight and bias."""
    return layer._conv_forward(x, weight, bias) if isinstance(layer, nn.Conv2d) else F.linear(x, weight, bias)


def integer_output(layer: nn.Module, codes: Codes, x: Tensor) -> Tensor:
    r"""Return the output of a layer, :math:`s_x s_w \sum (q_x - z)\, q_w + b`, without gradient.

    The terms are integers, stored as floating-point numbers, and their sums are exact in any order, so the output is
    the same on every device, for every number of threads and every batch size. Autocast has no effect. The result has
    the dtype of ``x``.
    """
    dtype = sum_dtype(codes.weight, codes.weight_bits, codes.activation_bits)
    dims = (-1, *(1,) * (codes.weight.dim() - 2))
    qmin, qmax = code_range(codes.activation_bits, signed=False)
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
        q = quantize_codes(x, codes.input_scale, codes.input_zero_point, qmin, qmax) - codes.input_zero_point
        sums = product(layer, q.to(dtype), codes.weight.to(dtype), None).round_()  # FFT and Winograd are inexact
        out = sums * (codes.input_scale * codes.weight_scale).view(dims)
        return (out if codes.bias is None else out + codes.bias.view(dims)).to(x.dtype)
