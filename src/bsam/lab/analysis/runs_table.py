"""Runs as one table: run directories, folders of results, and CSV files with others' results."""

from __future__ import annotations

import contextlib
import math
import os
import statistics
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from ...common.checks import is_number
from ...common.errors import BsamError, BsamRuntimeError, BsamValueError
from ..recipes.planning import describe
from ..tasks import task_class
from ..training.config import Run, stored_run
from ..training.files import read_json, read_json_lines
from ..training.run_dir import ABOUT, CONFIG, CURVATURE, METRICS, RunDir
from .outcome import failure, score_title

RESULTS = "results.json"
FLATNESS = "flatness*.json"
HINT = "restore or remove it"
NO_NUMBER = float("nan")
# The columns, with the values of a run that does not have them; the guide lists them.
COLUMNS: Mapping[str, Any] = {
    "experiment": "",
    "row": "",
    "seed": 0,
    "state": "finished",
    "reason": "",
    "score": NO_NUMBER,
    "unit": "",
    "epochs_done": 0,
    "epochs": 0,
    "section": "",
    "column": "",
    "place": 0,
    "variant": "",
    "method": "",
    "model": "",
    "data": "",
    "radius": NO_NUMBER,
    "passes": NO_NUMBER,
    "seconds": NO_NUMBER,
    "chosen": "",
    "tuned": False,
    "published": NO_NUMBER,
    "claimed": NO_NUMBER,
    "note": "",
    "failure": "",
    "memorised": NO_NUMBER,
    "top_eigenvalue": NO_NUMBER,
    "settings": None,
    "last": None,
    "metrics": None,
    "flatness": None,
    "name": "",
    "path": None,
}
REQUIRED = ("experiment", "method", "seed", "score")  # columns of a CSV file
OPTIONAL = ("unit", "passes", "radius", "published", "source")
LAST = 10_000  # the place of a CSV file's rows
STATES = ("finished", "diverged", "unfinished", "not started")  # the first of these is kept of two copies
DAMAGED = (BsamError, LookupError, TypeError, ValueError, AttributeError, OverflowError, OSError)


def read_runs(paths: str | Path | Iterable[str | Path], problems: list[str] | None = None) -> pd.DataFrame:
    """Return a table with a row for each run. Runs that only served to tune others are left out.

    Args:
        paths: run directories, folders with run directories at any depth, folders with a ``results.json``, and CSV
            files with the columns experiment, method, seed and score.
        problems: gets a sentence about everything that cannot be read; None makes each a warning.

    """
    folders = [Path(path) for path in ([paths] if isinstance(paths, str | Path) else paths)]
    reader = _Reader()
    for path in folders:
        reader.add(path)
    table = pd.DataFrame(reader.rows, columns=list(COLUMNS))
    table = _without_copies(_without_unasked(table), reader.problems)
    first = {title: number for number, title in enumerate(dict.fromkeys(table["experiment"]))}
    keys = table.assign(experiment=table["experiment"].map(first), radius=table["radius"].fillna(0.0))
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
            lines = read_json_lines(run.metrics, HINT)
        key = {"run": run.Index, "experiment": run.experiment, "row": run.row, "seed": run.seed, "state": run.state}
        rows += [{**key, **metrics} for metrics in lines]
    return pd.DataFrame(rows) if rows else pd.DataFrame(columns=["run", "experiment", "row", "seed", "state", "epoch"])


