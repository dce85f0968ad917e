"""The Hessian products of as many batches as a memory holds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..core.refusal import Refusal
from .dataset_loss import DatasetLoss, Piece
from .linearized import BatchProduct, Linearizer


class Kept:
    """Products of batches for the weights that the model has now; what the memory does not hold is left in the data.

    Args:
        loss: the network, its loss and its data.
        names: of the weights, in the order of the vectors.
        room: bytes.
    """

    def __init__(self, loss: DatasetLoss, names: list[str], room: int) -> None:
        self.loss, self.names, self.room = loss, names, room
        self._linearizer = Linearizer(loss, names)
        self._forget()

    def _forget(self) -> None:
        self._seen: dict[str, Tensor] = {}
        self._linear: list[tuple[BatchProduct, int]] = []
        self._whole = False  # whether that is all of the data
        self._first: list[Any] = []  # inputs and targets of the first batch

    def now(self) -> tuple[list[tuple[BatchProduct, int]], Iterator[Piece]]:
        """The product and the size of each batch that is kept, and the other batches."""
        state = {name: t.detach() for name, t in (*self.loss.model.named_parameters(), *self.loss.model.named_buffers())}
        if self._seen.keys() != state.keys() or not all(torch.equal(t, self._seen[name]) for name, t in state.items()):
            self._forget()  # first, so that the memory is free for what comes
            self._walk(state)
            self._seen = {name: t.clone() for name, t in state.items()}
        return self._linear, iter(()) if self._whole else self._rest()

    def _walk(self, state: dict[str, Tensor]) -> None:
        weights, others = [state[name] for name in self.names], {name: t for name, t in state.items() if name not in self.names}
        used, self._whole = 0, True
        for number, (x, y, n) in enumerate(self.loss.pieces()):
            if number == 0:
                self._first = tree_leaves((x, y))
            if self._whole:
                product, size = self._linearizer.linearized((weights, others, x, y))
                used += size
                self._whole = used <= self.room
                if self._whole:
                    self._linear.append((product, n))

    def _rest(self) -> Iterator[Piece]:
        """The batches that are not kept, from a walk that has to begin as the one did that found those that are."""
        for number, (x, y, n) in enumerate(self.loss.pieces()):
            if number == 0 and self._linear and not all(map(_equal, tree_leaves((x, y)), self._first)):
                raise Refusal(
                    "data comes in another order on each walk; keep_bytes needs the same order: shuffle=False, or keep_bytes large enough for all of it"
                )
            if number >= len(self._linear):
                yield x, y, n


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a, b)
