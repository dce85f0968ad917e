"""Arithmetic of quantization: integer codes, their fake quantization in floating point, and layers with integers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...common.checks import check_count

EPS = torch.finfo(torch.float32).eps  # the smallest scale, used if all values are zero
EXACT = 2**24  # float32 represents all integers below it


def code_range(bits: int, *, signed: bool) -> tuple[int, int]:
    """Return the smallest and the largest code with ``bits`` bits (2 to 8).

    Signed codes include :math:`-2^{b-1}`, as in LSQ and in two's complement.

    Example:
        >>> code_range(4, signed=True), code_range(4, signed=False)
        ((-8, 7), (0, 15))
    """
    check_count("bits", bits, 2, 8)
    return (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)


def positive(scale: Tensor) -> Tensor:
    """Return the absolute value of a learned scale, which is what quantization uses.

    A step may make the scale negative; clamping it to 0 would leave no gradient to recover.
    """
    return scale.abs().clamp(min=EPS)


def quantize_codes(x: Tensor, scale: Tensor, zero_point: Tensor | None, qmin: int, qmax: int) -> Tensor:
    r"""Return the codes in floating point, without gradient.

    .. math::
        q = \mathrm{clamp}(\mathrm{round}(x / s) + z,\; q_{\min},\; q_{\max})

    Example:
        >>> quantize_codes(torch.tensor([-9.0, 0.5, 1.5, 2.6]), torch.tensor(1.0), None, -8, 7)
        tensor([-8., 0., 2., 3.])
    """
    with torch.no_grad():
        codes = torch.div(*_promote(x, scale)).round_()
        return (codes if zero_point is None else codes.add_(zero_point)).clamp_(qmin, qmax)


def fake_quantize(
    x: Tensor, scale: Tensor, zero_point: Tensor | None, qmin: int, qmax: int, *, grad_scale: float = 1.0
) -> Tensor:
    r"""Round values to the nearest values that integer codes represent.

    .. math::
        q = \mathrm{clamp}(\mathrm{round}(x / s) + z,\; q_{\min},\; q_{\max}), \qquad \hat x = s\,(q - z)

    Halves are rounded to even before :math:`z` is added, as in ONNX's QuantizeLinear. The gradient treats the
    derivative of ``round`` as 1 (straight-through estimator). Where the code before the clamp is in range,

    .. math::
        \frac{\partial \hat x}{\partial x} = 1, \qquad \frac{\partial \hat x}{\partial s} = \mathrm{round}(x/s) - x/s,

    and elsewhere the two are 0 and :math:`q - z`. The zero point has no gradient.

    Half-precision values are computed in float32; the result has the dtype of ``x``. The operation does not synchronise
    with the host, so it can be captured in a CUDA graph, and ``torch.compile`` can trace it. Compiled kernels may
    divide less accurately and then differ for values near halves.

    Args:
        x: the values.
        scale: the positive step size :math:`s`, in a shape that broadcasts with ``x``: one element, or one per channel
            as ``(C, 1, 1, 1)``.
        zero_point: the integer :math:`z` as a tensor with the dtype of ``scale`` that broadcasts with ``x``; None means
            0.
        qmin, qmax: the smallest and the largest code, see :func:`~bsam.lab.quantization.arithmetic.code_range`.
        grad_scale: factor for the gradient of the scale. Learned step sizes (LSQ) use
            :math:`1 / \sqrt{n\, q_{\max}}` for ``n`` values that share the scale.

    Example:
        >>> fake_quantize(torch.tensor([-9.0, 0.5, 1.5, 2.6]), torch.tensor(0.5), None, -8, 7)
        tensor([-4.0000, 0.5000, 1.5000, 2.5000])

    Reference:
        Esser, McKinstry, Bablani, Appuswamy, Modha, "Learned Step Size Quantization", ICLR 2020.

    Differences from the paper:
        The paper clips before rounding, so values up to half a step outside the range of the codes count as clipped.
        Here they do not, as in torch's fake quantization. Otherwise the largest weight of a channel would get no
        gradient when the scale comes from the range of the weights.
    """
    return _FakeQuantize.apply(x, scale, zero_point, qmin, qmax, grad_scale)


# We do not use torch._fake_quantize_learnable_per_tensor_affine: it reads scale and zero point on the host, and clamps
# the zero point to the range of the codes.
class _FakeQuantize(torch.autograd.Function):
    no_second_derivative: ClassVar = {  # for bsam.flatness: error messages, by the index of the input
        1: "learned scales have no second derivative: call bsam.lab.quantization.freeze_scales(model), on a copy if "
        "the network is still being trained"
    }

    @staticmethod
    def forward(x: Tensor, scale: Tensor, zero_point: Tensor | None, qmin: int, qmax: int, grad_scale: float) -> Tensor:
        q = quantize_codes(x, scale, zero_point, qmin, qmax)
        return (q if zero_point is None else q.sub_(zero_point)).mul_(scale).to(x.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, scale, zero_point, ctx.qmin, ctx.qmax, ctx.grad_scale = inputs
        ctx.save_for_backward(x, scale, zero_point)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, scale, zero_point = ctx.saved_tensors
        v = torch.div(*_promote(x, scale))
        z = 0 if zero_point is None else zero_point
        codes = v.round() + z
        q = codes.clamp(ctx.qmin, ctx.qmax)
        inside = codes == q
        grad_x = grad_scale = None
        if ctx.needs_input_grad[0]:
            grad_x = torch.where(inside, grad, 0)
        if ctx.needs_input_grad[1]:
            slope = torch.where(inside, q - z - v, q - z)
            grad_scale = (grad * slope).sum_to_size(scale.shape).to(scale.dtype) * ctx.grad_scale
        return grad_x, grad_scale, None, None, None, None


def _promote(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return both tensors in float32, or in float64 if either of them is."""
    dtype = torch.promote_types(torch.promote_types(x.dtype, scale.dtype), torch.float32)
    return x.to(dtype), scale.to(dtype)


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
    (smallest, _) = code_range(weight_bits, signed=True)
    (_, largest) = code_range(activation_bits, signed=False)
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
