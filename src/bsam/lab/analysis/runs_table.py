"""Runs as one table: run directories, folders of results, and CSV files with others' results."""

from __future__ import annotations

import contextlib
import hashlib
import os
import statistics
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ...common.checks import is_number
from ...common.errors import BsamError, BsamRuntimeError, BsamValueError
from ..common.files import inside, read_bytes, read_json, read_json_lines, reading
from ..common.printing import group_by
from ..config import Run
from ..recipes.plan import TUNING_SEED, check_text, describe
from ..tasks import describe_task, task_of
from ..training.flatness_numbers import largest_eigenvalue
from ..training.run_dir import ABOUT, CONFIG, METRICS, NETWORK, RunDir, run_dir_name, stored_run
from .outcome import failure, score_title
from .trained_on import separate_experiments

RESULTS = "results.json"
FLATNESS_FILES = "flatness*.json"
DAMAGED_HINT = "restore or remove it"
NO_NUMBER = float("nan")
REQUIRED = ("experiment", "method", "seed", "score")  # columns of a CSV file
OPTIONAL = ("unit", "passes", "radius", "published", "source")
EPOCH_COLUMNS = ["run", "experiment", "row", "seed", "state", "epoch", "train_loss"]  # without any epoch
CSV_PLACE = 10_000  # of the rows of a CSV file: after those of runs
STATES = ("finished", "diverged", "unfinished", "not started")  # the first of these is kept of two copies
# states in results.json; others are unfinished
STORED_STATES = {"done": "finished", "diverged": "diverged", "missing": "not started"}
DAMAGED = (BsamError, LookupError, TypeError, ValueError, AttributeError, OverflowError, OSError)


@dataclass
class _Source:
    """A run in its directory, in ``results.json`` (whose words for states it is given) or in ``flatness.json``."""

    run: Run
    about: Mapping[str, Any]
    path: Path
    epochs: Sequence[Mapping[str, Any]]
    state: str
    reason: str | None = None
    metrics: Path | None = None
    identity: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        stored = self.state
        self.state = STORED_STATES.get(self.state, "unfinished")
        self.reason = stored if self.state == "unfinished" else self.reason
        self.last = self.epochs[-1] if self.state == "finished" else None


def _number(value: Any, name: str) -> float:
    if not is_number(value):
        raise BsamValueError(f"{name} must be a number, got {value!r}")
    return float(value)


def _score(source: _Source) -> float | None:
    if source.last is None:
        return None
    measure = task_of(source.run).score
    metric = measure.metric(source.run.eval_split)
    _number(source.last.get(metric), f"{metric} of its last epoch")
    return measure.shown(source.last, source.run.eval_split)


def _chosen(source: _Source) -> str | None:
    value = source.about.get("chosen")
    if value is not None:
        check_text("chosen", value)
    return value


def _seconds(source: _Source) -> float | None:
    seconds = [_number(epoch.get("seconds"), "the seconds of each epoch") for epoch in source.epochs]
    return None if source.about.get("shared", True) or not seconds else statistics.median(seconds)


def _failure(source: _Source) -> str | None:
    with contextlib.suppress(*DAMAGED):  # a data set that this version does not have, or a damaged note
        return None if source.last is None else failure(source.run, RunDir(source.path), source.epochs)
    return None


def _memorised(source: _Source) -> float | None:
    value = (source.last or {}).get("memorised")
    return None if value is None else 100 * _number(value, "memorised")


