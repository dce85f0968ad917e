"""How long runs will take, by epochs that were measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from ..recipes.variants import passes_of
from ..training.config import Run
from ..training.run_dir import RunState


class EtaEstimator:
    """Estimate how long runs take, from epochs of the same network, data and number of passes, or else scaled from
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
        self._seconds: Counter[tuple[Any, ...]] = Counter()  # of all measured epochs of a kind
        self._passes: Counter[tuple[Any, ...]] = Counter()
        for state in states:
            for i, metrics in enumerate(state.epochs):
                self.add(state.run, metrics["seconds"], first=i == 0)

    def add(self, run: Run, seconds: float, *, first: bool) -> None:
        """Add a measured epoch, with whether it was the first one after a start."""
        passes = passes_of(run)
        for kind in ((*_kind(run), first, passes), (*_kind(run), first)):
            self._seconds[kind] += seconds  # type: ignore[assignment]
            self._passes[kind] += passes  # type: ignore[assignment]

    def left(self, state: RunState) -> float | None:
        """Return the seconds that are left of a run; None where nothing like it was measured."""
        if not state.left:
            return 0.0
        epochs = [self._epoch(state.run, first) for first in (True, False)]
        known = [seconds for seconds in epochs if seconds is not None]
        return known[0] + (state.left - 1) * known[-1] if known else None

    def _epoch(self, run: Run, first: bool) -> float | None:
        passes = passes_of(run)
        for kind in ((*_kind(run), first, passes), (*_kind(run), first)):
            if kind in self._passes:
                return passes * self._seconds[kind] / self._passes[kind]
        return None

    def total(self, states: Iterable[RunState]) -> tuple[float, int]:
        """Return the seconds that are left of all runs, and the number of runs about which nothing is known."""
        each = [self.left(state) for state in states]
        return sum(seconds for seconds in each if seconds is not None), each.count(None)


def _kind(run: Run) -> tuple[Any, ...]:
    return run.model, run.data, run.batch, run.limit_train, run.precision, run.compile, run.probe, run.weight_bits
