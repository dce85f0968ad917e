"""How long runs will take, from the epochs that were measured."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from statistics import median
from typing import Any

from ..recipes.variants import passes_of
from ..training.config import Run
from ..training.run_dir import RunState


class EtaEstimator:
    """Estimate how long runs take: the median epoch of runs with the same network, data and number of passes, or else
    of another number of passes, scaled.

    The median leaves out epochs that compile. The evaluation after an epoch is not counted.

    Args:
        states: the runs whose epochs were measured.

    Example:
        >>> from pathlib import Path
        >>> measured = RunState(
        ...     Run("sgd", epochs=5), Path("a"), tuple({"seconds": s} for s in (9.0, 2.0, 2.0))
        ... )
        >>> eta = EtaEstimator([measured])
        >>> [
        ...     eta.left(RunState(run, Path("b")))
        ...     for run in (Run("sam", epochs=3), Run("sam", model="resnet8"))
        ... ]
        [12.0, None]
    """

    def __init__(self, states: Iterable[RunState]) -> None:
        seconds_per_pass: dict[tuple[Any, ...], list[float]] = defaultdict(list)
        for state in states:
            passes = passes_of(state.run)
            measured = [metrics["seconds"] / passes for metrics in state.epochs]
            for kind in _kinds(state.run):
                seconds_per_pass[kind] += measured
        self._per_pass = {kind: median(seconds) for kind, seconds in seconds_per_pass.items() if seconds}

    def left(self, state: RunState) -> float | None:
        """Return the seconds that are left of a run; None where nothing like it was measured."""
        if not state.left:
            return 0.0
        known = [self._per_pass[kind] for kind in _kinds(state.run) if kind in self._per_pass]
        return state.left * passes_of(state.run) * known[0] if known else None

    def total(self, states: Iterable[RunState]) -> tuple[float, int]:
        """Return the seconds that are left of all runs, and the number of runs without an estimate."""
        seconds = [self.left(state) for state in states]
        return sum(known for known in seconds if known is not None), seconds.count(None)


def _kinds(run: Run) -> tuple[tuple[Any, ...], ...]:
    """Return what two runs have in common whose epochs take equally long, first with and then without the passes."""
    kind = run.model, run.data, run.batch, run.limit_train, run.precision, run.compile, run.probe, run.weight_bits
    return (*kind, passes_of(run)), kind
