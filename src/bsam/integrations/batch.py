"""The batch of a step, which every pass must see as the first one did."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from ..core.errors import BsamRuntimeError


def containers_copied(batch: Any) -> Any:
    """Copy lists, dicts, other mappings and objects such as dataclasses, but no tensors: ``batch.pop`` and ``batch.x =
    ...`` leave the copy as it is.
    """
    return tree_map(_copied, batch)


def _copied(leaf: Any) -> Any:
    if isinstance(leaf, MutableMapping):
        copied = copy.copy(leaf)
        copied.update({key: containers_copied(value) for key, value in leaf.items() if not isinstance(value, Tensor)})
        return copied
    return copy.copy(leaf) if _has_attributes(leaf) else leaf


def _has_attributes(leaf: Any) -> bool:
    """Return whether a leaf is an object that may carry a batch in its attributes."""
    return hasattr(leaf, "__dict__") and not isinstance(leaf, (Tensor, Iterator)) and not callable(leaf)


def _tensors(batch: Any) -> Iterator[Tensor]:
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor):
            yield leaf
        elif isinstance(leaf, Mapping):
            yield from _tensors(list(leaf.values()))
        elif _has_attributes(leaf):
            yield from (value for value in tree_leaves(vars(leaf)) if isinstance(value, Tensor))


def tensor_versions(batch: Any) -> list[tuple[Tensor, int]]:
    """Return the tensors of a batch with torch's counts of their in-place changes."""
    return [(t, t._version) for t in _tensors(batch) if not t.is_inference()]


def check_unchanged(before: list[tuple[Tensor, int]], function: str) -> None:
    """Raise if a tensor was changed since :func:`tensor_versions`."""
    if any(t._version != version for t, version in before):
        raise BsamRuntimeError(
            f"{function} changes a tensor of its batch in place, so that later passes would see another batch: change "
            "a copy of it, as in `x = x * 0.5` or `labels = labels.clone()`"
        )
