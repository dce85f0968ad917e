"""The recorded Hessian products of as many batches as a memory budget holds."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from .checksum import agree as same_samples
from .checksum import checksum
from .dataset_loss import DatasetLoss, Piece
from .linearized import Agree, BatchProduct, CannotRecord, Product, Recorder

Plain: TypeAlias = Callable[[list[Tensor], Piece], Product]  # the product of a batch, computed without a recording

ON_CPU = 3 << 30  # bytes; a container may have less than its machine reports
WORTH = 5_000_000  # samples times weights from which on recording pays, unless a budget is given: it takes seconds
SHAPES = 2  # shapes of batches to record, unless a budget is given: as a rule one, and another for the last batch


class DataChanged(Exception):
    """Data comes in other batches than those that were recorded."""


class Recording:
    """What :meth:`HessianOperator.linearized` recorded.

    Args:
        budget: the most bytes to take.
        shapes: the most shapes of batches to record, each of which takes seconds; None: any number.

    Attributes:
        batches: number of (micro-)batches of the data; 0 if none was tried.
        recorded: number of those that were recorded; products of the others are computed plainly.
        bytes: memory that the recorded ones take.
        reason: why not all were recorded; empty if they were.
    """

    def __init__(self, budget: int, shapes: int | None) -> None:
        self.batches = self.recorded = self.bytes = 0
        self.reason = ""
        self._budget, self._shapes = budget, shapes
        self._products: list[tuple[BatchProduct, float, Tensor]] = []  # with the weight and the checksum of the batch

    @property
    def note(self) -> str:
        """How many batches were computed without a recording, and why; empty if none was."""
        plain = self.batches - self.recorded
        return f"{plain} of {self.batches} batches computed without a recording: {self.reason}" if plain else ""

    def record(self, loss: DatasetLoss, v: list[Tensor], plain: Plain, agree: Agree) -> None:
        """Record each batch of the data, as long as it can be done and fits, and its product is the plain one."""
        recorder = Recorder(loss)
        for piece in loss.pieces():
            self.batches += 1
            if self.reason:
                continue
            try:
                expected = plain(v, piece)
                if not all(bool(t.isfinite().all()) for t in expected if t is not None):
                    raise CannotRecord("the product is not finite")
                product, size = self._recorded(recorder, v, piece, expected, agree)
                if self.bytes + size > self._budget:
                    raise CannotRecord(f"the memory of max_bytes={self._budget} is used up")
            except CannotRecord as error:
                self.reason = str(error)
            except torch.OutOfMemoryError:
                self.drop("out of memory")
            else:
                self._products.append((product, piece[2], _fingerprint(piece)))
                self.recorded, self.bytes = self.recorded + 1, self.bytes + size

    def _recorded(
        self, recorder: Recorder, v: list[Tensor], piece: Piece, expected: Product, agree: Agree
    ) -> tuple[BatchProduct, int]:
        """The product of a batch by the graph of its shape, if it is the plain one.

        What Python read from the batch that was recorded (a size, a number, a branch) is constant in the graph.
        """
        shape = recorder.shape(*piece[:2])
        trouble = "the network or the loss reads numbers or sizes from the data, or random ones"
        if shape in recorder.graphs:
            with contextlib.suppress(CannotRecord):
                return _agreeing(recorder, v, piece, expected, agree)
            raise CannotRecord(trouble)
        if len(recorder.graphs) == self._shapes:
            raise CannotRecord(f"more than {self._shapes} shapes of batches")
        for forward in (True, False):
            try:
                recorder.record(*piece[:2], v, agree, forward=forward)
                return _agreeing(recorder, v, piece, expected, agree)
            except CannotRecord as error:
                trouble = str(error)
        recorder.graphs.pop(shape, None)
        raise CannotRecord(trouble)

    def products(self, v: list[Tensor]) -> Generator[tuple[Product, float]]:
        """The recorded products with ``v``, each with its weight in the mean."""
        for product, weight, _ in self._products:
            yield product(v), weight

    def rest(self, pieces: Iterator[Piece]) -> Iterator[Piece]:
        """The pieces that were not recorded; raises :class:`DataChanged` where others come than those that were."""
        for number, piece in enumerate(pieces):
            if number >= self.recorded:
                yield piece
            elif not same_samples(_fingerprint(piece), self._products[number][2]):
                raise DataChanged

    def free(self) -> None:
        """Free the memory."""
        self._products.clear()

    def drop(self, reason: str) -> None:
        """Compute everything without a recording from now on."""
        self.free()
        self.reason, self.recorded, self.bytes = reason, 0, 0


def _agreeing(
    recorder: Recorder, v: list[Tensor], piece: Piece, expected: Product, agree: Agree
) -> tuple[BatchProduct, int]:
    try:
        product, size = recorder.linearized(*piece[:2])
        found = product(v)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise CannotRecord("a recorded graph does not fit another batch") from error
    if not agree(found, expected):
        raise CannotRecord("a recorded product differs from the plain one")
    return product, size


def _fingerprint(piece: Piece) -> Tensor:
    """The checksum of a batch as a whole: the order of its samples counts."""
    return checksum(*piece[:2], 1).cpu()


def default_budget(device: torch.device) -> int:
    """Bytes to record in: a quarter of a GPU's memory, 3 GB of a CPU's, and never more than half of what is free.

    Example:
        >>> 0 < default_budget(torch.device("cpu")) <= ON_CPU
        True
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return min(total // 4, free // 2)
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()  # on Linux
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return ON_CPU
    return min(ON_CPU, free // 2)
