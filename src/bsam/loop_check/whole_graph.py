"""Comparing the whole autograd graphs of two evaluations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..common.errors import BsamRuntimeError
from ..common.graphs import COMPUTED_OUTSIDE, leaves, nodes, reaches


class WholeGraphCheck:
    """Compare all nodes of the graphs of two evaluations: a part that both share was computed outside the closure.

    Args:
        params: the parameters of the optimizer.
        on_leaf: called with each leaf of a loss before ``backward``.
    """

    def __init__(self, params: Sequence[Tensor], on_leaf: Callable[[Tensor], None]) -> None:
        self._params, self._on_leaf = params, on_leaf
        self._earlier: set[Any] = set()  # nodes of earlier evaluations
        self._current: list[Any] = []  # nodes of this one

    def begin_pass(self) -> None:
        """Begin an evaluation. Call before the closure."""
        self._earlier.update(self._current)
        self._current, self._since = [], torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]

    def check(self, loss: Tensor, moved: bool) -> None:
        """Raise if the loss depends on parameters through nodes of another evaluation, and report its leaves."""
        root: Any = loss.grad_fn
        if root is None:
            return
        if not self._earlier and root._sequence_nr() < self._since:
            raise BsamRuntimeError(COMPUTED_OUTSIDE)
        own = list(nodes(root))
        if any(reaches(node, self._params) for node in own if node in self._earlier):
            raise BsamRuntimeError(COMPUTED_OUTSIDE)
        self._current += own
        for leaf in leaves(root):
            self._on_leaf(leaf)
