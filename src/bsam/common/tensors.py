"""Comparing and writing tensors in place."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.nn.parameter import is_lazy

from .layout import local, sharding


def is_writable(t: Tensor) -> bool:
    """Whether a tensor can be written in place: not if it is lazy, expanded, sparse, sharded or for inference only."""
    if is_lazy(t) or t.layout != torch.strided or t.is_inference() or sharding(t) is not None:
        return False
    return all(stride != 0 or n == 1 for n, stride in zip(t.shape, t.stride(), strict=True))


def equal(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same shape and values, if sharded on this rank; NaN equals NaN."""
    if a.shape != b.shape:
        return False
    a, b = local(a), local(b)
    return bool(((a == b) | ((a != a) & (b != b))).all())


def copy(source: list[Tensor], into: list[Tensor]) -> None:
    """Copy tensors; ``into`` is resized if the shapes differ."""
    if [t.shape for t in into] != [t.shape for t in source]:  # an observer learns its shape from the first batch
        for t, s in zip(into, source, strict=True):
            t.resize_(s.shape)
    torch._foreach_copy_(into, source)


def copy_keeping_versions(source: list[Tensor], into: list[Tensor]) -> None:
    """Copy tensors without new versions, so that autograd graphs that saved them stay valid."""
    with _unsafe_preserve_version_counter(tuple(into)):
        copy(source, into)


@contextlib.contextmanager
def other_memory(tensors: Sequence[Tensor], others: Sequence[Tensor] | None = None) -> Iterator[None]:
    """Let tensors use the memory of ``others`` inside the context, by default new memory; they get theirs back on exit.

    The entries in the other memory are undefined at first.
    """
    before = [t.data for t in tensors]
    others = [torch.empty_like(t) for t in tensors] if others is None else others
    try:
        for t, other in zip(tensors, others, strict=True):
            t.data = other.data
        yield
    finally:
        for t, data in zip(tensors, before, strict=True):
            t.data = data
