"""The Hessian products of as many batches as a memory holds."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from ..core.refusal import Refusal
from .circumstances import circumstances
from .dataset_loss import DatasetLoss, Piece
from .linearized import BatchProduct, Linearizer
from .room import room_on

Product: TypeAlias = list[Tensor | None]  # one tensor per parameter, None for those that the batch does not depend on

T = TypeVar("T")

WORTH = 5_000_000  # samples times weights from which on it pays to keep something unasked: recording takes some seconds for each shape of a batch ...
SHAPES = 2  # ... so that there should not be many: as a rule there is one, and another one for the last batch


@dataclass(frozen=True)
class Entry:
    """A batch, in memory of its own, and its product."""

    leaves: list[Tensor]
    structure: Any
    product: BatchProduct

    def is_of(self, leaves: list[Any], structure: Any) -> bool:
        """Whether this is the batch."""
        return structure == self.structure and all(map(_equal, leaves, self.leaves))


class Kept:
    """Products of batches, for the weights that the model has now; what the memory does not hold, nobody keeps.

    Asked for a number of bytes, it keeps from the first walk on, and what cannot be kept is refused. Left to itself, it begins with the second walk for the
    same weights, since many products may follow then, and gives up where something cannot be kept.

    Args:
        loss: the network, its loss and its data.
        names: of the weights, in the order of the vectors.
        room: bytes; None leaves it to itself.
    """

    def __init__(self, loss: DatasetLoss, names: list[str], room: int | None) -> None:
        self.loss, self.names, self.room = loss, names, room
        self._linearizer = Linearizer(loss, names)
        self._hopeless = False
        self._circumstances: Any = None
        self._forget()

    def __reduce__(self) -> Any:
        """A copy begins anew."""
        return Kept, (self.loss, self.names, self.room)

    @property
    def asked(self) -> bool:
        """Whether the user wants it."""
        return self.room is not None

    def _forget(self) -> None:
        self._seen: dict[str, Tensor] = {}
        self._entries: list[Entry] = []
        self._shapes: set[Any] = set()  # of batches
        self._walks = 0  # for these weights
        self._decided = False  # whether to keep anything
        self._left = 0  # bytes
        self._open = False  # whether more batches may come

    def _give_up(self) -> None:
        self._forget()
        self._hopeless = True

    def begin(self) -> bool:
        """A walk over the data begins: products for other weights are forgotten. Whether there is something to find or to add."""
        if self._hopeless:
            return False
        self._state = {name: t.detach() for name, t in (*self.loss.model.named_parameters(), *self.loss.model.named_buffers())}
        now = circumstances(self.loss)
        if now != self._circumstances or not self._linearizer.unchanged():
            self._forget()
            self._linearizer, self._circumstances = Linearizer(self.loss, self.names), now
        if self._seen.keys() != self._state.keys() or not all(torch.equal(t, self._seen[name]) for name, t in self._state.items()):
            self._forget()  # first, so that the memory is free for what comes
            self._seen = {name: t.clone() for name, t in self._state.items()}
        self._walks += 1
        if not self._decided and (self.asked or (self._walks > 1 and self.loss.samples is not None)):
            self._decided, self._open = True, self.asked or self._pays()
            self._left = room_on(self.loss.weights.params[0].device) if self.room is None else self.room
        return self._open or bool(self._entries)

    def _pays(self) -> bool:
        return (self.loss.samples or 0) * sum(p.numel() for p in self.loss.weights.params) >= WORTH

    def times(self, number: int, piece: Piece, v: list[Tensor], plain: Callable[[], Product]) -> Product:
        """The product of a batch of this walk with ``v``; ``plain`` gives it without anything kept."""
        leaves, structure = tree_flatten(piece[:2])
        if number < len(self._entries):
            entry = self._entries[number]
            if not entry.is_of(leaves, structure):
                if self.asked:
                    raise Refusal("data comes in other batches on each walk, and keep_bytes needs the same ones: shuffle=False, or keep_bytes=0")
                self._give_up()
                return plain()
            found = self._tried(functools.partial(_times, entry.product, v))
            return plain() if found is None else found
        if self._open and not self.asked:
            self._shapes.add(tuple(t.shape for t in leaves if isinstance(t, Tensor)))
            self._open = len(self._shapes) <= SHAPES
        return self._added(tree_map(_detached, piece[:2]), v, plain) if self._open else plain()

    def _tried(self, work: Callable[[], T]) -> T | None:
        """What it gives; None if it cannot be done and nobody asked for it: then nothing is kept any more."""
        devices = [p.device for p in self.loss.weights.params[:1] if p.is_cuda]
        try:
            with torch.random.fork_rng(devices):  # a plain product that follows draws what it would have drawn
                return work()
        except (Refusal, RuntimeError):  # of memory that runs out, too
            if self.asked:
                raise
        self._give_up()
        return None

    def _added(self, batch: tuple[Any, Any], v: list[Tensor], plain: Callable[[], Product]) -> Product:
        weights, others = [self._state[name] for name in self.names], {name: t for name, t in self._state.items() if name not in self.names}

        def first() -> tuple[BatchProduct, int, Product]:
            product, size = self._linearizer.linearized((weights, others, *batch))
            return product, size, _times(product, v)

        recorded = self._tried(first)
        if recorded is None:
            return plain()
        product, size, found = recorded
        if not self.asked:
            expected = plain()
            if not all(bool(t.isfinite().all()) for t in expected if t is not None):
                self._forget()  # it says nothing about the product
                return expected
            if not _agree(found, expected):
                self._give_up()
                return expected
        self._left -= size
        self._open = self._left >= 0
        if self._open:
            leaves, structure = tree_flatten(batch)
            self._entries.append(Entry([t.clone() for t in leaves], structure, product))
        return found


def _times(product: BatchProduct, v: list[Tensor]) -> Product:
    return list(product(v))


def _agree(kept: Product, plain: Product) -> bool:
    """Whether two products are one, up to rounding; convolutions in TF32 may go another way each time."""
    pairs = [(a, torch.zeros_like(a) if b is None else b) for a, b in zip(kept, plain, strict=True) if a is not None]
    apart, size = (torch.stack([t.norm() for t in tensors]).norm() for tensors in ([a - b for a, b in pairs], [b for _, b in pairs]))
    coarse = size.is_cuda and torch.backends.cudnn.allow_tf32
    return bool(apart <= max(torch.finfo(size.dtype).eps ** 0.5, 1e-2 if coarse else 0.0) * size)


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def _equal(a: Any, b: Tensor) -> bool:
    return isinstance(a, Tensor) and a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)
