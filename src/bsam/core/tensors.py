"""Comparing and writing tensors in place."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from .layout import local, sharding


def is_writable(t: Tensor) -> bool:
    """Whether a tensor can be written in place: not if it is lazy, expanded, sparse, sharded or for inference only."""
    if is_lazy(t) or t.layout != torch.strided or t.is_inference() or sharding(t) is not None:
        return False
    return all(stride != 0 or n == 1 for n, stride in zip(t.shape, t.stride(), strict=True))


def clear_weight_caches() -> None:
    """Clear the caches of values computed from weights: autocast's casts, and those of ``parametrize.cached``."""
    torch.clear_autocast_cache()
    parametrize._cache.clear()


class Memory:
    """The memory that tensors occupy, from the first to the last byte. Tensors without a storage have none.

    Example:
        >>> t = torch.zeros(4)
        >>> Memory([t[:2]]).overlaps(t[1:]), Memory([t[:2]]).overlaps(t[2:])
        (True, False)
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._ranges: dict[int, list[tuple[int, int]]] = defaultdict(list)  # by the address of the storage
        for t in tensors:
            self.add(t)

    def add(self, t: Tensor) -> None:
        """Add a tensor."""
        storage, start, end = _address(t)
        self._ranges[storage].append((start, end))

    def overlaps(self, t: Tensor) -> bool:
        """Whether a tensor shares memory with one of those added."""
        storage, start, end = _address(t)
        return any(start < other_end and other_start < end for other_start, other_end in self._ranges[storage])


def _address(t: Tensor) -> tuple[int, int, int]:
    """Return the address of the storage, and the first and last byte that the tensor uses."""
    try:
        t = local(t)
        storage, start = t.untyped_storage().data_ptr(), int(t.storage_offset()) * t.itemsize
        last = sum((n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True))
    except RuntimeError:  # sparse tensors, and subclasses that wrap others, such as quantized weights
        return 0, 0, 0
    return storage, start, start + (last + 1) * t.itemsize if t.numel() and storage else start


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
