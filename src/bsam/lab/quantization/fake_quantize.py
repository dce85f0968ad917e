"""Fake quantization: round values to integer codes and back, as floating-point numbers."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from ...common.checks import check_count

EPS = torch.finfo(torch.float32).eps  # the smallest scale, used if all values are zero


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

    Args:
        x, scale, zero_point, qmin, qmax: as in :func:`~bsam.lab.quantization.fake_quantize`.

    Example:
        >>> quantize_codes(torch.tensor([-9.0, 0.5, 1.5, 2.6]), torch.tensor(1.0), None, -8, 7)
        tensor([-8., 0., 2., 3.])
    """
    with torch.no_grad():
        codes = torch.div(*_promoted(x, scale)).round_()
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
        qmin, qmax: the smallest and the largest code, see :func:`~bsam.lab.quantization.fake_quantize.code_range`.
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
        v = torch.div(*_promoted(x, scale))
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


def _promoted(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return both tensors in float32, or in float64 if either of them is."""
    dtype = torch.promote_types(torch.promote_types(x.dtype, scale.dtype), torch.float32)
    return x.to(dtype), scale.to(dtype)
