"""A layer computed by integers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .fake_quantize import code_range, quantize_codes

EXACT = 2**24  # float32 holds all integers below it


def sum_dtype(weight: Tensor, weight_bits: int, activation_bits: int) -> torch.dtype:
    r"""Return a type that holds the sums of a layer's products exactly.

    Its largest possible sum is :math:`n\, 2^{b_w - 1} (2^{b_a} - 1)` for ``n`` weights in a channel. Below
    :math:`2^{24}` that is float32, on which GPUs are faster, and else float64.

    Example:
        >>> sum_dtype(torch.empty(512, 512, 3, 3), 4, 4), sum_dtype(torch.empty(512, 512, 3, 3), 8, 8)
        (torch.float32, torch.float64)
    """
    (smallest, _), (_, largest) = code_range(weight_bits, signed=True), code_range(activation_bits, signed=False)
    return torch.float32 if weight.shape[1:].numel() * -smallest * largest < EXACT else torch.float64


@dataclass(frozen=True)
class Codes:
    """The integers and scales of a layer.

    Args:
        weight: the codes of the weight, of any type.
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

    @torch.no_grad()
    def output(self, x: Tensor, product: Callable[[Tensor, Tensor, None], Tensor]) -> Tensor:
        r"""Return the output of the layer, :math:`s_x s_w \sum (q_x - z)\, q_w + b`; without gradient.

        The sums are of integers, held in floating point, and exact in any order of the terms: they are the same on
        every device, for every number of threads and every size of the batch. Autocast has no effect. The result has
        the type of ``x``.

        Args:
            x: the input.
            product: the convolution or the linear map, as a function of input, weight and bias.
        """
        dtype = sum_dtype(self.weight, self.weight_bits, self.activation_bits)
        with torch.autocast(x.device.type, enabled=False):
            qmin, qmax = code_range(self.activation_bits, signed=False)
            codes = quantize_codes(x, self.input_scale, self.input_zero_point, qmin, qmax)
            sums = product((codes - self.input_zero_point).to(dtype), self.weight.to(dtype), None)
            dims = (-1, *(1,) * (self.weight.dim() - 2))
            out = sums * (self.input_scale * self.weight_scale).view(dims)
            return (out if self.bias is None else out + self.bias.view(dims)).to(x.dtype)
