"""How long runs will take, by epochs that were measured."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any

from ..training.config import Run
from ..training.run_dir import RunState
from .variants import passes_of


class EtaEstimator:
    """How long runs take, by measured epochs of the same network, data and number of passes, or else scaled from
    another number of passes.

    The first epoch after a start counts separately, as it compiles. Epochs of earlier calls are known by their training
    alone, without the evaluation after them.

    Example:
        >>> from pathlib import Path
        >>> measured = RunState(
        ...     Run("sgd", epochs=3), Path("a"), ({"seconds": 9.0}, {"seconds": 2.0})
        ... )
        >>> eta = EtaEstimator([measured])
        >>> [
        ...     eta.left(RunState(run, Path("b")))
        ...     for run in (Run("sam", epochs=3), Run("sam", model="resnet8"))
        ... ]
        [26.0, None]
    """

    def __init__(self, states: Iterable[RunState] = ()) -> None:
        self._measured: dict[tuple[Any, ...], list[tuple[float, bool, float]]] = {}
        self._medians: dict[tuple[Any, ...], dict[float, list[float]]] = {}  # of what was measured until now
        for state in states:
            for i, metrics in enumerate(state.epochs):
                self.add(state.run, metrics["seconds"], first=i == 0)

    def add(self, run: Run, seconds: float, *, first: bool) -> None:
        """Add a measured epoch, with whether it was the first one after a start."""
        kind = _kind(run)
        self._measured.setdefault(kind, []).append((passes_of(run), first, seconds))
        self._medians.pop(kind, None)

    def left(self, state: RunState) -> float | None:
        """Return the seconds that are left of a run; None where nothing like it was measured."""
        if not state.left:
            return 0.0
        kind, passes = _kind(state.run), passes_of(state.run)
        medians = self._medians.setdefault(kind, {})
        if passes not in medians:
            each = (self._epoch(kind, passes, first) for first in (True, False))
            medians[passes] = [seconds for seconds in each if seconds is not None]
        known = medians[passes]
        return known[0] + (state.left - 1) * known[-1] if known else None

    def _epoch(self, kind: tuple[Any, ...], passes: float, first: bool) -> float | None:
        measured = [(n, seconds) for n, is_first, seconds in self._measured.get(kind, []) if is_first == first]
        same = [seconds for n, seconds in measured if n == passes]
        if same:
            return statistics.median(same)
        return passes * statistics.median(seconds / n for n, seconds in measured) if measured else None

    def total(self, states: Iterable[RunState]) -> tuple[float, int]:
        """Return the seconds that are left of all runs, and the number of runs about which nothing is known."""
        each = [self.left(state) for state in states]
        return sum(seconds for seconds in each if seconds is not None), each.count(None)


def _kind(run: Run) -> tuple[Any, ...]:
    return run.model, run.data, run.batch, run.limit_train, run.precision, run.compile, run.probe, run.weight_bits
