"""Read finished and unfinished runs from run directories, folders of results and CSV files."""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from ..recipes.variants import passes_of, variants
from ..tasks import TASKS
from ..training.result import LossSurface
from .record_sources import Source, Sources
from .record_titles import (
    candidate_key,
    experiment_key,
    experiment_titles,
    is_trial,
    published_for,
    radius_choice,
    row_titles,
    total_radius,
    tuned_settings,
)
from .tables import score_title

NOT_STARTED = "not started"


@dataclass(frozen=True)
class Record:
    """One run. Records of equal ``experiment`` can be compared; records of equal ``method`` are seeds of one row.

    Args:
        name: the name of its folder or file.
        folder: the run directory, the folder of results or the folder of the CSV file.
        experiment: what must be equal to compare runs, in words.
        method: the row of the table.
        seed: the seed.
        state: ``"finished"``, ``"diverged"`` or ``"unfinished"``.
        reason: why it diverged, or how far an unfinished run is.
        score: the score after the last epoch in the unit of the table; None unless finished.
        unit: the unit of the score.
        higher_is_better: whether a higher score is better.
        epochs: the metrics of each epoch.
        passes: the forward and backward passes per step.
        seconds: the median seconds per epoch; None if unknown or if runs shared the GPU.
        radius: the total radius: rho, or rho_max + rho_min.
        chosen: how the radius was chosen.
        published: the published number.
        settings: all settings of the run.
        probe: the probe's readings.
        top_eigenvalue: the largest eigenvalue of the Hessian after the last epoch.
        surface: the loss surface after the last epoch.
        flatness: the network's entry in a ``flatness.json``.
        predictions: the file with the network's outputs.
    """

    name: str
    folder: Path
    experiment: str
    method: str
    seed: int
    state: str
    reason: str | None
    score: float | None
    unit: str
    higher_is_better: bool
    epochs: tuple[Mapping[str, Any], ...] = ()
    passes: float | None = None
    seconds: float | None = None
    radius: float | None = None
    chosen: str = ""
    published: float | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    probe: tuple[Mapping[str, Any], ...] = ()
    top_eigenvalue: float | None = None
    surface: LossSurface | None = None
    flatness: Mapping[str, Any] | None = None
    predictions: Path | None = None


@dataclass(frozen=True)
class Records:
    """Runs, and a sentence about each folder, file or row that could not be read."""

    runs: tuple[Record, ...]
    problems: tuple[str, ...]


def read_records(paths: Sequence[Path]) -> Records:
    """Return the runs in run directories, folders and CSV files; each broken one adds a problem.

    Args:
        paths: run directories, folders with run directories at any depth, folders with ``runs.json`` or
            ``results.json`` (as in ``results/``), and CSV files with others' results: see :func:`read_csv`. Runs that
            only served to tune others are left out.
    """
    sources, problems = Sources(), []
    for path in paths:
        if not path.exists():
            problems.append(f"{path} does not exist.")
        elif path.is_file() and path.suffix != ".csv":
            problems.append(f"{path} is neither a folder nor a CSV file: give the folder that it is in.")
    sources.add([path for path in paths if path.is_dir()])
    ours, more = _records(sources.runs)
    theirs = [row for path in paths if path.suffix == ".csv" and path.is_file() for row in read_csv(path, problems)]
    records = [*ours, *(_beside(row, ours) for row in theirs)]
    problems = [*sources.problems, *more, *problems]
    return Records(tuple(_without_duplicates(records, problems)), tuple(problems))


def _records(sources: Sequence[Source]) -> tuple[list[Record], list[str]]:
    """Return the records of runs, by experiment, row and seed, and a sentence about each run without a score."""
    trials = [source for source in sources if is_trial(source.run)]
    names = {source.folder: tuned_settings([t.run for t in trials if t.folder == source.folder]) for source in sources}
    chosen = {(trial.folder, candidate_key(trial.run, names[trial.folder])) for trial in trials}
    groups: dict[str, list[Source]] = {}
    for source in sources:
        if not is_trial(source.run):
            groups.setdefault(experiment_key(source.run, names[source.folder]), []).append(source)
    titles = experiment_titles({key: group[0].run for key, group in groups.items()})
    alone = _trained_alone(sources)
    records, problems = [], []
    for key, group in groups.items():
        tuned = [(source.folder, candidate_key(source.run, names[source.folder])) in chosen for source in group]
        varied = sorted({name for source in group for name in names[source.folder]})
        rows = row_titles([source.run for source in group], tuned, varied)
        begun = {row for row, source in zip(rows, group, strict=True) if source.epochs or source.diverged is not None}
        found = []
        for source, row, was_tuned in zip(group, rows, tuned, strict=True):
            if row not in begun:  # results.json lists all runs of a recipe, even those that nobody asked for
                continue
            try:
                found.append(_record(source, titles[key], row, was_tuned, alone))
            except (KeyError, TypeError) as error:
                problems.append(f"{source.path} is left out: bsam report finds no {error} in its task or last epoch.")
        records += sorted(found, key=_place)
    return records, problems