class _Reader:
    """The rows of the table so far, and a sentence about everything that could not be read."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.problems: list[str] = []
        self._visited: set[Path] = set()

    @contextlib.contextmanager
    def _record_problems(self, path: Path) -> Iterator[None]:
        try:
            yield
        except BsamRuntimeError as error:  # names its file
            self.problems.append(f"{error}.")
        except DAMAGED as error:
            reason = str(error) if isinstance(error, BsamError) else f"{type(error).__name__}: {error}"
            self.problems.append(f"{path} cannot be read ({reason}): {HINT}.")

    def add(self, path: Path) -> None:
        """Add the runs at a path."""
        before = len(self.rows) + len(self.problems)
        if not path.exists():
            self.problems.append(f"{path} does not exist.")
        elif path.suffix == ".csv":
            with self._record_problems(path):
                self.rows += _csv_rows(path, self.rows, self.problems)
        elif path.is_file():
            self.problems.append(f"{path} is neither a folder nor a CSV file: give the folder that it is in.")
        else:
            self._add_folder(path)
        if before == len(self.rows) + len(self.problems):
            self.problems.append(f"{path} has no runs: give run directories, folders with them, or CSV files.")

    def _add_folder(self, top: Path) -> None:
        measured: list[tuple[Path, Mapping[str, Any]]] = []

        def unreadable(error: OSError) -> None:
            self.problems.append(f"{error.filename} cannot be read ({error.strerror}): change its permissions.")

        for name, folders, files in os.walk(top, onerror=unreadable):
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
                    self._add_entries(folder, read_json(folder / RESULTS, dict, HINT))
            for file in sorted(folder.glob(FLATNESS)):
                with self._record_problems(file):
                    measured += [(file, entry) for entry in read_json(file, dict, HINT)["models"]]
        for file, entry in measured:
            with self._record_problems(file):
                self._add_flatness(file, entry)

    def _add_run_dir(self, path: Path) -> None:
        files = RunDir(path)
        state = files.state(files.run())
        eigenvalue = None
        with self._record_problems(path / CURVATURE):
            eigenvalue = files.top_eigenvalue()
        name = "finished" if state.finished else "diverged" if state.diverged is not None else "unfinished"
        self._add_run(
            state.run,
            files.about(),
            state=name,
            reason=state.diverged or "",
            epochs=list(state.epochs),
            top_eigenvalue=eigenvalue,
            metrics=path / METRICS,
            path=path,
        )

    def _add_entries(self, folder: Path, results: Mapping[str, Any]) -> None:
        """Add the runs in ``results.json`` whose directories are gone."""
        for entry in [*results["runs"], *results.get("tuning", ())]:
            path = folder / entry["folder"]
            if (path / CONFIG).exists():
                continue
            with self._record_problems(path):
                metrics = None if entry.get("metrics") is None else folder / entry["metrics"]
                kept = read_json_lines(metrics, HINT) if metrics is not None else []
                epochs = kept or ([] if entry["last"] is None else [entry["last"]])
                state = {"done": "finished", "diverged": "diverged"}.get(entry["state"], "unfinished")
                self._add_run(
                    stored_run(entry["settings"]),
                    entry.get("about"),
                    state=state,
                    reason=entry["reason"] or "",
                    epochs=epochs,
                    top_eigenvalue=entry.get("top_eigenvalue"),
                    metrics=metrics,
                    path=path,
                )

    def _add_flatness(self, file: Path, entry: Mapping[str, Any]) -> None:
        """Add the flatness of a network to its run; add the run if it was not found."""
        if "run" not in entry:
            self.problems.append(f"{file}: {entry['file']} is left out, because its run is not known.")
            return
        found = [row for row in self.rows if row["last"] == entry["metrics"]]
        if not found:
            path = file.parent / Path(entry["file"]).name
            self._add_run(stored_run(entry["run"]), entry.get("about"), epochs=[entry["metrics"]], path=path)
            found = self.rows[-1:]
        for row in found:
            row["flatness"] = entry

    def _add_run(
        self,
        run: Run,
        about: Mapping[str, Any] | None,
        *,
        path: Path,
        epochs: Sequence[Mapping[str, Any]],
        state: str = "finished",
        reason: str = "",
        top_eigenvalue: float | None = None,
        metrics: Path | None = None,
    ) -> None:
        if about is None:  # an older version, or fit without a plan
            about = describe(run, chosen="", shared=True)
        if not isinstance(about.get("experiment"), str) or not isinstance(about.get("row"), str):
            raise BsamValueError(f"{ABOUT} must have an experiment and a row: remove {ABOUT}, not the run")
        if about.get("trial"):
            return
        if not all(is_number(epoch.get("seconds")) for epoch in epochs):
            raise BsamValueError("each epoch must have its seconds")
        if top_eigenvalue is not None and not is_number(top_eigenvalue):
            raise BsamValueError(f"top_eigenvalue must be a number or null, got {top_eigenvalue!r}")
        last = None
        score = NO_NUMBER
        sentence = None
        if state == "finished":
            last = epochs[-1]
            measure = task_class(run.task.name).measure
            if not is_number(last.get(metric := measure.metric(run.eval_split))):
                raise BsamValueError(f"{metric} of its last epoch must be a number, got {last.get(metric)!r}")
            score = measure.shown(last, run.eval_split)
            with contextlib.suppress(BsamError):  # a data set that this version does not have, or a damaged note
                sentence = failure(run, RunDir(path), epochs)
        elif state == "unfinished":
            state = "unfinished" if epochs else "not started"
            reason = f"epoch {len(epochs)} of {run.epochs}" if epochs else ""
        seconds = [epoch["seconds"] for epoch in epochs]
        known = {name: NO_NUMBER if value is None else value for name, value in about.items() if name in COLUMNS}
        self.rows.append(
            {
                **COLUMNS,
                **known,
                "seed": run.seed,
                "state": state,
                "reason": reason,
                "score": score,
                "unit": score_title(run),
                "epochs_done": run.epochs if state == "finished" else len(epochs),
                "epochs": run.epochs,
                "method": run.method,
                "model": run.model,
                "data": run.data,
                "seconds": NO_NUMBER if about.get("shared", True) or not seconds else statistics.median(seconds),
                "failure": sentence or "",
                "memorised": NO_NUMBER if last is None else 100 * last.get("memorised", NO_NUMBER),
                "top_eigenvalue": NO_NUMBER if top_eigenvalue is None else top_eigenvalue,
                "settings": run.settings(),
                "last": last,
                "metrics": metrics,
                "name": path.name,
                "path": path,
            }
        )


def _csv_rows(path: Path, ours: Sequence[Mapping[str, Any]], problems: list[str]) -> list[dict[str, Any]]:
    """Return others' results. A method that we also ran gets the name of the file."""
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
    taken = {(row["experiment"], row["row"]) for row in ours}
    units = {row["experiment"]: row["unit"] for row in ours}
    rows = []
    for line, given in enumerate(cells.to_dict("records"), 2):
        values = {name: text.strip() for name, text in given.items() if text.strip()}
        try:
            row = _csv_row(values)
        except BsamValueError as error:
            problems.append(f"{path}, line {line} is left out: {error}.")
            continue
        row["unit"] = row["unit"] or units.get(row["experiment"], "score")
        if row["unit"] != units.setdefault(row["experiment"], row["unit"]):
            problems.append(
                f"{path}, line {line} is left out: its unit is {row['unit']!r}, but that of {row['experiment']} is "
                f"{units[row['experiment']]!r}."
            )
            continue
        if (row["experiment"], row["row"]) in taken:
            row["row"] = f"{row['row']} ({path.stem})"
        rows.append({**row, "name": path.name, "path": path})
    return rows


