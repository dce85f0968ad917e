"""Many runs in one folder: what is done, what is left, how long it will take; and doing it."""

from __future__ import annotations

import hashlib
import json
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..core.errors import BsamError, BsamRuntimeError
from ..training.config import Run
from ..training.files import read_json, write_json
from ..training.folder import ANEW, NETWORK, has_network, last_metrics, read_metrics, read_run, read_weights
from ..training.lock import RunLocked
from ..training.loop import TASKS, Diverged, fit
from .variants import passes_of, variant_of

DIVERGED = "diverged.json"  # in the folder of a run whose loss was no number


def folder_name(run: Run) -> str:
    """A name that tells what the run is, and that no other run has: it ends in a digest of all settings that are not
    the defaults.

    Example:
        >>> folder_name(Run("bsam", {"passes": 2}, model="resnet18", data="cifar10", label_noise=0.4, seed=1))
        'resnet18-cifar10-bsam-2-noise40-seed1-69df74c7'
    """
    own = [f"{name}{run.arguments[name]:g}" for name in ("rho_min", "rho_min_floor") if name in run.arguments]
    noise = [f"noise{100 * run.label_noise:g}"] if run.label_noise else []
    digest = hashlib.sha256(json.dumps(_chosen(run), sort_keys=True).encode()).hexdigest()[:8]
    return "-".join([run.model, run.data, variant_of(run).name, *own, *noise, f"seed{run.seed}", digest])


def _chosen(run: Run) -> dict[str, Any]:
    """What is not the default: a setting that Run gets in years to come leaves the names as they are."""
    blank = Run(run.method).settings()
    return {"method": run.method, **{name: value for name, value in run.settings().items() if value != blank[name]}}


@dataclass(frozen=True)
class State:
    """How far a run is.

    Args:
        run: its settings.
        folder: where it is, or will be.
        epochs: the metrics of those that are done.
        finished: whether the trained network is there, too.
        diverged: what became of it, if its loss was no number at last; else None.
        damaged: which of its files is damaged, and what to do, in a sentence; else None. Such a run is not finished.
    """

    run: Run
    folder: Path
    epochs: tuple[Mapping[str, Any], ...] = ()
    finished: bool = False
    diverged: str | None = None
    damaged: str | None = None

    @property
    def over(self) -> bool:
        """Whether nothing is left to do."""
        return self.finished or self.diverged is not None

    @property
    def left(self) -> int:
        """Epochs that are left."""
        return 0 if self.over else max(self.run.epochs - len(self.epochs), 0)

    def __str__(self) -> str:
        if self.diverged is not None:
            return "diverged"
        if self.finished:
            return "done"
        return f"epoch {len(self.epochs)} of {self.run.epochs}" if self.epochs else "missing"


def state_of(run: Run, out: Path) -> State:
    """How far a run is, by what its folder below ``out`` holds; a folder of other settings is refused."""
    folder = out / folder_name(run)
    if not (folder / "config.json").exists():
        return State(run, folder)
    if _plain(read_run(folder)) != _plain(run):
        raise BsamRuntimeError(
            f"{folder} holds a run with other settings than its name says: remove it, or choose another folder than "
            f"{out}"
        )
    epochs, damaged = _epochs(run, folder)
    network = (folder / NETWORK).exists()
    if network and damaged is None:
        damaged = _damage(lambda: _check_end(folder))
    finished = network and damaged is None
    lost = not finished and (folder / DIVERGED).exists()
    return State(run, folder, epochs, finished, _reason(folder / DIVERGED) if lost else None, damaged)


def _epochs(run: Run, folder: Path) -> tuple[tuple[Mapping[str, Any], ...], str | None]:
    """The metrics of the epochs that are done, or none and what is wrong with the file."""
    epochs: list[dict[str, Any]] = []
    damaged = _damage(lambda: epochs.extend(read_metrics(folder)))
    score = f"{run.eval_split}_{TASKS[run.task].measure.name}" if run.task in TASKS else None
    if epochs and score is not None and epochs[-1].get(score) is None:  # what the table shows
        return (), f"{folder / 'metrics.jsonl'} is damaged: it has no {score}; {ANEW}"
    return tuple(epochs), damaged


def _check_end(folder: Path) -> None:
    """Refuse a run with a network whose metrics are not complete, or whose network has no whole header."""
    last_metrics(folder)
    if not has_network(folder):
        raise BsamRuntimeError(f"{folder / NETWORK} is damaged; {ANEW}")


def _damage(read: Callable[[], object]) -> str | None:
    """What a reader of files says of damage; None if there is none. What cannot be read at all is refused."""
    try:
        read()
    except BsamError as error:
        if isinstance(error.__cause__, OSError):
            raise
        return str(error)
    return None


def _reason(file: Path) -> str:
    mend = "remove the file, and the run goes on after its last checkpoint"
    return str(read_json(file, dict, mend).get("reason", "diverged"))


def _plain(run: Run) -> Any:
    return json.loads(json.dumps(run.settings()))


class EtaEstimator:
    """How long runs take, by epochs that were measured: of the same network, data and number of passes; or else scaled
    from another number of passes.

    The first epoch after a start is kept apart: it compiles. Epochs of earlier calls are known by their training alone,
    without the evaluation after them.

    Example:
        >>> clock = EtaEstimator([State(Run("sgd", epochs=3), Path("a"), ({"seconds": 9.0}, {"seconds": 2.0}))])
        >>> clock.left(State(Run("sam", epochs=3), Path("b"))), clock.left(State(Run("sam", model="resnet8"), Path("c")))
        (26.0, None)
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
    state = state_of(run, out)
    damaged = _damage(lambda: read_weights(state.folder)) if state.finished else state.damaged
    if state.over and damaged is None:
        return True
    if damaged is not None:
        callbacks.tell(f"{damaged}. Going on with the run.")
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
        fit(run, state.folder, each_epoch=each_epoch, tell=callbacks.tell, **options)
    except RunLocked:
        callbacks.tell(f"{state.folder.name}: another process is at it")
        return False
    except Diverged as error:
        write_json(state.folder / DIVERGED, {"reason": str(error)})
    callbacks.ends(state_of(run, out))
    return True
