"""Quantizers of weights and of layer inputs: where scales and zero points come from, and when they change."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from ...common.errors import BsamRuntimeError
from ...core.ranks import several_ranks
from ...core.tensors import sharding
from .arithmetic import EPS, code_range, fake_quantize, positive


class Quantizer(nn.Module):
    """Base class for fake quantization: the range of the codes, and the factor for the gradient of the scale.

    Args:
        bits: number of bits of the codes, 2 to 8.
    """

    signed: ClassVar[bool]  #: whether codes may be negative
    learned: ClassVar[bool] = False  #: whether the scale is a parameter

    def __init__(self, bits: int) -> None:
        super().__init__()
        self.bits = bits
        self.qmin, self.qmax = code_range(bits, signed=self.signed)

    def _grad_scale(self, x: Tensor) -> float:
        return (x.shape[1:].numel() * self.qmax) ** -0.5 if self.learned else 1.0

    def extra_repr(self) -> str:
        return f"bits={self.bits}"


class WeightQuantizer(Quantizer):
    """Base class for the symmetric fake quantization of a weight, with one scale per output channel (dimension 0).

    The codes are signed, from :math:`-2^{b-1}` to :math:`2^{b-1} - 1`; the zero point is 0.

    Args:
        weight: the latent floating-point weight.
        bits: number of bits of the codes, 2 to 8.
    """

    signed = True

    def __init__(self, weight: Tensor, bits: int) -> None:
        super().__init__(bits)

    @abstractmethod
    def current_scale(self, weight: Tensor) -> Tensor:
        """Return the positive scales, with shape ``(C, 1, ...)``."""

    def reset(self, weight: Tensor) -> None:
        """Initialize the scales from a weight."""

    def forward(self, weight: Tensor) -> Tensor:
        return fake_quantize(
            weight, self.current_scale(weight), None, self.qmin, self.qmax, grad_scale=self._grad_scale(weight)
        )


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

    learned = True

    def __init__(self, weight: Tensor, bits: int) -> None:
        super().__init__(weight, bits)
        self.scale = nn.Parameter(torch.empty(len(weight), dtype=weight.dtype, device=weight.device))
        self.reset(weight)

    @torch.no_grad()
    def reset(self, weight: Tensor) -> None:
        mean = weight.abs().mean(tuple(range(1, weight.dim())))
        largest = _largest(weight, self.qmax).flatten()
        self.scale.copy_(torch.minimum(2 * mean / self.qmax**0.5, largest).clamp(min=EPS))

    def current_scale(self, weight: Tensor) -> Tensor:
        return positive(self.scale).view(-1, *(1,) * (weight.dim() - 1))


class InputQuantizer(Quantizer):
    """Base class for the affine fake quantization of a layer's input, with one scale and zero point per tensor.

    The codes are unsigned, from 0 to :math:`2^b - 1`. They represent the value 0, and therefore zero padding, exactly;
    after ReLU the zero point is 0.

    Input statistics change only in training mode, and once per sharpness-aware step. Before the first batch in training
    mode there is no scale, and a pass in eval mode raises an error.

    Args:
        bits: number of bits of the codes, 2 to 8.
        dtype, device: dtype and device of the scale.
    """

    signed = False

    def __init__(self, bits: int, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(bits)
        self._checked = False  # caches `initialized`, which reads tensors and so waits for the GPU

    @property
    @abstractmethod
    def initialized(self) -> bool:
        """Whether a batch was run in training mode."""

    @abstractmethod
    def reset(self) -> None:
        """Forget all batches."""

    def initialize(self, x: Tensor) -> None:
        """Initialize scale and zero point from the first batch."""

    def update(self, x: Tensor) -> None:
        """Update the statistics with a batch."""

    @abstractmethod
    def scale_and_zero_point(self) -> tuple[Tensor, Tensor]:
        """Return the positive scale and the zero point, with one element each; requires initialization."""

    def current_scale(self) -> tuple[Tensor, Tensor]:
        """Return the positive scale and the zero point, with one element each; raise if not initialized."""
        if not self._checked:
            self._check()
        return self.scale_and_zero_point()

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            if not self._checked:
                self._check(x.detach())
            self.update(x.detach())
        scale, zero_point = self.current_scale()
        return fake_quantize(x, scale, zero_point, self.qmin, self.qmax, grad_scale=self._grad_scale(x))

    @_disable_dynamo  # torch.compiler.disable would import torch._dynamo here, which takes seconds
    def _check(self, x: Tensor | None = None) -> None:
        if not self.initialized:
            if x is None:
                raise BsamRuntimeError(
                    "the input scale of a quantized layer is not initialized: run a batch in training mode or call "
                    "bsam.lab.quantization.calibrate first"
                )
            if not bool(x.isfinite().all()):
                raise BsamRuntimeError(
                    "the first input of a quantized layer is not finite, so its scale cannot be initialized: look for "
                    "NaN or inf in the batch and in the weights of earlier layers"
                )
            self.initialize(x)
        self._checked = True

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        tensors = (*self.parameters(), *self.buffers())
        readable = not any(t.is_meta or sharding(t) is not None for t in tensors)  # otherwise checked in the first pass
        self._checked = readable and self.initialized  # a check in a compiled pass would break the graph


class MinMaxInputQuantizer(InputQuantizer):
    """Takes scale and zero point from moving averages of the smallest and the largest input of a batch.

    With ``torch.distributed``, the range covers the batches of all ranks, so that the scales agree; all ranks must run
    a batch.

    Args:
        bits, dtype, device: as in :class:`~bsam.lab.quantization.quantizers.InputQuantizer`.
        momentum: weight of the new batch in the averages.
    """

    low: Tensor
    high: Tensor

    def __init__(self, bits: int, *, dtype: torch.dtype, device: torch.device, momentum: float = 0.1) -> None:
        super().__init__(bits, dtype=dtype, device=device)
        self.momentum = momentum
        self.register_buffer("low", torch.empty((), dtype=dtype, device=device))
        self.register_buffer("high", torch.empty((), dtype=dtype, device=device))
        self.reset()

    @property
    def initialized(self) -> bool:
        return bool(self.low <= self.high)

    def reset(self) -> None:
        self._checked = False
        self.low.fill_(torch.inf)
        self.high.fill_(-torch.inf)

    @torch.no_grad()
    def update(self, x: Tensor) -> None:
        """Update the averages with a batch; the first one sets them."""
        low, high = (t.to(self.low.dtype) for t in _range(x))
        first = self.low > self.high
        self.low.copy_(torch.where(first, low, self.low.lerp(low, self.momentum)))
        self.high.copy_(torch.where(first, high, self.high.lerp(high, self.momentum)))

    def scale_and_zero_point(self) -> tuple[Tensor, Tensor]:
        """Return the positive scale and the zero point, with one element each and without gradient."""
        return affine(self.low, self.high, self.qmin, self.qmax)


class LearnedInputQuantizer(InputQuantizer):
    r"""Learns the scale as a parameter (LSQ).

    The gradient scale is :math:`1 / \sqrt{n\, q_{\max}}` for ``n`` values per sample. The first batch sets the zero
    point from the range of its values. It sets the scale to :math:`2\, \mathrm{mean}|x| / \sqrt{q_{\max}}`, as in the
    LSQ paper, or to the scale that covers this range, whichever is smaller. The zero point then stays fixed. With
    ``torch.distributed``, the first batch covers all ranks, and all of them must run it. If training makes the scale
    negative, its absolute value is used.
    """

    learned = True
    zero_point: Tensor
    buffers_set_once = True  # the first batch sets the zero point

    def __init__(self, bits: int, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(bits, dtype=dtype, device=device)
        self.scale = nn.Parameter(torch.zeros(1, dtype=dtype, device=device))  # 1-D: FSDP takes no 0-dim parameter
        self.register_buffer("zero_point", torch.zeros((), dtype=dtype, device=device))

    @property
    def initialized(self) -> bool:
        return bool(self.scale != 0)

    @torch.no_grad()
    def reset(self) -> None:
        """Forget the first batch, so that the next one initializes the scale."""
        self._checked = False
        self.scale.zero_()

    @torch.no_grad()
    def initialize(self, x: Tensor) -> None:
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        mean = x.abs().mean()
        if several_ranks():
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
        scale, zero_point = affine(*_range(x), self.qmin, self.qmax)
        self.scale.copy_(torch.minimum(2 * mean / self.qmax**0.5, scale).clamp(min=EPS))
        self.zero_point.copy_(zero_point)

    def scale_and_zero_point(self) -> tuple[Tensor, Tensor]:
        return positive(self.scale), self.zero_point


def _range(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the smallest and the largest value in the batches of all ranks."""
    low, high = x.aminmax()
    if not several_ranks():
        return low, high
    ends = torch.stack([-low, high]).to(torch.promote_types(x.dtype, torch.float32))
    dist.all_reduce(ends, dist.ReduceOp.MAX)
    return -ends[0], ends[1]


def affine(low: Tensor, high: Tensor, qmin: int, qmax: int) -> tuple[Tensor, Tensor]:
    """Return the scale and zero point of codes that cover ``low``, ``high`` and 0.

    Example:
        >>> affine(torch.tensor(-1.0), torch.tensor(2.0), 0, 15)
        (tensor(0.2000), tensor(5.))
        >>> affine(torch.tensor(3.0), torch.tensor(3.0), 0, 15)
        (tensor(0.2000), tensor(0.))
    """
    low = low.clamp(max=0)
    high = high.clamp(min=0)
    scale = ((high - low) / (qmax - qmin)).clamp(min=EPS)
    return scale, (qmin - low / scale).round().clamp(qmin, qmax)


def _largest(weight: Tensor, qmax: int) -> Tensor:
    return weight.abs().amax(tuple(range(1, weight.dim())), keepdim=True) / qmax


SCHEMES: dict[str, tuple[type[WeightQuantizer], type[InputQuantizer]]] = {
    "lsq": (LearnedWeightQuantizer, LearnedInputQuantizer),
    "minmax": (MinMaxWeightQuantizer, MinMaxInputQuantizer),
}
