"""The batch of a step, which every pass must see as the first one did."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from ..core.errors import BsamRuntimeError


def containers_copied(batch: Any) -> Any:
    """Copy lists, dicts, other mappings, objects such as dataclasses, and arrays of NumPy, also nested, but no tensors:
    ``batch.pop`` and ``batch.x = ...`` leave the copy as it is.
    """
    known: dict[int, tuple[Any, Any]] = {}  # objects and their copies: they may refer to each other

    def copied(leaf: Any) -> Any:
        if isinstance(leaf, np.ndarray):
            return leaf.copy()
        if not isinstance(leaf, dict) and not _attributes(leaf):
            return leaf
        if id(leaf) not in known:
            new = copy.copy(leaf)
            known[id(leaf)] = leaf, new
            if new is leaf:  # as a member of an Enum
                return leaf
            if isinstance(leaf, dict):  # of a class that tree_map does not know; other mappings have attributes
                new.update({key: tree_map(copied, value) for key, value in leaf.items()})
            for name, value in _attributes(new).items():
                object.__setattr__(new, name, tree_map(copied, value))  # also where a class has a __setattr__
        return known[id(leaf)][1]

    return tree_map(copied, batch)


def _attributes(leaf: Any) -> dict[str, Any]:
    """Return the attributes of an object that may carry a batch in them, also those in slots."""
    if isinstance(leaf, (Tensor, Iterator)) or callable(leaf):
        return {}
    slots = [getattr(kind, "__slots__", ()) for kind in type(leaf).__mro__]
    names = [name for each in slots for name in ((each,) if isinstance(each, str) else each)]
    in_slots = {name: getattr(leaf, name) for name in names if not name.startswith("__") and hasattr(leaf, name)}
    return in_slots | getattr(leaf, "__dict__", {})


def _tensors(batch: Any, known: dict[int, Any]) -> Iterator[Tensor]:
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor):
            yield leaf
        elif id(leaf) not in known:
            known[id(leaf)] = leaf
            yield from _tensors(list(leaf.values()) if isinstance(leaf, Mapping) else [], known)
            yield from _tensors(list(_attributes(leaf).values()), known)


def tensor_versions(batch: Any) -> list[tuple[Tensor, int]]:
    """Return the tensors of a batch with torch's counts of their in-place changes."""
    return [(t, t._version) for t in _tensors(batch, {}) if not t.is_inference()]


def check_unchanged(before: list[tuple[Tensor, int]], function: str) -> None:
    """Raise if a tensor was changed since :func:`tensor_versions`."""
    if any(t._version != version for t, version in before):
        raise BsamRuntimeError(
            f"{function} changes a tensor of its batch in place, so that later passes would see another batch: change "
            "a copy of it, as in `x = x * 0.5` or `labels = labels.clone()`"
        )
