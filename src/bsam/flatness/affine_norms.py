"""Batch norm with fixed statistics, as the affine function that it is: torch's own has derivatives that take twice as many passes over memory."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

_SIGNATURE = inspect.signature(F.batch_norm)


class AffineNorms(TorchFunctionMode):
    """In here ``F.batch_norm`` with running statistics is one multiplication and addition per entry, and so are its derivatives.

    Example:
        >>> norm = torch.nn.BatchNorm1d(2).eval()
        >>> x = torch.tensor([[1.0, 2.0]])
        >>> with AffineNorms():
        ...     y = norm(x)
        >>> torch.allclose(y, norm(x))
        True
    """

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if func is F.batch_norm:
            bound = _SIGNATURE.bind(*args, **(kwargs or {}))
            bound.apply_defaults()
            given = bound.arguments
            if not given["training"] and given["input"].dtype == given["running_var"].dtype:
                return _affine(given["input"], given["running_mean"], given["running_var"], given["weight"], given["bias"], given["eps"])
        return func(*args, **(kwargs or {}))


def _affine(x: Tensor, mean: Tensor, variance: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    scale = (variance + eps).rsqrt()
    scale = scale if weight is None else scale * weight
    shift = -mean * scale if bias is None else bias - mean * scale
    shape = (-1, *(1,) * (x.dim() - 2))
    return torch.addcmul(shift.view(shape), x, scale.view(shape))
