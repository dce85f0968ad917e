"""The batch of a step, which every pass must see as the first one did."""

from __future__ import annotations

import copy
from collections.abc import Mapping, MutableMapping
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from ..core.errors import BsamRuntimeError


def containers_copied(batch: Any) -> Any:
    """Copy lists, dicts and other mappings, but no tensors: ``batch.pop`` leaves the copy as it is."""
    return tree_map(lambda leaf: copy.copy(leaf) if isinstance(leaf, MutableMapping) else leaf, batch)


def tensor_versions(batch: Any) -> list[tuple[Tensor, int]]:
    """Return the tensors of a batch with torch's counts of their in-place changes."""
    leaves = [each for leaf in tree_leaves(batch) for each in (leaf.values() if isinstance(leaf, Mapping) else [leaf])]
    return [(t, t._version) for t in leaves if isinstance(t, Tensor) and not t.is_inference()]


def check_unchanged(before: list[tuple[Tensor, int]], function: str) -> None:
    """Raise if a tensor was changed since :func:`tensor_versions`."""
    if any(t._version != version for t, version in before):
        raise BsamRuntimeError(
            f"{function} changes a tensor of its batch in place, so that later passes would see another batch: change "
            "a copy of it, as in `x = x * 0.5` or `labels = labels.clone()`"
        )
