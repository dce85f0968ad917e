"""What a batch is: a pair of inputs and targets, how many samples it has, and how it is cut and joined."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from ..core.errors import BsamTypeError, BsamValueError


def pair(batch: Any) -> tuple[Any, Any]:
    """Inputs and targets of a batch."""
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        what = f"{type(batch).__name__} of {len(batch)}" if isinstance(batch, (tuple, list)) else type(batch).__name__
        raise BsamValueError(
            f"each batch of data must be a pair (inputs, targets), and one is a {what}: pass [(x, y), ...] or a "
            "DataLoader"
        )
    x, y = batch
    return x, y


def size_of(x: Any, y: Any) -> int:
    """The number of samples of a batch: rows of the targets or else of the inputs, or entries of a list of targets."""
    for value in (y, x):
        if isinstance(value, Tensor) and value.dim():
            return len(value)
    if isinstance(y, (list, tuple)) and y and all(isinstance(target, Mapping) for target in y):
        return len(y)  # as for detection; that an image with three channels has three boxes means nothing
    sizes = {len(leaf) for leaf in tree_leaves((x, y)) if isinstance(leaf, Tensor) and leaf.dim()}
    if len(sizes) == 1:
        return sizes.pop()
    if isinstance(y, (list, tuple)):
        return len(y)
    raise BsamValueError(
        "a batch of data does not say how many samples it has: give its inputs or its targets as tensors with a row "
        "for each sample"
    )


def split(x: Any, y: Any, size: int) -> list[tuple[Any, Any, int]]:
    """A batch of tensors in pieces of at most ``size`` samples, each with its number of samples."""
    for name, value in (("inputs", x), ("targets", y)):
        if not isinstance(value, Tensor):
            raise BsamTypeError(
                f"micro_batch splits tensors, and the {name} of a batch are a {type(value).__name__}: leave it out, "
                "and make the batches of data smaller"
            )
    if x.shape[:1] != y.shape[:1] or x.dim() == 0:
        raise BsamValueError(
            f"micro_batch splits inputs and targets alike, and a batch has inputs of the shape {tuple(x.shape)} and "
            "targets "
            f"of the shape {tuple(y.shape)}: give both a row for each sample, or leave it out"
        )
    return [(a, b, len(b)) for a, b in zip(x.split(size), y.split(size), strict=True)]


def joined(batches: Sequence[tuple[Any, int]]) -> tuple[Any, int] | None:
    """Outputs and targets of several batches as one; None where they cannot be joined."""
    if not all(by_sample(part, n) for parts, n in batches for part in parts):
        return None
    leaves, structures = zip(*(tree_flatten(parts) for parts, _ in batches), strict=True)
    kinds = {
        tuple(t.shape[1:] if has_rows(t, n) else repr(t) for t in own)
        for own, (_, n) in zip(leaves, batches, strict=True)
    }
    if len(kinds) > 1 or any(structure != structures[0] for structure in structures):
        return None
    n = batches[0][1]
    whole = [torch.cat(rows) if has_rows(rows[0], n) else rows[0] for rows in zip(*leaves, strict=True)]
    return tree_unflatten(whole, structures[0]), sum(n for _, n in batches)


def halves(batch: tuple[Any, int]) -> list[tuple[Any, int]]:
    """A batch in two parts; none where it cannot be cut. Numbers that are not by sample belong to both."""
    parts, n = batch
    if n < 2 or not all(by_sample(part, n) for part in parts):
        return []
    cuts = (slice(0, n // 2), slice(n // 2, n))
    return [(tree_map(lambda t, cut=cut: t[cut] if has_rows(t, n) else t, parts), cut.stop - cut.start) for cut in cuts]


def by_sample(part: Any, n: int) -> bool:
    """Whether inputs, outputs or targets hold tensors with a row for each of ``n`` samples, and else numbers alone."""
    leaves = tree_leaves(part)
    if isinstance(part, (list, tuple)) and len(part) == n:
        return False  # it may have an entry for each sample
    alone = all(has_rows(t, n) or not isinstance(t, Tensor) or t.dim() == 0 for t in leaves)
    return alone and any(has_rows(t, n) for t in leaves)


def has_rows(leaf: Any, n: int) -> bool:
    """Whether it is a tensor with a row for each of ``n`` samples."""
    return isinstance(leaf, Tensor) and leaf.shape[:1] == (n,)