def _csv_row(values: Mapping[str, str]) -> dict[str, Any]:
    if missing := [name for name in REQUIRED if name not in values]:
        raise BsamValueError(f"its {missing[0]} is empty")
    if not values["seed"].isdecimal():
        raise BsamValueError(f"its seed must be a whole number from 0, got {values['seed']!r}")
    numbers = {}
    for name in {"score", "passes", "radius", "published"} & values.keys():
        numbers[name] = float(pd.to_numeric(values[name], errors="coerce"))
        if not math.isfinite(numbers[name]):
            raise BsamValueError(f"its {name} must be a finite number, got {values[name]!r}")
    source = f" ({values['source']})" if "source" in values else ""
    names = {"experiment": values["experiment"], "row": values["method"] + source, "seed": int(values["seed"])}
    return {**COLUMNS, **names, **numbers, "unit": values.get("unit", ""), "place": LAST}


def _without_unasked(table: pd.DataFrame) -> pd.DataFrame:
    """Leave out rows in which no run has started: ``results.json`` lists all runs of a recipe."""
    has_begun = (table["state"] != "not started").groupby([table["experiment"], table["row"]]).transform("any")
    return table[has_begun | table["path"].map(lambda path: path is not None and path.exists())]


def _without_copies(table: pd.DataFrame, problems: list[str]) -> pd.DataFrame:
    """Keep one run for each seed of a row: the one that has come furthest, then the one with the most data."""
    keys = ["experiment", "row", "seed"]
    data = table[["top_eigenvalue", "flatness", "metrics"]].notna().sum(axis=1)
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
