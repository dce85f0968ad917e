"""Read finished and unfinished runs from run directories, folders of results and CSV files."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from ...common.checks import is_number
from ...common.errors import BsamError, BsamValueError
from ..common.grouping import group_by
from ..recipes.variants import passes_of, variants
from ..tasks import task_class
from ..training.config import BASE
from ..training.run_dir import RunDir
from .experiment_titles import candidate_key, experiment_key, experiment_titles, is_trial, row_titles, tuned_settings
from .outcome import failure, score_title
from .paper_numbers import published_for, radius_choice, total_radius
from .run_record import Record, Records, StoredNumbers, read_csv
from .run_sources import Source, Sources

NOT_STARTED = "not started"


def check_paths(paths: Iterable[Path]) -> None:
    """Raise unless all paths exist."""
    for path in paths:
        if not path.exists():
            raise BsamValueError(f"{path} does not exist: pass run directories, folders of them, or CSV files")


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
    records = list(ours)
    for path in paths:
        if path.is_file() and path.suffix == ".csv":
            records += _with_our_titles(list(read_csv(path, problems)), ours, problems)
    problems = [*sources.problems, *more, *problems]
    return Records(tuple(_without_duplicates(records, problems)), tuple(problems))


def _records(sources: Sequence[Source]) -> tuple[list[Record], list[str]]:
    """Return the records of runs, by experiment, row and seed, and a problem for each run that is left out."""
    trials = [source for source in sources if is_trial(source.run)]
    folders = {source.folder for source in sources}
    names = {folder: tuned_settings([trial.run for trial in trials if trial.folder == folder]) for folder in folders}

    def candidate(source: Source) -> str:
        return candidate_key(source.run, names[source.folder])

    splits = {(trial.folder, candidate(trial)): trial.run.eval_split for trial in trials}

    def tuning_split(source: Source) -> str | None:
        """Return the split that the settings of a run were tuned on."""
        # base has no radius: if nothing else is tuned, its trials only provide the float networks for the other trials
        if source.run.method == BASE and not names[source.folder]:
            return None
        return splits.get((source.folder, candidate(source)))

    finals = [source for source in sources if not is_trial(source.run)]
    groups = group_by(finals, lambda source: experiment_key(source.run, names[source.folder]))
    titles = experiment_titles({key: (group[0].run, group[0].wrong_labels) for key, group in groups.items()})
    alone = _trained_alone(sources)
    records, problems = [], []
    for key, listed in groups.items():
        # results.json lists all runs of a recipe, even methods that nobody asked for
        begun = {candidate(s) for s in listed if s.epochs or s.diverged is not None or s.path.exists()}
        group = [source for source in listed if candidate(source) in begun]
        tuned_on = [tuning_split(source) for source in group]
        varied = sorted({name for source in group for name in names[source.folder]})
        rows = row_titles([source.run for source in group], [split is not None for split in tuned_on], varied)
        in_experiment = []
        for source, row, split in zip(group, rows, tuned_on, strict=True):
            chosen = source.chosen or radius_choice(source.run, split, names[source.folder])
            try:
                record = _record(source, titles[key], row, split is not None, alone)
                in_experiment.append(replace(record, chosen=chosen))
            except BsamError as error:
                problems.append(f"{source.path} is left out: {error}.")
        records += sorted(in_experiment, key=_sort_key)
    return records, problems


def _record(source: Source, experiment: str, row: str, tuned: bool, alone: Collection[Path]) -> Record:
    run = source.run
    measure = task_class(run.task).measure
    state, score = "unfinished", None
    reason: str | None = f"epoch {len(source.epochs)} of {run.epochs}"
    if source.last is not None:
        if not is_number(source.last.get(metric := measure.metric(run.eval_split))):
            raise BsamValueError(f"{metric} of its last epoch must be a number, got {source.last.get(metric)!r}")
        state, reason = "finished", None
        score = measure.shown(source.last, run.eval_split)
    elif source.diverged is not None:
        state, reason = "diverged", source.diverged
    elif not source.epochs:
        reason = NOT_STARTED
    stored: Any = {field.name: getattr(source, field.name) for field in fields(StoredNumbers)}
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
        passes=passes_of(run),
        seconds=statistics.median(epoch["seconds"] for epoch in source.epochs) if source.path in alone else None,
        radius=total_radius(run),
        tuned=tuned,
        failure=_failure(source),
        published=published_for(run, tuned),
        settings=run.settings(),
        **stored,
    )


def _failure(source: Source) -> str | None:
    if source.last is None:
        return None
    try:
        return failure(source.run, RunDir(source.path), source.epochs)
    except BsamError:  # a data set that this version does not have, or a damaged note
        return None


def _sort_key(record: Record) -> tuple[int, float, str, int]:
    """Return the position of a run in its experiment: rows in the order of tables, then by radius."""
    titles = [variant.title for variant in variants().values()]
    title = record.method.partition(", ")[0]
    return titles.index(title) if title in titles else -1, record.radius or 0.0, record.method, record.seed


def _trained_alone(sources: Sequence[Source]) -> set[Path]:
    """Return the runs that certainly shared no device with any other of these runs during training."""
    spans = [(source.path, source.span) for source in sources if source.span is not None]
    return {path for path, span in spans if not any(path != other and span.overlaps(their) for other, their in spans)}


def _with_our_titles(rows: Sequence[Record], ours: Sequence[Record], problems: list[str]) -> list[Record]:
    """Return the rows of a CSV file with our titles and units, adding the file name to methods that we also ran.

    Our titles may be longer than those in the file, because we add settings to tell equal titles apart.
    """
    units = {record.experiment: record.unit for record in ours}
    taken = {(record.experiment, record.method) for record in ours}
    titles = {row.experiment: row.experiment for row in rows}
    for title in titles:
        longer = [] if title in units else [name for name in units if name.startswith(f"{title}, ")]
        if len(longer) == 1:
            titles[title] = longer[0]
        elif longer:
            file, listed = rows[0].folder, "; ".join(longer)
            problems.append(f"{file}: the title {title} fits several experiments ({listed}): write one of these.")
    records = []
    for given in rows:
        row = replace(given, experiment=titles[given.experiment])
        unit = units.setdefault(row.experiment, row.unit or "score")
        if row.unit not in ("", unit):
            problems.append(
                f"{row.folder}: {row.method}, seed {row.seed} is left out, because its unit is {row.unit!r} and "
                f"that of {row.experiment} is {unit!r}."
            )
            continue
        clash = (row.experiment, row.method) in taken
        records.append(replace(row, unit=unit, method=f"{row.method} ({row.folder.stem})" if clash else row.method))
    return records


def _without_duplicates(records: Sequence[Record], problems: list[str]) -> list[Record]:
    """Return one record for each seed of a row, preferably a finished one, then the one with the most data."""
    best: dict[tuple[str, str, int], Record] = {}
    for record in records:
        key = record.experiment, record.method, record.seed
        if key not in best:
            best[key] = record
            continue
        dropped, best[key] = sorted((record, best[key]), key=_progress)  # the earlier one wins if they are equal
        if dropped.reason != NOT_STARTED:
            problems.append(
                f"{_where(dropped)} is left out: {_where(best[key])} is also seed {record.seed} of {record.method} "
                f"({record.experiment})."
            )
    return list(best.values())


def _progress(record: Record) -> tuple[bool, bool, int, int]:
    curvature = sum(data is not None for data in (record.top_eigenvalue, record.surface, record.flatness))
    return record.state == "finished", record.state == "diverged", len(record.epochs), curvature


def _where(record: Record) -> Path:
    return record.folder if record.folder.name == record.name else record.folder / record.name
