"""Detecting a loss, or a part of one, that was not computed from scratch in this pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .errors import BsamRuntimeError

_OUTSIDE = (
    "the loss, or a part of it, was computed before this pass and so not at the perturbed weights. Compute the whole "
    "loss inside the closure, or detach the parts that are meant to stay constant"
)


class GraphCheck:
    """Compare the autograd graphs of the passes of a step: nodes that two passes share ignore the perturbation.

    Args:
        params: the parameters of the optimizer.
        whole: whether to compare all nodes of the graphs, or only the roots.
    """

    def __init__(self, params: Sequence[Tensor], whole: bool) -> None:
        self._params, self._whole = params, whole
        self._earlier: set[Any] = set()  # nodes of earlier passes
        self._current: list[Any] = []  # nodes of this pass

    def begin_pass(self) -> None:
        """Begin a pass. Call before the closure."""
        self._earlier.update(self._current)
        self._current, self._since = [], torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]

    def check(self, loss: Tensor, moved: bool) -> None:
        """Raise if the loss of perturbed weights depends on parameters through nodes of another pass.

        In the first pass there is no earlier graph to compare with: a root whose autograd sequence number is smaller
        than at :meth:`begin_pass` was created before the pass.
        """
        root: Any = loss.grad_fn
        if root is None:
            return
        if moved and not self._earlier and root._sequence_nr() < self._since:
            raise BsamRuntimeError(_OUTSIDE)
        nodes = list(_graph(root)) if self._whole else [root]
        if moved and any(self._reaches_parameters(node) for node in nodes if node in self._earlier):
            raise BsamRuntimeError(_OUTSIDE)
        self._current += nodes

    def _reaches_parameters(self, node: Any) -> bool:
        own = {id(p) for p in self._params}
        leaves = (n.variable for n in _graph(node, leaves=True) if type(n).__name__ == "AccumulateGrad")
        return any(id(leaf) in own for leaf in leaves)


def _graph(root: Any, leaves: bool = False) -> Iterator[Any]:
    """Iterate over the nodes of a graph; the leaves, which all passes share, only if asked for."""
    visited, todo = {root}, [root]
    while todo:
        node = todo.pop()
        if leaves or type(node).__name__ != "AccumulateGrad":
            yield node
        for following, _ in node.next_functions:
            if following is not None and following not in visited:
                visited.add(following)
                todo.append(following)
