"""Many runs in one folder: what is done, what is left, how long it will take; and doing it."""

from __future__ import annotations

import hashlib
import json
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..core.refusal import Refusal
from ..training.config import Run
from ..training.files import write_json
from ..training.folder import read_metrics, read_run
from ..training.loop import fit
from .columns import column_of, passes_of

DIVERGED = "diverged.json"  # in the folder of a run whose loss was no number
_LOST, _TAKEN = re.compile(r"loss is (nan|-?inf) in epoch"), re.compile("another process is training there")  # how `fit` says so


def folder_name(run: Run) -> str:
    """A name that tells what the run is, and that no other run has: it ends in a digest of all settings that are not the defaults.

    Example:
        >>> folder_name(Run("bsam", {"passes": 2}, model="resnet18", data="cifar10", label_noise=0.4, seed=1))
        'resnet18-cifar10-bsam-2-noise40-seed1-69df74c7'
    """
    own = [f"{name}{run.arguments[name]:g}" for name in ("rho_min", "rho_min_floor") if name in run.arguments]
    noise = [f"noise{100 * run.label_noise:g}"] if run.label_noise else []
    digest = hashlib.sha256(json.dumps(_chosen(run), sort_keys=True).encode()).hexdigest()[:8]
    return "-".join([run.model, run.data, column_of(run).name, *own, *noise, f"seed{run.seed}", digest])


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
    """

    run: Run
    folder: Path
    epochs: tuple[Mapping[str, Any], ...] = ()
    finished: bool = False
    diverged: str | None = None

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
        raise Refusal(f"{folder} holds a run with other settings than its name says: remove it, or choose another folder than {out}")
    epochs = tuple(read_metrics(folder))
    finished = len(epochs) == run.epochs and (folder / "model.safetensors").exists()
    lost = folder / DIVERGED
    return State(run, folder, epochs, finished, json.loads(lost.read_text())["reason"] if lost.exists() else None)


def _plain(run: Run) -> Any:
    return json.loads(json.dumps(run.settings()))


class Clock:
    """How long epochs take, by those that were measured: of the same network, data and number of passes; or else scaled from another number of passes.

    Seconds are those of training; evaluation comes on top.

    Example:
        >>> clock = Clock([State(Run("sgd"), Path("runs/a"), ({"seconds": 2.0},))])
        >>> clock.epoch(Run("sam")), clock.epoch(Run("sam", model="resnet8"))
        (4.0, None)
    """

    def __init__(self, states: Iterable[State] = ()) -> None:
        self._seconds: dict[tuple[Any, ...], dict[float, list[float]]] = {}
        for state in states:
            for metrics in state.epochs:
                self.add(state.run, metrics["seconds"])

    def add(self, run: Run, seconds: float) -> None:
        """An epoch took so long."""
        self._seconds.setdefault(_kind(run), {}).setdefault(passes_of(run), []).append(seconds)

    def epoch(self, run: Run) -> float | None:
        """Seconds of an epoch; None where nothing like it was measured."""
        known, passes = self._seconds.get(_kind(run)), passes_of(run)
        if not known:
            return None
        if passes in known:
            return statistics.median(known[passes])
        return passes * statistics.median(seconds / n for n, measured in known.items() for seconds in measured)

    def left(self, states: Iterable[State]) -> tuple[float, int]:
        """Seconds that are left, and the number of runs beyond them of which nothing is known."""
        waiting = [(state, self.epoch(state.run)) for state in states if state.left]
        return sum(state.left * seconds for state, seconds in waiting if seconds is not None), sum(seconds is None for _, seconds in waiting)


def _kind(run: Run) -> tuple[Any, ...]:
    return run.model, run.data, run.batch, run.limit_train, run.precision, run.compile, run.probe


@dataclass(frozen=True)
class Watcher:
    """What is told to whom while runs are run. Nothing, unless somebody asks.

    Args:
        begins: called with the run that begins, the number of runs that are over, and the time that is left, as :meth:`Clock.left` gives it.
        epoch: called with epochs done and epochs to do.
        ends: called with a run that is over.
        tell: called with a sentence.
    """

    begins: Callable[[State, int, tuple[float, int]], None] = field(default=lambda state, over, left: None)
    epoch: Callable[[int, int], None] = field(default=lambda done, total: None)
    ends: Callable[[State], None] = field(default=lambda state: None)
    tell: Callable[[str], None] = field(default=lambda sentence: None)


def run_all(runs: Sequence[Run], out: str | Path, watcher: Watcher | None = None, **options: Any) -> list[State]:
    """Run what is missing below ``out``, in order, and go on with what was interrupted.

    Several processes may work on one folder: a run that another one holds is passed over and tried again at the end. A run whose loss is no number is noted as
    diverged and stops nobody; its folder removed, it is run anew.

    Args:
        runs: the runs.
        out: a folder, made if need be.
        watcher: who is told.
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
    out, watcher = Path(out), watcher or Watcher()
    clock = Clock(state_of(run, out) for run in runs)
    taken = [run for run in runs if not _over(run, runs, out, clock, watcher, options)]
    for run in taken:
        _over(run, runs, out, clock, watcher, options)
    return [state_of(run, out) for run in runs]


def _over(run: Run, runs: Sequence[Run], out: Path, clock: Clock, watcher: Watcher, options: Mapping[str, Any]) -> bool:
    """Run it, unless it is over; False if another process is at it."""
    state = state_of(run, out)
    if state.over:
        return True
    states = [state_of(each, out) for each in runs]
    watcher.begins(state, sum(each.over for each in states), clock.left(states))

    def each_epoch(done: int, metrics: Mapping[str, float]) -> None:
        clock.add(run, metrics["seconds"])
        watcher.epoch(done, run.epochs)

    try:
        fit(run, state.folder, each_epoch=each_epoch, tell=watcher.tell, **options)
    except Refusal as refusal:
        if _TAKEN.search(str(refusal)):
            watcher.tell(f"{state.folder.name}: another process is at it")
            return False
        if not _LOST.search(str(refusal)):
            raise
        write_json(state.folder / DIVERGED, {"reason": str(refusal)})
    watcher.ends(state_of(run, out))
    return True
