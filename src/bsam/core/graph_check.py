"""Detecting losses, or parts of them, that were not computed in the current pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..common.errors import BsamRuntimeError

_OUTSIDE = (
    "the loss, or a part of it, was computed before this pass, and therefore not at the perturbed weights: compute the "
    "whole loss inside the closure, or detach the parts that are meant to stay constant"
)


class GraphCheck:
    """Compare the autograd graphs of a step's passes: a node that two passes share ignores the perturbation.

    Args:
        params: the parameters of the optimizer.
        on_leaf: if given, compare all nodes of the graphs instead of only their roots, also between passes at ``w``,
            and call this function with each leaf before ``backward``.
    """

    def __init__(self, params: Sequence[Tensor], on_leaf: Callable[[Tensor], None] | None = None) -> None:
        self._params, self._on_leaf = params, on_leaf
        self._earlier: set[Any] = set()  # nodes of earlier passes
        self._current: list[Any] = []  # nodes of this pass

    def begin_pass(self) -> None:
        """Begin a pass. Call this before the closure."""
        self._earlier.update(self._current)
        self._current, self._since = [], torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]

    def check(self, loss: Tensor, moved: bool) -> None:
        """Raise if the loss at perturbed weights depends on parameters through nodes of an earlier pass.

        The first pass has no earlier graph to compare with. There, a root is too old if its autograd sequence number is
        smaller than the one at :meth:`begin_pass`.
        """
        root: Any = loss.grad_fn
        if root is None:
            return
        compare = moved or self._on_leaf is not None
        if compare and not self._earlier and root._sequence_nr() < self._since:
            raise BsamRuntimeError(_OUTSIDE)
        nodes = [root] if self._on_leaf is None else list(_graph(root))
        if compare and any(self._reaches_parameters(node) for node in nodes if node in self._earlier):
            raise BsamRuntimeError(_OUTSIDE)
        self._current += nodes
        if self._on_leaf is not None:
            for leaf in _leaves(root):
                self._on_leaf(leaf)

    def _reaches_parameters(self, node: Any) -> bool:
        params = {id(p) for p in self._params}
        return any(id(leaf) in params for leaf in _leaves(node))


def _leaves(root: Any) -> Iterator[Tensor]:
    return (n.variable for n in _graph(root, leaves=True) if type(n).__name__ == "AccumulateGrad")


def _graph(root: Any, leaves: bool = False) -> Iterator[Any]:
    """Iterate over the nodes of a graph, with or without the leaves, which all passes share."""
    visited, todo = {root}, [root]
    while todo:
        node = todo.pop()
        if leaves or type(node).__name__ != "AccumulateGrad":
            yield node
        for following, _ in node.next_functions:
            if following is not None and following not in visited:
                visited.add(following)
                todo.append(following)
