"""The autograd graph of a loss."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from torch import Tensor

COMPUTED_OUTSIDE = (
    "the loss, or a part of it, was computed before this pass and so not at the perturbed weights. Compute the whole "
    "loss inside the closure, or detach the parts that are meant to stay constant"
)


def nodes(root: Any, *, accumulate: bool = False) -> Iterator[Any]:
    """Iterate over the nodes of a graph; those that accumulate gradients, which all passes share, only if asked for."""
    visited, todo = {root}, [root]
    while todo:
        node = todo.pop()
        if accumulate or type(node).__name__ != "AccumulateGrad":
            yield node
        for following, _ in node.next_functions:
            if following is not None and following not in visited:
                visited.add(following)
                todo.append(following)


def leaves(root: Any) -> Iterator[Tensor]:
    """Iterate over the tensors that get a gradient."""
    return (n.variable for n in nodes(root, accumulate=True) if type(n).__name__ == "AccumulateGrad")


def reaches(root: Any, params: Collection[Tensor]) -> bool:
    """Whether a node depends on one of the parameters."""
    own = {id(p) for p in params}
    return any(id(leaf) in own for leaf in leaves(root))
