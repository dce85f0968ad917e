"""Many runs in one folder: what is done, what is left, how long it will take; and doing it."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..training.config import Run
from ..training.lock import RunLocked
from ..training.loop import Diverged, fit
from ..training.run_dir import RunDir, RunState, run_dir_name
from .variants import passes_of

State = RunState
folder_name = run_dir_name


def state_of(run: Run, out: Path) -> State:
    """How far a run is, by what its folder below ``out`` holds; a folder of other settings is refused."""
    return RunDir(out / run_dir_name(run)).state(run)


class EtaEstimator:
    """How long runs take, by epochs that were measured: of the same network, data and number of passes; or else scaled
    from another number of passes.

    The first epoch after a start is kept apart: it compiles. Epochs of earlier calls are known by their training alone,
    without the evaluation after them.

    Example:
        >>> clock = EtaEstimator([State(Run("sgd", epochs=3), Path("a"), ({"seconds": 9.0}, {"seconds": 2.0}))])
        >>> clock.left(State(Run("sam", epochs=3), Path("b")))
        26.0
    """

    def __init__(self, states: Iterable[State] = ()) -> None:
        self._measured: dict[tuple[Any, ...], list[tuple[float, bool, float]]] = {}
        for state in states:
            for i, metrics in enumerate(state.epochs):
                self.add(state.run, metrics["seconds"], first=i == 0)

    def add(self, run: Run, seconds: float, *, first: bool) -> None:
        """An epoch, the first one after a start or not, took so long."""
        self._measured.setdefault(_kind(run), []).append((passes_of(run), first, seconds))

    def left(self, state: State) -> float | None:
        """Seconds that are left of a run; None where nothing like it was measured."""
        if not state.left:
            return 0.0
        first, other = (self._epoch(state.run, which) for which in (True, False))
        known = [seconds for seconds in (first, other) if seconds is not None]
        return known[0] + (state.left - 1) * known[-1] if known else None

    def _epoch(self, run: Run, first: bool) -> float | None:
        passes, measured = (
            passes_of(run),
            [(n, seconds) for n, began, seconds in self._measured.get(_kind(run), []) if began == first],
        )
        same = [seconds for n, seconds in measured if n == passes]
        if same:
            return statistics.median(same)
        return passes * statistics.median(seconds / n for n, seconds in measured) if measured else None

    def total(self, states: Iterable[State]) -> tuple[float, int]:
        """Seconds that are left of all of them, and the number of runs beyond them of which nothing is known."""
        each = [self.left(state) for state in states]
        return sum(seconds for seconds in each if seconds is not None), each.count(None)


def _kind(run: Run) -> tuple[Any, ...]:
    return run.model, run.data, run.batch, run.limit_train, run.precision, run.compile, run.probe


@dataclass(frozen=True)
class Callbacks:
    """What is told to whom while runs are run. Nothing, unless somebody asks.

    Args:
        begins: called with the run that begins, the number of runs that are over, and the time that is left, as
            :meth:`EtaEstimator.total` gives it.
        epoch: called with epochs done and epochs to do.
        ends: called with a run that is over.
        tell: called with a sentence.
    """

    begins: Callable[[State, int, tuple[float, int]], None] = field(default=lambda state, over, left: None)
    epoch: Callable[[int, int], None] = field(default=lambda done, total: None)
    ends: Callable[[State], None] = field(default=lambda state: None)
    tell: Callable[[str], None] = field(default=lambda sentence: None)


def run_all(runs: Sequence[Run], out: str | Path, callbacks: Callbacks | None = None, **options: Any) -> list[State]:
    """Run what is missing below ``out``, in order, and go on with what was interrupted.

    Several processes may work on one folder: a run that another one holds is passed over and tried again at the end. A
        run whose loss is no number is noted as
    diverged and stops nobody; its folder removed, it is run anew.

    Args:
        runs: the runs.
        out: a folder, made if need be.
        callbacks: who is told.
        options: of :func:`bsam.training.loop.fit`: ``data_dir``, ``device``.

    Returns:
        how far each run is now.

    Example:
        >>> import tempfile
        >>> run = Run("sgd", epochs=1, limit_train=128)
        >>> with tempfile.TemporaryDirectory() as out:
        ...     [str(state) for state in run_all([run], out)]
        ['done']
    """
    out, callbacks = Path(out), callbacks or Callbacks()
    clock = EtaEstimator(state_of(run, out) for run in runs)
    taken = [run for run in runs if not _over(run, runs, out, clock, callbacks, options)]
    for run in taken:
        _over(run, runs, out, clock, callbacks, options)
    return [state_of(run, out) for run in runs]


def _over(
    run: Run, runs: Sequence[Run], out: Path, clock: EtaEstimator, callbacks: Callbacks, options: Mapping[str, Any]
) -> bool:
    """Run it, unless it is over; False if another process is at it."""
    state = RunDir(out / run_dir_name(run)).state(run, verify=True)
    if state.over:
        return True
    if state.damaged is not None:
        callbacks.tell(f"{state.damaged}. Going on with the run.")
    states = [state_of(each, out) for each in runs]
    callbacks.begins(state, sum(each.over for each in states), clock.total(states))
    if run.compile:
        # graphs of the runs before count against torch's limit of 8 a function, and fit where they are not the fastest
        torch.compiler.reset()
    marks = [time.perf_counter()]

    def each_epoch(done: int, metrics: Mapping[str, float]) -> None:
        marks.append(time.perf_counter())
        clock.add(run, marks[-1] - marks[-2], first=len(marks) == 2)
        callbacks.epoch(done, run.epochs)

    try:
        with contextlib.suppress(Diverged):  # the run directory says so
            fit(run, state.path, each_epoch=each_epoch, tell=callbacks.tell, **options)
    except RunLocked:
        callbacks.tell(f"{state.path.name}: another process is at it")
        return False
    callbacks.ends(state_of(run, out))
    return True
