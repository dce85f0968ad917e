"""The batch of a step, which every pass must see as the first one did."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import fields, is_dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from ..core.errors import BsamRuntimeError

PLAIN = {str, bytes, int, float, bool, type(None), Tensor}  # have nothing to follow: long lists of them are fast


def containers_copied(batch: Any) -> Any:
    """Copy lists, dicts, arrays of NumPy and objects with their attributes, but no tensors: ``batch.pop`` and ``batch.x
    = ...`` leave the copy as it is.

    Of the objects that are attributes, those that hold data are copied as well: dataclasses, namespaces and mappings.
    Others may be known by their identity, or large, as a data set is.
    """
    known: dict[int, tuple[Any, Any]] = {}  # objects and their copies: they may refer to each other

    def copied(leaf: Any, nested: bool = False) -> Any:
        is_array = isinstance(leaf, np.ndarray)
        if not is_array and _attributes(leaf, nested) is None:
            return leaf
        if id(leaf) not in known:
            new = leaf.copy(order="K") if is_array else copy.copy(leaf)
            known[id(leaf)] = leaf, new
            if not is_array and new is not leaf:  # as a member of an Enum is
                for name, value in (_attributes(new, nested) or {}).items():
                    if name in getattr(new, "__dict__", ()):
                        vars(new)[name] = tree_map(copied_attribute, value)
                    else:
                        object.__setattr__(new, name, tree_map(copied_attribute, value))  # also where it is frozen
                if isinstance(new, dict):  # of a class that tree_map does not know, as the list below
                    for key, value in new.items():
                        dict.__setitem__(new, key, tree_map(copied_attribute, value))
                elif isinstance(new, list):
                    new[:] = tree_map(copied_attribute, list(new))
        return known[id(leaf)][1]

    def copied_attribute(leaf: Any) -> Any:
        return copied(leaf, nested=True)

    return tree_map(copied, batch)


def _attributes(leaf: Any, nested: bool) -> dict[str, Any] | None:
    """Return the attributes of an object that may carry a batch in them; None if it is something else."""
    if type(leaf) in PLAIN or isinstance(leaf, (Tensor, Iterator, ModuleType)) or callable(leaf):
        return None
    if nested and not (is_dataclass(leaf) or isinstance(leaf, (SimpleNamespace, MutableMapping))):
        return None
    names = [each.name for each in fields(leaf)] if is_dataclass(leaf) else []
    if not names and not hasattr(leaf, "__dict__"):
        return None
    return {name: getattr(leaf, name) for name in names if hasattr(leaf, name)} | getattr(leaf, "__dict__", {})


def _tensors(batch: Any, known: dict[int, Any], nested: bool = False) -> Iterator[Tensor]:
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor):
            yield leaf
        elif type(leaf) not in PLAIN and id(leaf) not in known:
            known[id(leaf)] = leaf
            if isinstance(leaf, (Mapping, list)):
                yield from _tensors(list(leaf.values() if isinstance(leaf, Mapping) else leaf), known, nested)
            yield from _tensors(list((_attributes(leaf, nested) or {}).values()), known, nested=True)


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
