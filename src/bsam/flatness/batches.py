"""Batches of data: unpack them, count their samples, and split them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from ..common.errors import BsamValueError

Batches: TypeAlias = Iterable[tuple[Any, Any]]


def unpack(batch: Any) -> tuple[Any, Any]:
    """Return the inputs and targets of a batch."""
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        kind = type(batch).__name__ + (f" of {len(batch)}" if isinstance(batch, (tuple, list)) else "")
        raise BsamValueError(
            f"each batch of data must be a pair (inputs, targets), got a {kind}: pass a DataLoader or [(x, y), ...]"
        )
    return batch[0], batch[1]


def num_samples(x: Any, y: Any) -> int:
    """Return the number of samples: the rows of the targets or of the inputs, or the length of a list of targets."""
    for value in (y, x):
        if isinstance(value, Tensor) and value.dim():
            return len(value)
    if isinstance(y, (list, tuple)) and y and all(isinstance(target, Mapping) for target in y):
        return len(y)  # object detection: the leading dimensions of images and boxes are not samples
    sizes = {len(leaf) for leaf in tree_leaves((x, y)) if isinstance(leaf, Tensor) and leaf.dim()}
    if len(sizes) == 1:
        return sizes.pop()
    if isinstance(y, (list, tuple)):
        return len(y)
    raise BsamValueError(
        "cannot tell how many samples a batch of data has: pass inputs or targets as tensors with one row per sample"
    )


def split(x: Any, y: Any, size: int) -> list[tuple[Any, Any, int]]:
    """Split a batch into micro-batches (inputs, targets, number of samples) of at most ``size`` samples."""
    if not (isinstance(x, Tensor) and isinstance(y, Tensor)) or x.dim() == 0 or x.shape[:1] != y.shape[:1]:
        got = " and ".join(str(tuple(t.shape)) if isinstance(t, Tensor) else type(t).__name__ for t in (x, y))
        raise BsamValueError(
            f"micro_batch needs tensors with one row per sample as inputs and targets, got {got}: omit it and make the "
            "batches of data smaller"
        )
    return [(a, b, len(b)) for a, b in zip(x.split(size), y.split(size), strict=True)]


def halve(parts: tuple[Any, Any], n: int) -> list[tuple[tuple[Any, Any], int]]:
    """Split (inputs or outputs, targets) of ``n`` samples into two halves, each with its number of samples.

    Values without a row per sample go into both halves. The list is empty if the batch cannot be split.
    """
    if n < 2 or not all(_by_sample(part, n) for part in parts):
        return []
    ranges = (slice(0, n // 2), slice(n // 2, n))
    return [(tree_map(lambda t, r=r: t[r] if has_rows(t, n) else t, parts), r.stop - r.start) for r in ranges]


def first_sample(parts: tuple[bool, Any, Any], n: int) -> Any:
    """Return a copy of the first of ``n`` samples, as a batch of one; None if the batch cannot be split."""
    if not all(_by_sample(part, n) for part in parts[1:]):
        return None
    return tree_map(lambda t: t[:1].detach().clone() if has_rows(t, n) else t, parts)


def can_be_joined(first: Any, second: Any) -> bool:
    """Return whether two samples, each a batch of one, can be one batch."""
    (a, structure), (b, other) = tree_flatten(first), tree_flatten(second)
    return structure == other and all(map(_leaves_can_be_joined, a, b))


def _leaves_can_be_joined(s: Any, t: Any) -> bool:
    if not (isinstance(s, Tensor) and isinstance(t, Tensor)):
        return bool(s == t)
    return s.shape == t.shape and s.dtype == t.dtype and (has_rows(s, 1) or torch.equal(s, t))


def join(samples: list[Any]) -> Any:
    """Return samples, each a batch of one, as one batch; they must fit according to :func:`can_be_joined`."""
    return tree_map(lambda *leaves: torch.cat(leaves) if has_rows(leaves[0], 1) else leaves[0], *samples)


def _by_sample(part: Any, n: int) -> bool:
    """Return whether at least one tensor has a row for each of ``n`` samples and all other leaves are scalars."""
    if isinstance(part, (list, tuple)) and len(part) == n:
        return False  # its entries may be samples, but only the rows of tensors can be split
    leaves = tree_leaves(part)
    without_rows = [t for t in leaves if not has_rows(t, n)]
    return len(without_rows) < len(leaves) and all(not isinstance(t, Tensor) or t.dim() == 0 for t in without_rows)


def has_rows(leaf: Any, n: int) -> bool:
    """Return whether ``leaf`` is a dense tensor with a row for each of ``n`` samples."""
    return isinstance(leaf, Tensor) and leaf.layout == torch.strided and leaf.shape[:1] == (n,)


class CastBatches:
    """``data`` with all floating-point tensors cast to ``dtype``."""

    def __init__(self, data: Batches, dtype: torch.dtype) -> None:
        self.data, self.dtype = data, dtype

    def __iter__(self) -> Iterator[Any]:
        for batch in self.data:
            yield tree_map(lambda t: t.to(self.dtype) if isinstance(t, Tensor) and t.is_floating_point() else t, batch)
