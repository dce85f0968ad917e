"""Estimate the remaining time of runs from the epochs already trained."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from statistics import median
from typing import Any

from ..recipes.variants import passes_of
from ..training.config import Run
from ..training.run_dir import RunState


class EtaEstimator:
    """Estimate the remaining time of runs.

    The estimate is based on the median epoch time of runs with the same network, data and number of passes or, if there
    are none, on that of runs with another number of passes, scaled. The median ignores the few slow epochs that
    compile. Evaluation is not counted.

    Args:
        states: the runs with the measured epochs.

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
        """Return a run's remaining seconds; None without measurements of similar runs."""
        if not state.left:
            return 0.0
        known = [self._per_pass[kind] for kind in _kinds(state.run) if kind in self._per_pass]
        return state.left * passes_of(state.run) * known[0] if known else None

    def total(self, states: Iterable[RunState]) -> tuple[float, int]:
        """Return the remaining seconds of all runs, and the number of runs without an estimate."""
        estimates = [self.left(state) for state in states]
        return sum(seconds for seconds in estimates if seconds is not None), estimates.count(None)


def _kinds(run: Run) -> tuple[tuple[Any, ...], ...]:
    """Return the settings that determine the duration of an epoch, with and without the number of passes."""
    names = ("model", "data", "batch", "accumulate", "limit_train", "precision", "compile", "probe", "weight_bits")
    kind = tuple(getattr(run, name) for name in names)
    return (*kind, passes_of(run)), kind
