"""Train many runs in one folder, skipping finished and continuing interrupted ones."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from ...common.errors import BsamRuntimeError
from ..common.files import check_writable
from ..common.printing import group_by
from ..common.termination import Terminated
from ..config import Run
from ..recipes.plan import state_of
from ..training.machine import Machine
from ..training.run_dir import CHECKPOINT, RunState
from .executors import RETRIES, Executor
from .job import Job, Outcome, message_of, train_run

LOOK = 1.0  # seconds between checks of the runs in other processes
READS = 3  # of a directory that cannot be read, before its run fails: errors of network file systems pass


class Progress(NamedTuple):
    """The stage, the state of each run, the number running, the number of slots, and errors by run."""

    stage: str
    states: Sequence[RunState]
    running: int
    slots: int
    failed: Mapping[str, str]  # by the name of the run directory


@dataclass(frozen=True, kw_only=True)
class StudyCallbacks:
    """Functions called while many runs are trained; by default they do nothing.

    Args:
        on_begin: called with the states of all runs, before any is trained.
        on_end: called with the state of a run that has ended, the progress, and the error message if it failed.
        on_progress: called after every epoch when training in this process, otherwise every second.
        on_message: called with messages for the user.
    """

    on_begin: Callable[[Sequence[RunState]], None] = field(default=lambda states: None)
    on_end: Callable[[RunState, Progress, str | None], None] = field(default=lambda state, progress, failed: None)
    on_progress: Callable[[Progress], None] = field(default=lambda progress: None)
    on_message: Callable[[str], None] = field(default=lambda sentence: None)


class RunsFailed(BsamRuntimeError):
    """Some runs failed; all others were trained. ``failed`` has the error messages, by the name of the run."""

    def __init__(self, failed: Mapping[str, str], total: int) -> None:
        by_message = group_by(failed, lambda name: " ".join(failed[name].split()))
        reasons = "; ".join(f"{', '.join(names)}: {message}" for message, names in by_message.items())
        super().__init__(f"{len(failed)} of {total} runs failed: {reasons}")
        self.failed = dict(failed)


def run_all(
    runs: Sequence[Run | RunState],
    out: str | Path,
    machine: Machine = Machine(),
    callbacks: StudyCallbacks = StudyCallbacks(),
    executor: Executor | None = None,
    stage: str = "runs",
    about: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> list[RunState]:
    """Train all runs that are not finished, in order, and return their states; interrupted runs continue.

    Several processes can work on one folder: a run locked by another process is skipped and tried again at the end. A
    run that starts from another one waits until that one has finished. Runs that diverge or fail do not stop the
    others, nor do directories that cannot be read; :class:`RunsFailed` at the end says which failed. Remove the
    directory of a diverged run to train it again.

    Args:
        runs: the runs, or their states, which also say up to which epoch they are trained.
        out: the folder for the run directories, created if it does not exist.
        machine: the device and the folders.
        callbacks: called with what happens.
        executor: the processes that train; None trains in this process, one run after another.
        stage: what the runs are, for :class:`Progress`.
        about: what each run is, for its ``run.json``, by the name of the run directory.

    Example:
        >>> import tempfile
        >>> run = Run("sgd", epochs=1, limit_train=128)
        >>> with tempfile.TemporaryDirectory() as out:
        ...     [str(state) for state in run_all([run], out)]
        ['done']
    """
    out = Path(out)
    known = [run if isinstance(run, RunState) else state_of(run, out) for run in runs]
    states = {state.path.name: state for state in known}
    if not all(state.ended for state in known):
        check_writable(out, "runs")  # one error, instead of one for each run
    queue = _Queue(states, out, machine, callbacks, executor, stage, about)
    queue.train(list(states))
    queue.train(queue.locked)
    if queue.failed:
        raise RunsFailed(queue.failed, len(states))
    return [queue.states[state.path.name] for state in known]


@dataclass
class _Queue:
    """The runs of one call of :func:`run_all`, by name: those being trained, and those that failed or are locked."""

    states: dict[str, RunState]
    out: Path
    machine: Machine
    callbacks: StudyCallbacks
    executor: Executor | None
    stage: str
    about: Mapping[str, Mapping[str, Any]]
    running: dict[str, Future[Outcome]] = field(default_factory=dict)
    locked: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    killed: Counter[str] = field(default_factory=Counter)

    def train(self, waiting: list[str]) -> None:
        """Train the runs that have not ended, except those locked by another process."""
        self.locked = []
        while waiting or self.running:
            ready = [name for name in waiting if self.states[name].run.init not in {*waiting, *self.running}]
            for name in ready[: max(0, self._progress().slots - len(self.running))]:
                waiting.remove(name)
                if not self.states[name].ended:
                    self._update(name)  # another process may have trained it, or the directory cannot be read
                if not self.states[name].ended:
                    self._start(name)
            wait(self.running.values(), LOOK, FIRST_COMPLETED)
            for name in [name for name, future in self.running.items() if future.done()]:
                self._end(name, self.running.pop(name), waiting)
            self._look()

    def _start(self, name: str) -> None:
        state = self.states[name]
        run = state.run
        init = None if run.init is None else self.out / run.init
        job = Job(run, state.path, self.machine, init, self.about.get(name), state.until)
        initial = None if (state.path / CHECKPOINT).exists() else self.states.get(run.init or "")
        future = self.running[name] = Future()
        if state.unreadable is not None:
            future.set_result(Outcome(state.unreadable))
        elif run.init in self.locked:
            future.set_result(Outcome(locked=True))
        elif initial is not None and not initial.finished:
            reason = "diverged" if initial.diverged else "failed"
            future.set_result(Outcome(f"it starts from {run.init}, which {reason}"))
        elif self.executor is not None:
            self.running[name] = self.executor.submit(job)
        else:
            future.set_result(train_run(job, self.callbacks.on_message, self._look))

    def _end(self, name: str, future: Future[Outcome], waiting: list[str]) -> None:
        try:
            outcome = future.result()
        except (BrokenProcessPool, Terminated) as end:
            self.killed[name] += 1
            outcome = Outcome(f"its process was killed {self.killed[name]} times: try fewer --jobs")
            if self.killed[name] <= RETRIES:
                is_signal = isinstance(end, Terminated)
                reason = "was terminated" if is_signal else "was killed, perhaps because memory ran out"
                self.callbacks.on_message(f"The process of {name} {reason}. The run continues.")
                waiting.insert(0, name)
                return
        except Exception as error:  # raised by the executor
            outcome = Outcome(message_of(error))
        for sentence in outcome.messages:
            self.callbacks.on_message(sentence)
        if outcome.locked:
            self.locked.append(name)
            return
        failed = outcome.failed
        if failed is None:
            self._update(name)
            failed = self.states[name].unreadable
        if failed is not None:
            self.failed[name] = failed
        self.callbacks.on_end(self.states[name], self._progress(), failed)

    def _look(self) -> None:
        for name in (*self.running, *self.locked):
            state = self._read(name)
            if state.unreadable is None:  # otherwise the next look or the end of the run tells
                self.states[name] = state
        self.callbacks.on_progress(self._progress())

    def _update(self, name: str) -> None:
        for _ in range(READS):
            self.states[name] = self._read(name)
            if self.states[name].unreadable is None:
                return
            time.sleep(LOOK)

    def _read(self, name: str) -> RunState:
        return state_of(self.states[name].run, self.out, self.states[name].until)

    def _progress(self) -> Progress:
        slots = 1 if self.executor is None else max(1, self.executor.slots())  # at least 1: a run can wait for a node
        return Progress(self.stage, list(self.states.values()), len(self.running), slots, self.failed)
