"""Run many runs in one directory, skipping finished and continuing interrupted ones."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..core.workers import Workers, stop_if_asked
from ..tasks import TASKS
from ..training.config import Run
from ..training.lock import RunLocked
from ..training.loop import Diverged, fit
from ..training.run_dir import DIVERGED, NETWORK, RunDir, run_dir_name
from ..training.run_state import RunState
from .eta import EtaEstimator
from .experiments import Recipe, Tuning


def state_of(run: Run, out: Path, verify: bool = False) -> RunState:
    """Return the state of a run, by its directory below ``out``; ``verify`` also checks the digest of its network."""
    return RunDir(out / run_dir_name(run)).state(run, verify=verify)


def states_of(runs: Sequence[Run], out: Path) -> list[RunState]:
    """Return the state of each run."""
    return [state_of(run, out) for run in runs]


def score_of(state: RunState) -> float:
    """Return the number of a finished run that tables show: of the last epoch, never of the best one."""
    return TASKS[state.run.task].measure.shown(state.epochs[-1], state.run.eval_split)


@dataclass(frozen=True)
class Callbacks:
    """Functions that are called while runs are run; by default nothing is.

    Args:
        on_start: called with the state of the run that starts, the number of runs that have ended, and the time that is
            left, as :meth:`EtaEstimator.total` returns it. Not called where several processes train.
        on_epoch: called with the epochs done and the epochs to do. Not called where several processes train.
        on_end: called with the state of a run that has ended, and the number of runs that have.
        tell: called with a sentence for the user.
    """

    on_start: Callable[[RunState, int, tuple[float, int]], None] = field(default=lambda state, ended, left: None)
    on_epoch: Callable[[int, int], None] = field(default=lambda done, total: None)
    on_end: Callable[[RunState, int], None] = field(default=lambda state, ended: None)
    tell: Callable[[str], None] = field(default=lambda sentence: None)


def run_all(
    runs: Sequence[Run], out: str | Path, callbacks: Callbacks | None = None, workers: int | Workers = 1, **options: Any
) -> list[RunState]:
    """Run what is missing below ``out``, in order, and continue what was interrupted.

    Several processes may work on one folder: a run that is locked by another process is skipped and tried again at the
    end. A run that diverged is recorded as such, and the next one starts; remove its directory to run it again.

    Args:
        runs: the runs.
        out: a folder, created if it does not exist.
        callbacks: what to call meanwhile.
        workers: the number of processes that train at the same time, or a pool of them; 1 trains in this process.
        options: of :func:`bsam.training.loop.fit`: ``data_dir``, ``device``.

    Returns:
        the state of each run now.

    Example:
        >>> import tempfile
        >>> run = Run("sgd", epochs=1, limit_train=128)
        >>> with tempfile.TemporaryDirectory() as out:
        ...     [str(state) for state in run_all([run], out)]
        ['done']
    """
    job = _Job(runs, Path(out), callbacks or Callbacks(), options)
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(Workers(workers)) if isinstance(workers, int) and workers > 1 else workers
        run_each = partial(job.run_in, pool) if isinstance(pool, Workers) else job.run_here
        if locked := run_each(runs):
            run_each(locked)
    return states_of(runs, Path(out))


class _Job:
    """The runs of one call of :func:`run_all`, and their states."""

    def __init__(self, runs: Sequence[Run], out: Path, callbacks: Callbacks, options: Mapping[str, Any]) -> None:
        self.out, self.callbacks, self.options = out, callbacks, options
        self.states = {run_dir_name(run): state_of(run, out) for run in runs}

    def run_here(self, runs: Sequence[Run]) -> list[Run]:
        """Run what is missing in this process; returns the runs that are locked by another process."""
        eta, locked = EtaEstimator(self.states.values()), []
        for run in runs:
            marks: list[float] = []

            def on_start(state: RunState, marks: list[float] = marks) -> None:
                self.callbacks.on_start(state, self._num_ended(), eta.total(self.states.values()))
                marks.append(time.perf_counter())

            def each_epoch(done: int, _: object, run: Run = run, marks: list[float] = marks) -> None:
                marks.append(time.perf_counter())
                eta.add(run, marks[-1] - marks[-2], first=len(marks) == 2)
                self.callbacks.on_epoch(done, run.epochs)

            if not finish_run(run, self.out, on_start, each_epoch, self.callbacks.tell, self.options):
                locked.append(run)
            elif marks:
                self._end(run)
        return locked

    def run_in(self, pool: Workers, runs: Sequence[Run]) -> list[Run]:
        """Run what is missing in the pool; returns the runs that are locked by another process."""
        missing = [run for run in runs if not _has_ended_undamaged(state_of(run, self.out, verify=True))]
        asked = {pool.submit(_finish_run_in_worker, run, self.out, self.options): run for run in missing}
        locked = []
        for future in as_completed(asked):
            has_ended, sentences = future.result()
            for sentence in sentences:
                self.callbacks.tell(sentence)
            if has_ended:
                self._end(asked[future])
            else:
                locked.append(asked[future])
        return locked

    def _end(self, run: Run) -> None:
        self.states[run_dir_name(run)] = state = state_of(run, self.out)
        self.callbacks.on_end(state, self._num_ended())

    def _num_ended(self) -> int:
        return sum(state.ended for state in self.states.values())


def _has_ended_undamaged(state: RunState) -> bool:
    return state.ended and state.damaged is None


def finish_run(
    run: Run,
    out: Path,
    on_start: Callable[[RunState], None],
    each_epoch: Callable[[int, Mapping[str, float]], None],
    tell: Callable[[str], None],
    options: Mapping[str, Any],
) -> bool:
    """Run what is left of a run, if anything; False if it is locked by another process, or begins with a run that is
    not finished.
    """
    state = state_of(run, out, verify=True)
    if _has_ended_undamaged(state):
        return True
    if state.damaged is not None:
        tell(f"{state.damaged}. Continuing the run.")
    initial = None if run.init is None or state.epochs else out / run.init  # a run that continues needs it no more
    if initial is not None and not (initial / NETWORK).exists():
        how = "diverged" if (initial / DIVERGED).exists() else "is not finished"
        tell(f"{state.path.name} is skipped for now: it begins with {run.init}, which {how}")
        return False
    on_start(state)
    if run.compile:
        # graphs of earlier runs count against torch's limit of 8 for a function, and are not the fastest for this one
        torch.compiler.reset()
    try:
        fit(run, state.path, init=initial, each_epoch=each_epoch, tell=tell, **options)
    except RunLocked:
        tell(f"{state.path.name} is skipped for now: another process is training it")
        return False
    except Diverged:
        pass  # it is recorded in the directory
    return True


def _finish_run_in_worker(run: Run, out: Path, options: Mapping[str, Any]) -> tuple[bool, list[str]]:
    stop_if_asked()
    sentences: list[str] = []
    return finish_run(run, out, lambda state: None, stop_if_asked, sentences.append, options), sentences


def tuning_runs(recipe: Recipe, runs: Sequence[Run]) -> list[Run]:
    """Return the runs that choose the settings of ``runs``, each once; none where the recipe needs no tuning."""
    tuning = recipe.tuning
    if tuning is None or not runs:
        return []
    first = min(run.seed for run in runs)
    return [trial for run in runs if run.seed == first for trial in tuning.runs(run)]


def with_tuned_settings(recipe: Recipe, runs: Sequence[Run], out: Path) -> list[Run]:
    """Return the runs with the settings that tuning chose; those whose tuning has not ended are returned unchanged."""
    if recipe.tuning is None or not runs:
        return list(runs)
    first = min(run.seed for run in runs)
    chosen: dict[str, Mapping[str, Any] | None] = {}
    for run in runs:
        if run.seed == first:
            chosen[_key(run)] = _choice(recipe.tuning, run, out)
    return [replace(run, **(chosen[_key(run)] or {})) for run in runs]


def _key(run: Run) -> str:
    """Return a key that is equal for runs that differ only in their seed."""
    return run_dir_name(replace(run, seed=0, relief=None))


def _choice(tuning: Tuning, run: Run, out: Path) -> Mapping[str, Any] | None:
    """Return the candidate with the highest validation score after the last epoch, the first one on ties. A candidate
    that diverged is not chosen, unless all did; None while not all have ended. Without candidates nothing is chosen.
    """
    states = states_of(tuning.runs(run), out)
    if not all(state.ended for state in states):
        return None
    candidates = zip(tuning.settings(run), states, strict=True)
    scores = [(score_of(state) if state.finished else -1.0, candidate) for candidate, state in candidates]
    return max(scores, key=lambda pair: pair[0], default=(0.0, {}))[1]
