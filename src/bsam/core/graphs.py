"""Finding parts of a loss that a pass did not compute anew."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .errors import BsamRuntimeError

_OUTSIDE = (
    "the closure returned a loss that was computed outside this pass, in part or as a whole, and so not at the "
    "perturbed "
    "weights. Every pass must compute the whole loss anew: move the forward pass into the closure, or detach parts of "
    "it"
)


class Graphs:
    """The autograd graphs of the passes of a step: what two passes share was not computed at the perturbed weights.

    Args:
        params: the parameters of the optimizer.
        whole: whether to compare all nodes of the graphs, or the nodes of the losses alone.
    """

    def __init__(self, params: Sequence[Tensor], whole: bool) -> None:
        self._params, self._whole = params, whole
        self._nodes: set[Any] = set()  # of the passes before
        self._new: list[Any] = []  # of this one

    def begin_pass(self) -> None:
        """To call before the closure."""
        self._nodes.update(self._new)
        self._new, self._since = [], torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]

    def check(self, loss: Tensor, moved: bool) -> None:
        """Refuse a loss of perturbed weights whose graph reaches parameters by nodes of another pass.

        Where there was no pass before, the number of the node of the loss tells its age: nodes are numbered by thread.
        """
        root: Any = loss.grad_fn
        if root is None:
            return
        if moved and not self._nodes and root._sequence_nr() < self._since:
            raise BsamRuntimeError(_OUTSIDE)
        nodes = list(_behind(root)) if self._whole else [root]
        if moved and any(self._reaches_parameters(node) for node in nodes if node in self._nodes):
            raise BsamRuntimeError(_OUTSIDE)
        self._new += nodes

    def _reaches_parameters(self, node: Any) -> bool:
        own = {id(p) for p in self._params}
        leaves = (n.variable for n in _behind(node, leaves=True) if type(n).__name__ == "AccumulateGrad")
        return any(id(leaf) in own for leaf in leaves)


def _behind(root: Any, leaves: bool = False) -> Iterator[Any]:
    """The nodes of a graph; with ``leaves`` those that accumulate gradients, too, which all passes share."""
    seen, todo = {root}, [root]
    while todo:
        node = todo.pop()
        if leaves or type(node).__name__ != "AccumulateGrad":
            yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                todo.append(following)
