"""Detecting a loss that was not computed in this pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..common.errors import BsamRuntimeError
from ..common.graphs import COMPUTED_OUTSIDE, reaches


class GraphCheck:
    """Compare the roots of the autograd graphs of the passes of a step: one that two passes share ignores the
    perturbation. ``optimizer.check`` compares whole graphs.

    Args:
        params: the parameters of the optimizer.
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        self._params = params
        self._earlier: set[Any] = set()  # roots of earlier passes
        self._current: list[Any] = []  # roots of this pass

    def begin_pass(self) -> None:
        """Begin a pass. Call before the closure."""
        self._earlier.update(self._current)
        self._current, self._since = [], torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]

    def check(self, loss: Tensor, moved: bool) -> None:
        """Raise if the loss of perturbed weights depends on parameters through the graph of another pass.

        In the first pass there is no earlier graph to compare with: a root whose autograd sequence number is smaller
        than at :meth:`begin_pass` was created before the pass.
        """
        root: Any = loss.grad_fn
        if root is None:
            return
        if moved and not self._earlier and root._sequence_nr() < self._since:
            raise BsamRuntimeError(COMPUTED_OUTSIDE)
        if moved and root in self._earlier and reaches(root, self._params):
            raise BsamRuntimeError(COMPUTED_OUTSIDE)
        self._current.append(root)
