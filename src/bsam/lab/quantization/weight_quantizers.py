"""Quantizers for weights: where their scales come from."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor, nn

from .fake_quantize import EPS, code_range, fake_quantize, positive


class WeightQuantizer(nn.Module):
    """Base class for the symmetric fake quantization of a weight, with one scale per output channel (dimension 0).

    The codes are signed, from :math:`-2^{b-1}` to :math:`2^{b-1} - 1`; the zero point is 0.

    Args:
        weight: the latent floating-point weight.
        bits: number of bits of the codes, 2 to 8.
    """

    def __init__(self, weight: Tensor, bits: int) -> None:
        super().__init__()
        self.bits = bits
        self.qmin, self.qmax = code_range(bits, signed=True)

    @abstractmethod
    def current_scale(self, weight: Tensor) -> Tensor:
        """Return the positive scales, with shape ``(C, 1, ...)``."""

    def reset(self, weight: Tensor) -> None:
        """Initialize the scales from a weight."""

    def forward(self, weight: Tensor) -> Tensor:
        """Return the weight that the codes represent."""
        return fake_quantize(
            weight, self.current_scale(weight), None, self.qmin, self.qmax, grad_scale=self._grad_scale(weight)
        )

    def _grad_scale(self, weight: Tensor) -> float:
        return 1.0

    def extra_repr(self) -> str:
        """Return the settings that ``print`` shows."""
        return f"bits={self.bits}"


class MinMaxWeightQuantizer(WeightQuantizer):
    r"""Takes the scale of each channel from its largest weight, in each pass: :math:`s = \max |w| / q_{\max}`."""

    def current_scale(self, weight: Tensor) -> Tensor:
        """Return the positive scales, with shape ``(C, 1, ...)`` and without gradient."""
        return _largest(weight.detach(), self.qmax).clamp(min=EPS)


class LearnedWeightQuantizer(WeightQuantizer):
    r"""Learns the scale of each channel as a parameter (LSQ).

    The gradient scale is :math:`1 / \sqrt{n\, q_{\max}}` for ``n`` weights per channel. The initial scale is
    :math:`2\, \mathrm{mean}|w| / \sqrt{q_{\max}}`, as in the paper, or :math:`\max |w| / q_{\max}` if that is smaller:
    with 8 bits the paper's value would leave most codes unused. The absolute value of the scale is used.
    """

    def __init__(self, weight: Tensor, bits: int) -> None:
        super().__init__(weight, bits)
        self.scale = nn.Parameter(torch.empty(len(weight), dtype=weight.dtype, device=weight.device))
        self.reset(weight)

    @torch.no_grad()
    def reset(self, weight: Tensor) -> None:
        """Initialize the scales from a weight."""
        mean = weight.abs().mean(tuple(range(1, weight.dim())))
        largest = _largest(weight, self.qmax).flatten()
        self.scale.copy_(torch.minimum(2 * mean / self.qmax**0.5, largest).clamp(min=EPS))

    def current_scale(self, weight: Tensor) -> Tensor:
        """Return the positive scales, with shape ``(C, 1, ...)``."""
        return positive(self.scale).view(-1, *(1,) * (weight.dim() - 1))

    def _grad_scale(self, weight: Tensor) -> float:
        return (weight[0].numel() * self.qmax) ** -0.5


def _largest(weight: Tensor, qmax: int) -> Tensor:
    return weight.abs().amax(tuple(range(1, weight.dim())), keepdim=True) / qmax
