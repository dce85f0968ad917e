"""Run many runs in one directory, skipping finished and continuing interrupted ones."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..core.errors import BsamRuntimeError
from ..tasks import TASKS
from ..training.config import Run
from ..training.run_dir import LOG, RunState, run_dir_name
from .eta import EtaEstimator
from .executors import Executor, InProcess
from .run_job import Outcome, RunJob, message_of, state_of

LOOK = 1.0  # seconds between two looks at the runs that other processes train


def states_of(runs: Sequence[Run], out: Path) -> list[RunState]:
    """Return the state of each run."""
    return [state_of(run, out) for run in runs]


def score_of(state: RunState) -> float:
    """Return the number of a finished run that tables show: of the last epoch, never of the best one."""
    return TASKS[state.run.task].measure.shown(state.epochs[-1], state.run.eval_split)


@dataclass(frozen=True)
class Progress:
    """How far runs are.

    Args:
        total: the number of runs.
        done: those that are finished.
        running: those that are trained now; of runs that wait in a queue of Ray, as many as it can train at a time.
        failed: those that failed or diverged.
        left: the seconds that are left, with as many runs at a time as now, and the number of runs of which that is
            unknown.
    """

    total: int
    done: int
    running: int
    failed: int
    left: tuple[float, int]


@dataclass(frozen=True)
class Callbacks:
    """Functions that are called while runs are run; by default nothing is.

    Args:
        on_start: called with the state of a run that is submitted, and the progress of all.
        on_epoch: called with the epochs done and the epochs to do. Not called where other processes train.
        on_end: called with the state of a run that has ended, and the progress of all.
        on_fail: called with the state of a run that failed, and the message.
        on_progress: called with the progress of all runs: every second where other processes train, and when one fails.
        tell: called with a sentence for the user.
    """

    on_start: Callable[[RunState, Progress], None] = field(default=lambda state, progress: None)
    on_epoch: Callable[[int, int], None] = field(default=lambda done, total: None)
    on_end: Callable[[RunState, Progress], None] = field(default=lambda state, progress: None)
    on_fail: Callable[[RunState, str], None] = field(default=lambda state, message: None)
    on_progress: Callable[[Progress], None] = field(default=lambda progress: None)
    tell: Callable[[str], None] = field(default=lambda sentence: None)


class RunsFailed(BsamRuntimeError):
    """Some runs failed; the others were run.

    Args:
        failed: the message of each, by the name of its directory.
        total: the number of runs.
    """

    def __init__(self, failed: Mapping[str, str], total: int) -> None:
        names: dict[str, list[str]] = {}
        for name, message in failed.items():
            names.setdefault(" ".join(message.split()), []).append(name)
        each = "; ".join(f"{', '.join(named)}: {message}" for message, named in names.items())
        super().__init__(f"{len(failed)} of {total} runs failed: {each}")
        self.failed = dict(failed)


def run_all(
    runs: Sequence[Run],
    out: str | Path,
    callbacks: Callbacks | None = None,
    executor: Executor | None = None,
    **options: Any,
) -> list[RunState]:
    """Run what is missing below ``out`` and continue what was interrupted: in order, but for an executor that trains
    several at a time.

    Several processes may work on one folder: a run that is locked by another process is skipped and tried again at the
    end. A run that begins with another one is started when that is finished. A run that diverged is recorded as such;
    remove its directory to run it again. Neither that nor a run that fails stops the others.

    Args:
        runs: the runs.
        out: a folder, created if it does not exist.
        callbacks: what to call meanwhile.
        executor: where to train; None trains in this process, one run after the other.
        options: of :func:`bsam.training.loop.fit`: ``data_dir``, ``device``.

    Returns:
        the state of each run now.

    Raises:
        RunsFailed: at the end, if a run failed.

    Example:
        >>> import tempfile
        >>> run = Run("sgd", epochs=1, limit_train=128)
        >>> with tempfile.TemporaryDirectory() as out:
        ...     [str(state) for state in run_all([run], out)]
        ['done']
    """
    job = _Runs(runs, Path(out), callbacks or Callbacks(), executor or InProcess(), options)
    if locked := job.run_each(list(job.states)):
        job.run_each(locked)
    if job.failed:
        raise RunsFailed(job.failed, len(job.states))
    return states_of(runs, Path(out))


class _Runs:
    """The runs of one call of :func:`run_all`: which wait, which are submitted, and their states."""

    def __init__(
        self, runs: Sequence[Run], out: Path, callbacks: Callbacks, executor: Executor, options: Mapping[str, Any]
    ) -> None:
        self.out, self.callbacks, self.executor, self.options = out, callbacks, executor, options
        self.states = {run_dir_name(run): state_of(run, out) for run in runs}
        self.failed: dict[str, str] = {}
        self._eta = EtaEstimator(self.states.values())
        self._measured = {name: len(state.epochs) for name, state in self.states.items()}  # epochs that it knows
        self._submitted: dict[Future[Outcome], str] = {}
        self._locked: list[str] = []

    def run_each(self, names: list[str]) -> list[str]:
        """Run what is missing; returns the runs that are locked by another process."""
        self._locked = []
        while names or self._submitted:
            unfinished = {*names, *self._submitted.values()}
            for name in [name for name in names if self.states[name].run.init not in unfinished]:
                names.remove(name)
                self._submit(name)
                self._take_results(0)
            self._take_results(LOOK)
            for name in (*self._submitted.values(), *self._locked):
                if (self.states[name].path / LOG).exists():  # otherwise it waits
                    self._update(name)
            self.callbacks.on_progress(self._progress())
        return self._locked

    def _submit(self, name: str) -> None:
        run = self.states[name].run
        state = self.states[name] = state_of(run, self.out)
        if state.ended:
            return
        initial = None if run.init is None or state.epochs else self.states.get(run.init)
        if initial is not None and (initial.path.name in self.failed or initial.diverged is not None):
            self._fail(name, f"it begins with {run.init}, which {'diverged' if initial.diverged else 'failed'}")
            return
        self.callbacks.on_start(state, self._progress())
        marks = [time.perf_counter()]

        def each_epoch(done: int, _: object) -> None:
            marks.append(time.perf_counter())  # with the evaluation, which the metrics do not count
            self._eta.add(run, marks[-1] - marks[-2], first=len(marks) == 2)
            self._measured[name] = done
            self.callbacks.on_epoch(done, run.epochs)

        job = RunJob(run, self.out, self.options)
        self._submitted[self.executor.submit(job, each_epoch, self.callbacks.tell)] = name

    def _take_results(self, timeout: float) -> None:
        done, _ = wait(self._submitted, timeout, FIRST_COMPLETED)
        for future in done:
            name = self._submitted.pop(future)
            try:
                outcome = future.result()
            except Exception as error:  # of the executor
                outcome = Outcome(False, failed=message_of(error))
            for sentence in outcome.told:
                self.callbacks.tell(sentence)
            if outcome.failed is not None:
                self._fail(name, outcome.failed)
            elif outcome.ended:
                self._update(name)
                self.callbacks.on_end(self.states[name], self._progress())
            else:
                self._locked.append(name)

    def _fail(self, name: str, message: str) -> None:
        self.failed[name] = message
        self.callbacks.on_fail(self.states[name], message)
        self.callbacks.on_progress(self._progress())

    def _update(self, name: str) -> None:
        state = self.states[name] = state_of(self.states[name].run, self.out)
        for number, metrics in enumerate(state.epochs):
            if number >= self._measured[name]:
                self._eta.add(state.run, metrics["seconds"], first=number == 0)
        self._measured[name] = len(state.epochs)

    def _progress(self) -> Progress:
        states, slots = self.states.values(), self.executor.slots
        seconds, unknown = self._eta.total(state for name, state in self.states.items() if name not in self.failed)
        not_ended = sum(not state.ended for state in states) - len(self.failed)
        at_a_time = max(1, min(slots, not_ended))
        return Progress(
            len(states),
            sum(state.finished for state in states),
            min(slots, len(self._submitted)),
            len(self.failed) + sum(state.diverged is not None for state in states),
            (seconds / at_a_time, unknown),
        )
