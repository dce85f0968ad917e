"""Divide the batches of an evaluation among the processes of ``torchrun``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TypeVar

from torch import Tensor

T = TypeVar("T")


@dataclass(frozen=True)
class Shares:
    """Every ``size``-th batch is this process's, beginning with number ``rank``. By default, there is one process.

    Args:
        rank: the number of this process.
        size: the number of processes.
        gather: returns the results of all processes, by rank.

    Example:
        >>> [list(Shares(rank, 2).of("abcde")) for rank in range(2)]
        [['a', 'c', 'e'], ['b', 'd']]
    """

    rank: int = 0
    size: int = 1
    gather: Callable[[list[Tensor]], list[list[Tensor]]] = field(default=lambda results: [results], repr=False)

    def of(self, batches: Sequence[T]) -> Sequence[T]:
        """Return this process's batches."""
        return batches[self.rank :: self.size]

    def in_order(self, results: list[Tensor]) -> list[Tensor]:
        """Return the results for all batches, in the order of the batches; all processes call this.

        With several processes, the tensors are on the CPU.
        """
        if self.size == 1:
            return results
        parts = self.gather([result.cpu() for result in results])
        return [result for turn in zip_longest(*parts) for result in turn if result is not None]


WHOLE = Shares()
