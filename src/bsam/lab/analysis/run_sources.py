"""Find runs in folders: run directories, and folders of results with the metrics of runs whose directories are gone."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeAlias

from ...common.checks import is_number
from ...common.errors import BsamError, BsamRuntimeError, BsamTypeError
from ..training.config import Run, stored_run
from ..training.files import read_json, read_json_lines
from ..training.run_dir import CONFIG, CURVATURE, MACHINES, METRICS, PREDICTIONS, PROBE, RunDir
from .experiment_titles import experiment_key
from .paper_numbers import all_arguments
from .run_record import StoredNumbers

Metrics: TypeAlias = Mapping[str, Any]
MetricsByFile: TypeAlias = Mapping[Path, tuple[Metrics, ...]]

RUNS = "runs.json"
RESULTS = "results.json"
FLATNESS = "flatness*.json"
HINT = "restore or remove it"
SETTINGS = frozenset(field.name for field in fields(Run))  # of these, runs.json lists some for each run


@dataclass(frozen=True)
class Span:
    """When and on which devices a run was trained. ``end`` is the latest possible time: dates are in whole seconds.

    Example:
        >>> machines = [{"date": "2026-11-10T12:00:00+00:00", "device": "cpu"}]
        >>> span = Span.of(machines, [{"seconds": 1.5}, {"seconds": 2.5}])
        >>> span.end.isoformat(), span.devices
        ('2026-11-10T12:00:05+00:00', frozenset({'cpu'}))
    """

    start: datetime
    end: datetime
    devices: frozenset[str | None]

    @classmethod
    def of(cls, machines: Sequence[Mapping[str, Any]], epochs: Sequence[Metrics]) -> Span | None:
        """Return the span of a run; None without machines or epochs."""
        if not machines or not epochs:
            return None
        dates = [datetime.fromisoformat(machine["date"]).astimezone(UTC) for machine in machines]
        end = max(dates) + timedelta(seconds=sum(epoch["seconds"] for epoch in epochs) + 1)
        return cls(min(dates), end, frozenset(machine.get("device") for machine in machines))

    def overlaps(self, other: Span) -> bool:
        """Return whether two runs may have shared a device."""
        return self.start < other.end and other.start < self.end and bool(self.devices & other.devices)


@dataclass(frozen=True)
class Source(StoredNumbers):
    """A run as it was found.

    Args:
        run: the settings.
        path: the run directory or the file with its metrics.
        folder: the folder that holds this run and the runs that tuned its settings.
        diverged: why it diverged; None otherwise.
        span: when and on which devices it was trained; None if that is unknown.
        wrong_labels: the fraction of the training labels that are wrong; None if it is not stored.
        chosen: how its settings were chosen by tuning, in words; None if that is not stored.
    """

    run: Run
    path: Path
    folder: Path
    diverged: str | None = None
    span: Span | None = None
    wrong_labels: float | None = None
    chosen: str | None = None

    @property
    def last(self) -> Metrics | None:
        """The metrics of the last epoch; None if the run is not finished."""
        return self.epochs[-1] if self.epochs and self.epochs[-1].get("epoch") == self.run.epochs else None


@dataclass
class Sources:
    """The runs in folders, and a sentence about everything that could not be read."""

    runs: list[Source] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    _visited: set[Path] = field(default_factory=set)
    _chosen: dict[Path, str] = field(default_factory=dict)  # from results.json, which is read before run directories
    _unlisted: dict[Path, tuple[Metrics, ...]] = field(default_factory=dict)  # metrics without settings

    @contextlib.contextmanager
    def record_problems(self, path: Path) -> Iterator[None]:
        """Turn an error in reading ``path`` into a problem."""
        try:
            yield
        except BsamRuntimeError as error:  # names its file
            self.problems.append(f"{error}.")
        except (BsamError, LookupError, TypeError, ValueError, AttributeError, OverflowError, OSError) as error:
            reason = str(error) if isinstance(error, BsamError) else f"{type(error).__name__}: {error}"
            self.problems.append(f"{path} cannot be read ({reason}): {HINT}.")

    def add(self, folders: Sequence[Path]) -> None:
        """Add all runs in and below these folders, and the flatness of their networks."""
        measured: list[tuple[Path, Mapping[str, Any]]] = []
        for top in folders:
            before = len(self.problems)
            folders_with_runs = list(self._walk(top))
            for folder, files in folders_with_runs:
                if folder.resolve() in self._visited:
                    continue
                self._visited.add(folder.resolve())
                if CONFIG in files:
                    self._add_run_dir(folder)
                elif RUNS in files or RESULTS in files:
                    self._add_results(folder)
                for file in sorted(folder.glob(FLATNESS)):
                    with self.record_problems(file):
                        measured += [(file, entry) for entry in read_json(file, dict, HINT)["models"]]
            if not folders_with_runs and len(self.problems) == before:
                self.problems.append(f"{top} has no runs: give run directories, folders with them, or CSV files.")
        self._drop_copies()
        for file, entry in measured:
            with self.record_problems(file):
                self._add_flatness(file, entry)
        self.problems += [f"{path} is left out: its folder has no file with its settings." for path in self._unlisted]

    def _walk(self, top: Path) -> Iterator[tuple[Path, set[str]]]:
        """Return each folder with a known file, and its files; the folders in run directories are left out."""

        def unreadable(error: OSError) -> None:
            self.problems.append(f"{error.filename} cannot be read ({error.strerror}): change its permissions.")

        for name, folders, files in os.walk(top, onerror=unreadable):
            folders.sort()
            folder = Path(name)
            if CONFIG in files:
                folders.clear()
            if {CONFIG, RUNS, RESULTS} & set(files) or any(folder.glob(FLATNESS)):
                yield folder, set(files)

    def _add_run_dir(self, path: Path) -> None:
        files = RunDir(path)
        with self.record_problems(path):
            state = files.state(files.run())
            for metrics in state.epochs:
                if not is_number(seconds := metrics.get("seconds")):
                    raise BsamRuntimeError(
                        f"{path / METRICS} must have the seconds of each epoch, got {seconds!r}: {HINT}"
                    )
            extras: dict[str, Any] = {"chosen": self._chosen.get(path)}
            with self.record_problems(path / MACHINES):
                extras["span"] = Span.of(files.machines(), state.epochs)
            with self.record_problems(path / "labels.json"):
                extras["wrong_labels"] = files.note("labels").get("wrong")
            with self.record_problems(path):
                extras["probe"] = tuple(files.probe()) if (path / PROBE).exists() else ()
            with self.record_problems(path / CURVATURE):
                extras |= {"top_eigenvalue": _eigenvalue(files.top_eigenvalue()), "surface": files.surface()}
            if (path / PREDICTIONS).exists():
                extras["predictions"] = path / PREDICTIONS
            self.runs.append(Source(state.run, path, path.parent, state.diverged, epochs=state.epochs, **extras))

    def _add_results(self, folder: Path) -> None:
        """Add the runs that ``runs.json`` lists, and those in ``results.json`` without a run directory."""
        metrics: dict[Path, tuple[Metrics, ...]] = {}
        for path in sorted(folder.glob("*.jsonl")):
            with self.record_problems(path):
                metrics[path] = tuple(read_json_lines(path, HINT))
        used: set[Path] = set()
        for file, add in ((folder / RUNS, self._add_listed_runs), (folder / RESULTS, self._add_entries)):
            if file.exists():
                with self.record_problems(file):
                    add(read_json(file, dict, HINT), folder, metrics, used)
        self._unlisted |= {path: lines for path, lines in metrics.items() if path not in used}

    def _add_listed_runs(self, listed: Metrics, folder: Path, metrics: MetricsByFile, used: set[Path]) -> None:
        for name, about in listed["runs"].items():
            used.add(path := folder / f"{name}.jsonl")
            with self.record_problems(path):
                run = stored_run({**listed["settings"], **{key: about[key] for key in about if key in SETTINGS}})
                eigenvalue = _eigenvalue(about.get("top_eigenvalue"))
                self.runs.append(Source(run, path, folder, epochs=metrics.get(path, ()), top_eigenvalue=eigenvalue))

    def _add_entries(self, listed: Metrics, folder: Path, metrics: MetricsByFile, used: set[Path]) -> None:
        for entry in [*listed["runs"], *listed.get("tuning", [])]:
            run_folder, last = folder / entry["folder"], entry["last"]
            if entry.get("chosen"):
                self._chosen[run_folder] = entry["chosen"]
            path = next((path for path, lines in metrics.items() if lines and lines[-1] == last), run_folder)
            if path in used or (run_folder / CONFIG).exists():
                continue
            used.add(path)
            with self.record_problems(run_folder):
                source = Source(
                    run=stored_run(entry["settings"]),
                    path=path,
                    folder=folder,
                    diverged=entry["reason"] or "unknown" if entry["state"] == "diverged" else None,
                    wrong_labels=entry.get("wrong_labels"),
                    chosen=self._chosen.get(run_folder),
                    epochs=metrics.get(path, () if last is None else (last,)),
                    top_eigenvalue=_eigenvalue(entry.get("top_eigenvalue")),
                )
                self.runs.append(source)

    def _drop_copies(self) -> None:
        """Keep one of several copies of a finished run: the one with the most data."""
        best: dict[str, Source] = {}

        def amount(copy: Source) -> tuple[int, bool, bool]:
            return len(copy.epochs), copy.top_eigenvalue is not None, copy.surface is not None

        for source in self.runs:
            if source.last is not None:
                run, arguments = source.run, all_arguments(source.run.method, source.run.arguments)
                key = json.dumps([experiment_key(run), run.seed, run.method, arguments, source.last], sort_keys=True)
                best[key] = max(best.get(key, source), source, key=amount)  # the first if equal
        chosen = {id(source) for source in best.values()}
        self.runs = [source for source in self.runs if source.last is None or id(source) in chosen]

    def _add_flatness(self, file: Path, entry: Mapping[str, Any]) -> None:
        """Add the flatness of a network to its run; add the run if it was not found."""
        if "run" not in entry:
            self.problems.append(f"{file}: {entry['file']} is left out, because its run is not known.")
            return
        for i, source in enumerate(self.runs):
            if source.last == entry["metrics"]:
                self.runs[i] = replace(source, flatness=entry)
                return
        copies = [path for path, lines in self._unlisted.items() if lines and lines[-1] == entry["metrics"]]
        path = copies[0] if copies else file.parent / Path(entry["file"]).name
        epochs = self._unlisted.pop(path, (entry["metrics"],))
        self.runs.append(Source(stored_run(entry["run"]), path, file.parent, epochs=epochs, flatness=entry))


def _eigenvalue(value: Any) -> float | None:
    if value is not None and not is_number(value):
        raise BsamTypeError(f"top_eigenvalue must be a number or null, got {value!r}")
    return value
