"""Many runs in one folder: which are finished, what is left, and running it."""

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

from ..tasks import TASKS
from ..training.config import Run
from ..training.lock import RunLocked
from ..training.loop import Diverged, fit
from ..training.run_dir import RunDir, RunState, run_dir_name
from .eta import EtaEstimator
from .experiments import Recipe, Tuning
from .workers import Workers, stop_if_asked


def state_of(run: Run, out: Path, verify: bool = False) -> RunState:
    """Return how far a run is, by its directory below ``out``; ``verify`` also checks the digest of its network."""
    return RunDir(out / run_dir_name(run)).state(run, verify=verify)


def states_of(runs: Sequence[Run], out: Path) -> list[RunState]:
    """Return how far each run is."""
    return [state_of(run, out) for run in runs]


def score_of(state: RunState) -> float:
    """Return the number of a finished run that tables show: of the last epoch, never of the best one."""
    return TASKS[state.run.task].measure.shown(state.epochs[-1], state.run.eval_split)


@dataclass(frozen=True)
class Callbacks:
    """Functions that are called while runs are run; by default nothing is.

    Args:
        begins: called with the state of the run that begins, the number of runs that are over, and the time that is
            left, as :meth:`EtaEstimator.total` returns it. Not called where several processes train.
        epoch: called with the epochs done and the epochs to do. Not called where several processes train.
        ends: called with the state of a run that is over, and the number of runs that are.
        tell: called with a sentence for the user.
    """

    begins: Callable[[RunState, int, tuple[float, int]], None] = field(default=lambda state, over, left: None)
    epoch: Callable[[int, int], None] = field(default=lambda done, total: None)
    ends: Callable[[RunState, int], None] = field(default=lambda state, over: None)
    tell: Callable[[str], None] = field(default=lambda sentence: None)


def run_all(
    runs: Sequence[Run], out: str | Path, callbacks: Callbacks | None = None, workers: int | Workers = 1, **options: Any
) -> list[RunState]:
    """Run what is missing below ``out``, in order, and continue what was interrupted.

    Several processes may work on one folder: a run that another process holds is skipped and tried again at the end. A
    run that diverged is recorded as such, and the next one begins; once its directory is removed, it is run again.

    Args:
        runs: the runs.
        out: a folder, made if need be.
        callbacks: what to call meanwhile.
        workers: the number of processes that train at the same time, or a pool of them; 1 trains in this process.
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
    job = _Job(runs, Path(out), callbacks or Callbacks(), options)
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(Workers(workers)) if isinstance(workers, int) and workers > 1 else workers
        run_each = partial(job.run_in, pool) if isinstance(pool, Workers) else job.run_here
        if locked := run_each(runs):
            run_each(locked)
    return states_of(runs, Path(out))


class _Job:
    """The runs of one call of :func:`run_all`, and how far they are."""

    def __init__(self, runs: Sequence[Run], out: Path, callbacks: Callbacks, options: Mapping[str, Any]) -> None:
        self.out, self.callbacks, self.options = out, callbacks, options
        self.states = {run_dir_name(run): state_of(run, out) for run in runs}

    def run_here(self, runs: Sequence[Run]) -> list[Run]:
        """Run what is missing in this process; returns the runs that another process holds."""
        eta, locked = EtaEstimator(self.states.values()), []
        for run in runs:
            marks: list[float] = []

            def begins(state: RunState, marks: list[float] = marks) -> None:
                self.callbacks.begins(state, self._over(), eta.total(self.states.values()))
                marks.append(time.perf_counter())

            def each_epoch(done: int, _: object, run: Run = run, marks: list[float] = marks) -> None:
                marks.append(time.perf_counter())
                eta.add(run, marks[-1] - marks[-2], first=len(marks) == 2)
                self.callbacks.epoch(done, run.epochs)

            if not complete(run, self.out, begins, each_epoch, self.callbacks.tell, self.options):
                locked.append(run)
            elif marks:
                self._ends(run)
        return locked

    def run_in(self, pool: Workers, runs: Sequence[Run]) -> list[Run]:
        """Run what is missing in other processes; returns the runs that yet others hold."""
        missing = [run for run in runs if not _is_over(state_of(run, self.out, verify=True))]
        asked = {pool.submit(_complete_in_worker, run, self.out, self.options): run for run in missing}
        locked = []
        for future in as_completed(asked):
            is_over, sentences = future.result()
            for sentence in sentences:
                self.callbacks.tell(sentence)
            if is_over:
                self._ends(asked[future])
            else:
                locked.append(asked[future])
        return locked

    def _ends(self, run: Run) -> None:
        self.states[run_dir_name(run)] = state = state_of(run, self.out)
        self.callbacks.ends(state, self._over())

    def _over(self) -> int:
        return sum(state.over for state in self.states.values())


def _is_over(state: RunState) -> bool:
    return state.over and state.damaged is None


def complete(
    run: Run,
    out: Path,
    begins: Callable[[RunState], None],
    each_epoch: Callable[[int, Mapping[str, float]], None],
    tell: Callable[[str], None],
    options: Mapping[str, Any],
) -> bool:
    """Run what is left of a run, if anything; False if another process holds it."""
    state = state_of(run, out, verify=True)
    if _is_over(state):
        return True
    if state.damaged is not None:
        tell(f"{state.damaged}. Continuing the run.")
    begins(state)
    if run.compile:
        # graphs of earlier runs count against torch's limit of 8 for a function, and are not the fastest for this one
        torch.compiler.reset()
    try:
        fit(run, state.path, each_epoch=each_epoch, tell=tell, **options)
    except RunLocked:
        tell(f"{state.path.name}: another process is running it")
        return False
    except Diverged:
        pass  # it is recorded in the directory
    return True


def _complete_in_worker(run: Run, out: Path, options: Mapping[str, Any]) -> tuple[bool, list[str]]:
    stop_if_asked()
    sentences: list[str] = []
    return complete(run, out, lambda state: None, stop_if_asked, sentences.append, options), sentences


def tuning_runs(recipe: Recipe, runs: Sequence[Run]) -> list[Run]:
    """Return the runs that choose the settings of ``runs``, each once; none where the recipe needs no tuning."""
    tuning = recipe.tuning
    if tuning is None or not runs:
        return []
    first = min(run.seed for run in runs)
    return [trial for run in runs if run.seed == first for trial in tuning.runs(run)]


def tuned(recipe: Recipe, runs: Sequence[Run], out: Path) -> list[Run]:
    """Return the runs with the settings that tuning chose; those whose tuning is not over are returned unchanged."""
    if recipe.tuning is None or not runs:
        return list(runs)
    first = min(run.seed for run in runs)
    chosen: dict[str, Mapping[str, Any] | None] = {}
    for run in runs:
        if run.seed == first:
            chosen[_key(run)] = _choice(recipe.tuning, run, out)
    return [replace(run, **(chosen[_key(run)] or {})) for run in runs]


def _key(run: Run) -> str:
    """The same one for all seeds."""
    return run_dir_name(replace(run, seed=0, relief=None))


def _choice(tuning: Tuning, run: Run, out: Path) -> Mapping[str, Any] | None:
    """The candidate with the highest score on the validation split after the last epoch; of equals, the first."""
    states = states_of(tuning.runs(run), out)
    if not all(state.over for state in states):
        return None
    candidates = zip(tuning.settings(run), states, strict=True)
    scores = [(score_of(state) if state.finished else -1.0, candidate) for candidate, state in candidates]
    return max(scores, key=lambda pair: pair[0])[1]