def _record(source: Source, experiment: str, row: str, tuned: bool, alone: Collection[Path]) -> Record:
    run = source.run
    measure = TASKS[run.task].measure
    state, reason, score = "unfinished", f"epoch {len(source.epochs)} of {run.epochs}", None
    if source.last is not None:
        state, reason, score = "finished", None, float(measure.shown(source.last, run.eval_split))
    elif source.diverged is not None:
        state, reason = "diverged", source.diverged
    elif not source.epochs:
        reason = NOT_STARTED
    return Record(
        name=source.path.name.removesuffix(".jsonl"),
        folder=source.path if source.path.is_dir() else source.folder,
        experiment=experiment,
        method=row,
        seed=run.seed,
        state=state,
        reason=reason,
        score=score,
        unit=score_title(run),
        higher_is_better=True,
        epochs=source.epochs,
        passes=passes_of(run),
        seconds=statistics.median(epoch["seconds"] for epoch in source.epochs) if source.path in alone else None,
        radius=total_radius(run),
        chosen=radius_choice(run, tuned),
        published=published_for(run, tuned),
        settings=run.settings(),
        probe=source.probe,
        top_eigenvalue=source.top_eigenvalue,
        surface=source.surface,
        flatness=source.flatness,
        predictions=source.predictions,
    )


def _place(record: Record) -> tuple[int, float, str, int]:
    """Return the position of a run in its experiment: rows in the order of tables, then by radius."""
    titles = [variant.title for variant in variants().values()]
    title = record.method.partition(", ")[0]
    return titles.index(title) if title in titles else -1, record.radius or 0.0, record.method, record.seed


def _trained_alone(sources: Sequence[Source]) -> set[Path]:
    """Return the runs that shared no machine with another one of these while they trained, as far as dates tell."""
    spans = []
    for source in sources:
        if source.epochs and source.machines:
            dates = [datetime.fromisoformat(machine["date"]) for machine in source.machines]
            end = max(dates) + timedelta(seconds=sum(epoch["seconds"] for epoch in source.epochs))
            spans.append((min(dates), end, {machine.get("device") for machine in source.machines}, source.path))
    return {
        path
        for start, end, devices, path in spans
        if not any(
            other != path and start < their_end and their_start < end and devices & theirs
            for their_start, their_end, theirs, other in spans
        )
    }


def _beside(row: Record, ours: Sequence[Record]) -> Record:
    """Return a row of a CSV file with the unit of its experiment, and named by its file if we have a row like it."""
    same = [record for record in ours if record.experiment == row.experiment]
    unit = row.unit or (same[0].unit if same else "score")
    clash = any(record.method == row.method for record in same)
    return replace(row, unit=unit, method=f"{row.method} ({row.folder.name})" if clash else row.method)


def _without_duplicates(records: Sequence[Record], problems: list[str]) -> list[Record]:
    """Return one record for each seed of a row: a finished one if there is one, otherwise the first."""
    best: dict[tuple[str, str, int], Record] = {}
    for record in records:
        key = record.experiment, record.method, record.seed
        other = best.setdefault(key, record)
        if other is record:
            continue
        kept, dropped = (record, other) if _progress(record) > _progress(other) else (other, record)
        best[key] = kept
        if dropped.reason != NOT_STARTED:
            problems.append(
                f"{dropped.folder}: {dropped.name} is left out, because {kept.name} in {kept.folder} is also seed "
                f"{kept.seed} of {kept.method} ({kept.experiment})."
            )
    return list(best.values())


def _progress(record: Record) -> tuple[bool, bool, int]:
    return record.state == "finished", record.state == "diverged", len(record.epochs)


NUMBERS = ("passes", "radius", "published")
REQUIRED = ("experiment", "method", "seed", "score")
OPTIONAL = ("unit", *NUMBERS, "source")


def read_csv(path: Path, problems: list[str]) -> Iterator[Record]:
    """Return others' results from a CSV file with a header and a row for each method and seed.

    Args:
        path: the file. Its columns ``experiment``, ``method``, ``seed`` and ``score`` are required; ``unit``,
            ``passes``, ``radius``, ``published`` and ``source`` are optional, and so are their values.
        problems: gets a sentence about the file if its columns are wrong, and about each row that cannot be used.
    """
    try:
        rows = list(csv.reader(path.read_text(encoding="utf-8-sig").splitlines(), strict=True))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        problems.append(f"{path} cannot be read ({error}): save it as CSV in UTF-8.")
        return
    header = [name.strip() for name in rows[0]] if rows else []
    wrong = [name for name in header if name not in REQUIRED + OPTIONAL or header.count(name) > 1]
    wrong = wrong or [name for name in REQUIRED if name not in header]
    if wrong:
        problems.append(
            f"{path} has a wrong or missing column {wrong[0]!r}: it needs {', '.join(REQUIRED)} and may have "
            f"{', '.join(OPTIONAL)}, each once."
        )
        return
    for line, cells in enumerate(rows[1:], 2):
        if not any(cells):
            continue
        try:
            yield _csv_record(path, dict(zip(header, (cell.strip() for cell in cells), strict=True)))
        except ValueError as error:
            problems.append(f"{path}, line {line} is left out: {error}.")


def _csv_record(path: Path, cells: Mapping[str, str]) -> Record:
    for name in ("experiment", "method"):
        if not cells[name]:
            raise ValueError(f"its {name} is empty")
    if not cells["seed"].isdecimal():
        raise ValueError(f"its seed must be a whole number from 0, got {cells['seed']!r}")
    numbers: dict[str, float | None] = {}
    for name in ("score", *NUMBERS):
        text = cells.get(name, "")
        try:
            numbers[name] = float(text) if text or name == "score" else None
        except ValueError:
            raise ValueError(f"its {name} must be a number, got {text!r}") from None
        if not math.isfinite(numbers[name] or 0):
            raise ValueError(f"its {name} must be a finite number, got {text!r}")
    source = cells.get("source")
    return Record(
        name=path.name,
        folder=path,
        experiment=cells["experiment"],
        method=f"{cells['method']} ({source})" if source else cells["method"],
        seed=int(cells["seed"]),
        state="finished",
        reason=None,
        unit=cells.get("unit", ""),
        higher_is_better=True,
        **numbers,
    )
