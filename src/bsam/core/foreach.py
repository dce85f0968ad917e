"""Operations on lists of tensors, with little memory traffic."""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

CHUNK = 2**16  # entries per dot product: longer float32 sums lose digits
Scalar: TypeAlias = float | Tensor  # a number, or a 0-dim tensor on the same device


def is_one(c: Scalar) -> bool:
    """Whether ``c`` is the number 1. False for tensors: reading one would synchronize."""
    return not isinstance(c, Tensor) and c == 1.0


def scale_(y: list[Tensor], c: Scalar) -> None:
    """Compute ``y *= c``."""
    if not is_one(c):
        torch._foreach_mul_(y, c)


def axpy_(y: list[Tensor], c: Scalar, x: list[Tensor]) -> None:
    """Compute ``y += c * x``."""
    if not isinstance(c, Tensor):
        torch._foreach_add_(y, x, alpha=c)
    elif y[0].is_cuda and y[0].dtype != torch.float64 and _same_strides(y, x):
        # _foreach_add_ cannot read alpha from the device. SGD's fused kernel reads lr from it (as float32) and needs no
        # memory for the product.
        torch._fused_sgd_(
            y, x, [], weight_decay=0.0, momentum=0.0, lr=c.float(), dampening=0.0, nesterov=False, maximize=True,
            is_first_step=False,
        )  # fmt: skip
    else:
        torch._foreach_add_(y, torch._foreach_mul(x, c))


def _same_strides(y: list[Tensor], x: list[Tensor]) -> bool:
    return all(a.stride() == b.stride() for a, b in zip(y, x, strict=True))


def combined(terms: list[tuple[Scalar, list[Tensor]]]) -> list[Tensor]:
    """Return the sum of ``c * x`` over the terms, in new memory."""
    (c, x), *rest = terms
    second = rest[0][0] if rest else None
    if is_one(c) and isinstance(second, float):  # the first two in one operation
        (_, y), *rest = rest
        out = list(torch._foreach_add(x, y, alpha=second))
    else:
        out = list(torch._foreach_mul(x, c))
    for d, y in rest:
        axpy_(out, d, y)
    return out


def norms(x: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Return the L2 norm of each tensor."""
    if all(t.is_cpu for t in x):
        return [product.sqrt() for product in dots(x, x, dtype)]  # more accurate than float32 norms of large tensors
    return list(torch._foreach_norm(x, 2, dtype=dtype))


def dots(x: list[Tensor], y: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Return the inner product of each pair of tensors."""
    if all(t.is_cpu for t in x):
        return [_dot(*_flat(a, b), dtype) for a, b in zip(x, y, strict=True)]  # no memory for the products
    wide = [t.to(dtype) for t in x]  # in float16, products of small entries would be 0
    return [product.sum() for product in torch._foreach_mul(wide, y)]


def _flat(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return the entries of two tensors in one order, that of the first one's memory: views if both are dense."""
    if a is b and a.is_contiguous():
        return (a := a.view(-1)), a
    if a.is_contiguous() and b.is_contiguous():
        return a.view(-1), b.view(-1)
    order = sorted(range(a.dim()), key=a.stride, reverse=True)  # channels_last, transposed
    return a.permute(order).reshape(-1), b.permute(order).reshape(-1)


def _dot(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    if a.numel() > CHUNK:
        parts = zip(a.split(CHUNK), b.split(CHUNK), strict=True)
        return torch.stack([_dot(x, y, dtype) for x, y in parts]).sum()
    return torch.dot(a, b) if a.dtype == dtype else torch.dot(a.to(dtype), b.to(dtype))