# The columns: the value of runs that do not have it, and how it is read; None takes it from ``describe``. Those of
# measurements are added after all runs.
READERS: Mapping[str, tuple[Any, Callable[[_Source], Any] | None]] = {
    "experiment": ("", None),
    "row": ("", None),
    "seed": (0, lambda source: source.run.seed),
    "state": ("finished", lambda source: source.state),
    "reason": ("", lambda source: source.reason),
    "score": (NO_NUMBER, _score),
    "unit": ("", lambda source: score_title(source.run)),
    "higher": (True, lambda source: task_of(source.run).score.higher),
    "epochs_done": (0, lambda source: len(source.epochs) if source.last is None else source.run.epochs),
    "epochs": (0, lambda source: source.run.epochs),
    "section": ("", None),
    "column": ("", None),
    "place": (0, None),
    "variant": ("", None),
    "method": ("", lambda source: source.run.method),
    "model": ("", lambda source: source.run.model),
    "data": ("", lambda source: source.run.data),
    "radius": (NO_NUMBER, None),
    "passes": (NO_NUMBER, None),
    "seconds": (NO_NUMBER, _seconds),
    "chosen": (None, _chosen),
    "tuned": (False, None),
    "published": (NO_NUMBER, None),
    "published_table": ("", None),
    "failure": ("", _failure),
    "memorised": (NO_NUMBER, _memorised),
    "top_eigenvalue": (NO_NUMBER, lambda source: None),
    "eigenvalue_samples": (NO_NUMBER, lambda source: None),
    "settings": (None, lambda source: source.run.settings()),
    "identity": (None, lambda source: source.identity),
    "last": (None, lambda source: source.last),
    "metrics": (None, lambda source: source.metrics),
    "flatness": (None, lambda source: None),
    "name": ("", lambda source: source.path.name),
    "path": (None, lambda source: source.path),
}
COLUMNS: Mapping[str, Any] = {name: empty for name, (empty, _) in READERS.items()}


def read_runs(paths: str | Path | Iterable[str | Path], problems: list[str] | None = None) -> pd.DataFrame:
    """Return a table with a row for each run. Runs that only served to tune others are left out.

    Args:
        paths: run directories, folders with run directories at any depth, folders with a ``results.json``, and CSV
            files with the columns experiment, method, seed and score.
        problems: gets a sentence about everything that cannot be read; None makes each a warning.

    """
    folders = [Path(path) for path in ([paths] if isinstance(paths, str | Path) else paths)]
    reader = _Reader()
    for path in [path for path in folders if path.suffix != ".csv"]:
        reader.add(path)
    reader.add_flatness()
    separate_experiments(reader.rows)
    for path in [path for path in folders if path.suffix == ".csv"]:  # others' results join ours
        reader.add(path)
    table = pd.DataFrame(reader.rows, columns=list(COLUMNS))
    table = _without_copies(_without_unasked(table), reader.problems)
    keys = table.assign(experiment=pd.factorize(table["experiment"])[0], radius=table["radius"].fillna(0.0))
    table = table.loc[keys.sort_values(["experiment", "place", "radius", "row", "seed"], kind="stable").index]
    if problems is None:
        for problem in reader.problems:
            warnings.warn(problem, stacklevel=2)
    else:
        problems += dict.fromkeys(reader.problems)
    return table.reset_index(drop=True)


