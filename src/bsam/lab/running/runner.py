"""Train many runs in one folder, skipping finished and continuing interrupted ones, and estimate the time left."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from ...common.errors import BsamRuntimeError
from ..common.grouping import group_by
from ..recipes.columns import state_of, states_of
from ..recipes.experiments import Experiment
from ..recipes.variants import passes_of
from ..training.config import Run
from ..training.files import check_writable
from ..training.run_dir import LOG, RunDir, RunState
from .executors import Executor, InProcess
from .job import Outcome, RunJob, message_of

LOOK = 1.0  # seconds between checks of the runs in other processes
RETRIES = 3  # restarts of a run whose process was killed, for example when memory ran out


@dataclass(frozen=True)
class Progress:
    """The progress of all runs.

    Args:
        total: the number of runs.
        done: the number of finished runs.
        running: the number of runs being trained.
        failed: the number of runs that failed or diverged.
        left: the remaining seconds if the executor stays fully used, and the number of runs without an estimate.
    """

    total: int
    done: int
    running: int
    failed: int
    left: tuple[float, int]


@dataclass(frozen=True, kw_only=True)
class Callbacks:
    """Functions called during an experiment; by default they do nothing. :func:`run_all` calls the last three.

    Args:
        on_plan: called with the states of all runs before the first is trained.
        on_stage: called with a number of runs and their name, such as "tuning"; returns a context with the callbacks
            for these runs. None uses this object for all runs.
        on_end: called with the state of a run that has ended, the progress of all runs, and the error message if it
            failed (otherwise None).
        on_progress: called with the progress of all runs: after every epoch when training in this process, otherwise
            every second.
        on_message: called with messages for the user.
    """

    on_plan: Callable[[Experiment, Sequence[RunState]], None] = field(default=lambda experiment, states: None)
    on_stage: Callable[[Experiment, int, str], AbstractContextManager[Callbacks]] | None = None
    on_end: Callable[[RunState, Progress, str | None], None] = field(default=lambda state, progress, failed: None)
    on_progress: Callable[[Progress], None] = field(default=lambda progress: None)
    on_message: Callable[[str], None] = field(default=lambda sentence: None)


class RunsFailed(BsamRuntimeError):
    """Some runs failed; all others were trained.

    Args:
        failed: the error messages, by the name of the run directory.
        total: the total number of runs.
    """

    def __init__(self, failed: Mapping[str, str], total: int) -> None:
        by_message = group_by(failed, lambda name: " ".join(failed[name].split()))
        reasons = "; ".join(f"{', '.join(names)}: {message}" for message, names in by_message.items())
        super().__init__(f"{len(failed)} of {total} runs failed: {reasons}")
        self.failed = dict(failed)


def run_all(
    runs: Sequence[Run],
    out: str | Path,
    callbacks: Callbacks | None = None,
    executor: Executor | None = None,
    **options: Any,
) -> list[RunState]:
    """Train all runs that are not finished, in order; interrupted runs continue.

    Several processes can work on one folder: a run locked by another process is skipped and tried again at the end. A
    run that starts from another one waits until that one has finished. A run that diverged is recorded as such; remove
    its directory to train it again. Runs that diverge or fail do not stop the others.

    Args:
        runs: the runs.
        out: the folder for the run directories, created if it does not exist.
        callbacks: functions to call during training.
        executor: where to train; None trains in this process, one run after another.
        options: arguments of :func:`bsam.lab.training.loop.fit`: ``data_dir``, ``cache_dir``, ``device``,
            ``checkpoint_every``; and ``about`` of each run, by the name of the run directory.

    Returns:
        the state of each run.

    Raises:
        RunsFailed: at the end, if any run failed.

    Example:
        >>> import tempfile
        >>> run = Run("sgd", epochs=1, limit_train=128)
        >>> with tempfile.TemporaryDirectory() as out:
        ...     [str(state) for state in run_all([run], out)]
        ['done']
    """
    states = {state.path.name: state for state in states_of(runs, Path(out))}
    job = _Runs(states, Path(out), callbacks or Callbacks(), executor or InProcess(), options)
    if not all(state.ended for state in job.states.values()):
        check_writable(Path(out), "runs")  # one error, instead of one for each run
    if locked := job.run_each(list(job.states)):
        job.run_each(locked)
    if job.failed:
        raise RunsFailed(job.failed, len(job.states))
    return states_of(runs, Path(out))


@dataclass
class _Runs:
    """The runs of one call of :func:`run_all`: those waiting, those submitted, and the state of each."""

    states: dict[str, RunState]
    out: Path
    callbacks: Callbacks
    executor: Executor
    options: Mapping[str, Any]

    def __post_init__(self) -> None:
        self.failed: dict[str, str] = {}
        self._submitted: dict[Future[Outcome], str] = {}
        self._running: set[str] = set()
        self._lost: Counter[str] = Counter()  # how many times a run's process was killed

    def run_each(self, names: list[str]) -> list[str]:
        """Train the runs that are not finished, and return those locked by another process."""
        self._waiting = names
        self._locked: list[str] = []
        while self._waiting or self._submitted:
            unfinished = {*self._waiting, *self._submitted.values()}
            ready = [name for name in self._waiting if self.states[name].run.init not in unfinished]
            for name in ready[: max(0, self.executor.slots - len(self._submitted))]:
                self._waiting.remove(name)
                self._submit(name)
            self._take_results()
            for name in (*self._submitted.values(), *self._locked):
                if (self.states[name].path / LOG).exists():  # otherwise it has not started
                    self._update(name)
            self.callbacks.on_progress(self._progress())
        return self._locked

    def _submit(self, name: str) -> None:
        run = self.states[name].run
        state = self.states[name] = state_of(run, self.out)
        if state.ended:
            return
        if run.init in self._locked:
            self._locked.append(name)
            return
        initial = None if run.init is None or RunDir(state.path).has_checkpoint() else self.states.get(run.init)
        if initial is not None and not initial.finished:
            self._fail(name, f"it starts from {run.init}, which {'diverged' if initial.diverged else 'failed'}")
            return
        self._running.add(name)

        def on_epoch(*_: object) -> None:
            self._update(name)
            self.callbacks.on_progress(self._progress())

        job = RunJob(run, self.out, self.options)
        self._submitted[self.executor.submit(job, on_epoch, self.callbacks.on_message)] = name

    def _take_results(self) -> None:
        done, _ = wait(self._submitted, LOOK, FIRST_COMPLETED)
        for future in done:
            name = self._submitted.pop(future)
            self._running.discard(name)
            try:
                outcome = future.result()
            except BrokenProcessPool:
                self._lost[name] += 1
                if self._lost[name] <= RETRIES:
                    self.callbacks.on_message(
                        f"The process of {name} was killed, perhaps because memory ran out. The run continues."
                    )
                    self._waiting.insert(0, name)
                    continue
                outcome = Outcome(False, f"its process was killed {self._lost[name]} times: try fewer --jobs")
            except Exception as error:  # raised by the executor
                outcome = Outcome(False, message_of(error))
            if outcome.ended:
                self._update(name)
            for sentence in outcome.messages:
                self.callbacks.on_message(sentence)
            if outcome.failed is not None:
                self._fail(name, outcome.failed)
            elif outcome.ended:
                self.callbacks.on_end(self.states[name], self._progress(), None)
            else:
                self._locked.append(name)

    def _fail(self, name: str, message: str) -> None:
        self.failed[name] = message
        self.callbacks.on_end(self.states[name], self._progress(), message)

    def _update(self, name: str) -> None:
        self.states[name] = state_of(self.states[name].run, self.out)

    def _progress(self) -> Progress:
        states = self.states.values()
        eta = EtaEstimator(states)
        seconds, unknown = eta.total(state for name, state in self.states.items() if name not in self.failed)
        not_ended = sum(not state.ended for state in states) - len(self.failed)
        at_a_time = max(1, min(self.executor.slots, not_ended))
        return Progress(
            len(states),
            sum(state.finished for state in states),
            len(self._running),
            len(self.failed) + sum(state.diverged is not None for state in states),
            (seconds / at_a_time, unknown),
        )


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
