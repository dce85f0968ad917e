"""Give every pass of a step the same batch."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from ..common.errors import BsamRuntimeError


def new_containers(batch: Any) -> Any:
    """Copy the lists, tuples and dicts of a batch, so that a pass may ``pop`` from them."""
    return tree_map(lambda leaf: leaf, batch)


def tensor_versions(batch: Any) -> list[tuple[Tensor, int]]:
    """Return the tensors of a batch, with torch's counts of their in-place changes."""
    return [(t, t._version) for t in tree_leaves(batch) if isinstance(t, Tensor) and not t.is_inference()]


def check_unchanged(before: list[tuple[Tensor, int]], function: str) -> None:
    """Raise an error if a tensor was changed in place since :func:`tensor_versions`."""
    if any(t._version != version for t, version in before):
        raise BsamRuntimeError(
            f"{function} changes a tensor of its batch in place, so later passes would see a different batch: change a "
            "copy, as in `x = x * 0.5` or `labels = labels.clone()`"
        )