def read_epochs(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the metrics of runs, a row for each epoch, with the run's experiment, row, seed and state.

    Args:
        runs: a table of :func:`read_runs`, or a part of it.
    """
    rows = []
    for run in runs.itertuples():
        lines = [run.last] if run.last else []
        if run.metrics is not None and run.metrics.exists():
            lines = read_json_lines(run.metrics, DAMAGED_HINT)
        key = {"run": run.Index, "experiment": run.experiment, "row": run.row, "seed": run.seed, "state": run.state}
        rows += [{**key, **metrics} for metrics in lines]
    return pd.DataFrame(rows) if rows else pd.DataFrame(columns=EPOCH_COLUMNS)


class _Reader:
    """The rows of the table so far, and a sentence about everything that could not be read."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.problems: list[str] = []
        self._measured: list[tuple[Path, Mapping[str, Any]]] = []  # entries with their file
        self._digests: dict[Path, str | None] = {}
        self._visited: set[Path] = set()

    @contextlib.contextmanager
    def _record_problems(self, path: Path) -> Iterator[None]:
        try:
            yield
        except BsamRuntimeError as error:  # names its file
            self.problems.append(f"{error}.")
        except DAMAGED as error:
            reason = str(error) if isinstance(error, BsamError) else f"{type(error).__name__}: {error}"
            self.problems.append(f"{path} cannot be read ({reason}): {DAMAGED_HINT}.")

    def add(self, path: Path) -> None:
        """Add the runs at a path."""
        before = len(self.rows) + len(self.problems) + len(self._measured)
        if not path.exists():
            self.problems.append(f"{path} does not exist.")
        elif path.suffix == ".csv":
            with self._record_problems(path):
                self.rows += _csv_rows(path, self.rows, self.problems)
        elif path.is_file():
            self.problems.append(f"{path} is neither a folder nor a CSV file: give the folder that it is in.")
        else:
            self._add_folder(path)
        if before == len(self.rows) + len(self.problems) + len(self._measured):
            self.problems.append(f"{path} has no runs: give run directories, folders with them, or CSV files.")

    def _add_folder(self, top: Path) -> None:
        def add_problem(error: OSError) -> None:
            self.problems.append(f"{error.filename} cannot be read ({error.strerror}): change its permissions.")

        for name, folders, files in os.walk(top, onerror=add_problem):
            folders.sort()
            folder = Path(name)
            if folder.resolve() in self._visited:
                continue
            self._visited.add(folder.resolve())
            if CONFIG in files:
                folders.clear()
                with self._record_problems(folder):
                    self._add_run_dir(folder)
            elif RESULTS in files:
                with self._record_problems(folder / RESULTS):
                    self._add_entries(folder, read_json(folder / RESULTS, dict, DAMAGED_HINT))
            for file in sorted(folder.glob(FLATNESS_FILES)):
                with self._record_problems(file):
                    self._measured += [(file, entry) for entry in read_json(file, dict, DAMAGED_HINT)["models"]]

    def _add_run_dir(self, path: Path) -> None:
        files = RunDir(path)
        state = files.state()
        identity: Mapping[str, Any] = {}
        with self._record_problems(path):
            identity = files.note("identity", DAMAGED_HINT)
        about = files.about() or _without_plan(state.run)
        metrics = path / METRICS
        found = state.run, about, path, state.epochs, str(state), state.diverged
        self._add(_Source(*found, metrics, identity))

    def _add_entries(self, folder: Path, results: Mapping[str, Any]) -> None:
        """Add the runs in ``results.json`` whose directories are gone."""
        for entry in [*results["runs"], *results.get("tuning", ())]:
            with self._record_problems(folder / RESULTS):
                with reading(folder / RESULTS, DAMAGED_HINT):
                    path = inside(folder, entry["folder"])
                    metrics = None if entry.get("metrics") is None else inside(folder, entry["metrics"])
                if not (path / CONFIG).exists():
                    self._add_entry(path, metrics, entry)

    def _add_entry(self, path: Path, metrics: Path | None, entry: Mapping[str, Any]) -> None:
        """Add a run of ``results.json``; ``metrics`` is the file with its epochs, if it was kept."""
        with self._record_problems(path):
            kept = read_json_lines(metrics, DAMAGED_HINT) if metrics is not None else []
            epochs = kept or ([] if entry["last"] is None else [entry["last"]])
            describe_task(entry["settings"].get("task"), entry.get("task", {}))
            run = stored_run(entry["settings"])
            about = entry.get("about") or _without_plan(run)
            identity = entry.get("identity")
            found = run, about, path, epochs, entry["state"], entry["reason"]
            self._add(_Source(*found, metrics, identity))
            self._measured += [(path.parent / RESULTS, one) for one in entry.get("flatness", ())]

    def add_flatness(self) -> None:
        """Add the measurements to their runs, after all runs; add the runs that were not found."""
        finished = [row for row in self.rows if row["last"]] if self._measured else []
        named = group_by(finished, lambda row: run_dir_name(Run.of(**row["settings"])))
        for file, entry in self._measured:
            with self._record_problems(file):
                self._add_measurement(file, entry, named)

    def _add_measurement(self, file: Path, entry: Mapping[str, Any], named: dict[str, list[dict[str, Any]]]) -> None:
        """Add a measurement to the runs with its settings and its weights.

        Of several measurements, that of the most samples comes first: it is shown.

        Args:
            file: the file with the measurement.
            entry: the measurement.
            named: the runs, by the name that their settings give their directory.
        """
        if "run_dir" not in entry:
            self.problems.append(f"{file}: {entry['file']} is left out, because its run is not known.")
            return
        name = entry["run_dir"]
        largest = largest_eigenvalue(entry)
        samples = _number(entry["samples"], "samples")
        if name not in named and "run" in entry:
            before = len(self.rows)
            run = stored_run(entry["run"])
            path = inside(file.parent, Path(entry["file"]).name)
            self._add(_Source(run, entry.get("about") or _without_plan(run), path, [entry["metrics"]], "done"))
            self._digests[path] = entry["sha256"]
            named[name] = self.rows[before:]  # none if it served to tune others
        runs = named.get(name, [])  # none if it is not finished
        rows = [row for row in runs if self._weights(row["path"]) in (entry["sha256"], None)]
        if runs and not rows:
            reason = f"the weights in {runs[0]['path']} are not those that were measured"
            self.problems.append(f"{file}: {name} is left out, because {reason}: measure it again.")
        for row in rows:
            known = [*(row["flatness"] or ()), entry]
            row["flatness"] = sorted(known, key=lambda one: one["samples"], reverse=True)
            if largest is not None and not samples <= row["eigenvalue_samples"]:
                row["top_eigenvalue"] = largest
                row["eigenvalue_samples"] = samples

    def _weights(self, path: Path) -> str | None:
        """Return the digest of the trained weights in a run directory; None if they are gone."""
        if path not in self._digests:
            file = path / NETWORK
            with reading(file, DAMAGED_HINT):
                self._digests[path] = hashlib.sha256(read_bytes(file)).hexdigest() if file.exists() else None
        return self._digests[path]

    def _add(self, source: _Source) -> None:
        about = {name: source.about.get(name) for name, (_, read) in READERS.items() if read is None}
        for name, value in about.items():
            empty = COLUMNS[name]
            is_right = is_number(value) if isinstance(empty, float) else isinstance(value, type(empty))
            if not is_right and (value is not None or name in ("experiment", "row")):
                raise BsamRuntimeError(
                    f"{source.path} is left out, because {name} in its {ABOUT} is {value!r}: restore {ABOUT}, or "
                    "remove it to describe the run by its settings"
                )
        if not source.about.get("trial"):
            values = {name: about[name] if read is None else read(source) for name, (_, read) in READERS.items()}
            self.rows.append({name: COLUMNS[name] if value is None else value for name, value in values.items()})


def _without_plan(run: Run) -> dict[str, Any]:
    """Describe a run without ``run.json``, such as one that ``fit`` trained without a plan."""
    return describe(run, chosen="", shared=True, trial=run.seed >= TUNING_SEED and run.eval_split != "test")


def _csv_rows(path: Path, rows: Sequence[Mapping[str, Any]], problems: list[str]) -> list[dict[str, Any]]:
    """Return others' results. A method that we also ran gets the name of the file."""
    cells = _csv_cells(path)
    if cells.empty:
        return []
    titles = dict.fromkeys(row["experiment"] for row in rows if row["settings"])
    for title in set(cells["experiment"]) - titles.keys():
        longer = [name for name in titles if title and name.startswith(f"{title}, ")]
        if len(longer) == 1:
            cells["experiment"] = cells["experiment"].replace({title: longer[0]})
        elif longer:
            problems.append(
                f"{path}: {title} is the start of several titles ({'; '.join(longer)}): write one of these."
            )
    numbers = cells[["score", "passes", "radius", "published"]].apply(pd.to_numeric, errors="coerce").astype(float)
    units, reasons = _csv_errors(cells, numbers, {row["experiment"]: row["unit"] for row in rows})
    problems += [f"{path}, line {line} is left out: {text}." for line, text in enumerate(reasons, 2) if text]
    source = (" (" + cells["source"] + ")").where(cells["source"] != "", "")
    table = numbers.assign(experiment=cells["experiment"], row=cells["method"] + source, seed=cells["seed"], unit=units)
    table = table[reasons == ""].astype({"seed": int}).assign(place=CSV_PLACE, name=path.name, path=path)
    taken = {(row["experiment"], row["row"]) for row in rows}
    is_taken = [key in taken for key in zip(table["experiment"], table["row"], strict=True)]
    table.loc[is_taken, "row"] += f" ({path.stem})"
    return [{**COLUMNS, **row} for row in table.to_dict("records")]


def _csv_cells(path: Path) -> pd.DataFrame:
    """Return the cells of a CSV file as text, with all columns; raise if the header is wrong."""
    try:
        cells = pd.read_csv(path, dtype=str, keep_default_na=False, encoding="utf-8-sig", skipinitialspace=True)
    except (OSError, ValueError) as error:
        raise BsamValueError(f"{error}. Save it as CSV in UTF-8") from error
    if not isinstance(cells.index, pd.RangeIndex):
        raise BsamValueError("a line has more fields than the header: put names with commas in quotes")
    cells.columns = cells.columns.str.strip()
    wrong = [name for name in cells.columns if name not in REQUIRED + OPTIONAL]
    if wrong := wrong or [name for name in REQUIRED if name not in cells.columns]:
        raise BsamValueError(
            f"the column {wrong[0]!r} is wrong or missing: it needs {', '.join(REQUIRED)} and may have "
            f"{', '.join(OPTIONAL)}, each once"
        )
    cells = cells.fillna("").reindex(columns=[*REQUIRED, *OPTIONAL], fill_value="")
    return cells.apply(lambda column: column.str.strip())


def _csv_errors(cells: pd.DataFrame, numbers: pd.DataFrame, known: Mapping[str, str]) -> tuple[pd.Series, Any]:
    """Return the unit of each line, given those of experiments, and what is wrong with the line; empty if nothing."""
    quoted = cells.map(repr)
    checks = [(cells[name] == "", f"its {name} is empty") for name in REQUIRED]
    checks.append((~cells["seed"].str.isdecimal(), "its seed must be a whole number from 0, got " + quoted["seed"]))
    for name in numbers:
        is_wrong = (cells[name] != "") & ~np.isfinite(numbers[name])
        checks.append((is_wrong, f"its {name} must be a finite number, got " + quoted[name]))
    first = cells[~np.any([mask for mask, _ in checks], axis=0)].drop_duplicates("experiment")
    units = {**dict(zip(first["experiment"], first["unit"].replace("", "score"), strict=True)), **known}
    expected = pd.Series([units.get(name, "") for name in cells["experiment"]])
    other = "its unit is " + quoted["unit"] + ", but that of " + cells["experiment"] + " is " + expected.map(repr)
    checks.append(((cells["unit"] != "") & (cells["unit"] != expected), other))
    return expected, np.select([mask for mask, _ in checks], [text for _, text in checks], "")


def _without_unasked(table: pd.DataFrame) -> pd.DataFrame:
    """Leave out rows in which no run has started: ``results.json`` lists all runs of a recipe."""
    has_begun = (table["state"] != "not started").groupby([table["experiment"], table["row"]]).transform("any")
    return table[has_begun | table["path"].map(lambda path: path is not None and path.exists())]


def _without_copies(table: pd.DataFrame, problems: list[str]) -> pd.DataFrame:
    """Keep one run for each seed of a row: the one that has come furthest, then the one with the most data."""
    keys = ["experiment", "row", "seed"]
    data = table[["flatness", "metrics"]].notna().sum(axis=1)
    rank = table.assign(state=table["state"].map(STATES.index), epochs_done=-table["epochs_done"], data=-data)
    kept = rank.sort_values(["state", "epochs_done", "data"], kind="stable").drop_duplicates(keys).index
    best = table.loc[kept].set_index(keys)
    for run in table.drop(kept).itertuples():
        other = best.loc[(run.experiment, run.row, run.seed)]
        is_copy = run.last == other["last"] and (run.last is not None or run.score == other["score"])
        if run.state != "not started" and not is_copy:
            problems.append(
                f"{run.path} is left out: {other['path']} is also seed {run.seed} of {run.row} ({run.experiment})."
            )
    return table.loc[sorted(kept)]
