"""The files of a study: its table, the last numbers of every run with its machine and date, and its page."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from ...common.errors import BsamError, BsamRuntimeError
from ..analysis.outcome import comparison_advice, score_title
from ..analysis.runs_table import COLUMNS, DAMAGED, RESULTS, read_epochs, read_runs
from ..analysis.sentences import ComparisonResult, comparison, sentence
from ..analysis.significance import compare_rows
from ..common.files import locked, read_json, write, write_json
from ..config import Run, default_settings, to_json_value
from ..data import dataset_entry
from ..models import model_entry
from ..paper import check_table, join
from ..recipes.compare import COMPARE
from ..recipes.plan import Plan
from ..recipes.study import Decision, Snapshot, Study, base_sentence
from ..tasks import task_of
from ..training.run_dir import ABOUT, CONFIG, RunDir, RunState
from .page.page import write_page
from .recipe_table import ENDED, caption, cells_of, markdown, tables_of
from .table import Table
from .tuning_section import tuning_tables

SPLIT_WORDS = {"train": "training"}  # for the names of splits
TABLE = "table.md"
PAGE = "report.html"
UNREADABLE = "unreadable"  # the state of a run with a damaged file
TUNING_FLAGS = {"tuned": "--tune", "tuned_base": "--tune-base"}  # entries of results.json, and the flags that set them
# notes of a run with their keys: the split of its image files, its initial weights, and the digests of what it was
# trained on
NOTE_KEYS = {"data": ("split", "images"), "weights": ("source", "sha256"), "identity": ("data",), "task": ("score",)}


@dataclass(frozen=True)
class StudyResult:
    """The results of a study.

    Args:
        states: the states of the final runs.
        tables: the tables of the recipe, and those of tuning.
        notes: the lines below the tables.
        files: the files written.
        page: the page; None if no run has started.
        comparison: the methods compared with the baseline; None without a baseline.
        unreadable: why directories of runs could not be read, by name.
        failure: the error that says which runs failed or diverged; None if there are none.
    """

    states: Sequence[RunState]
    tables: Sequence[Table]
    notes: Sequence[str]
    files: Sequence[Path]
    page: Path | None
    comparison: ComparisonResult | None
    unreadable: Mapping[str, str]
    failure: Exception | None = None


def check_folder(out: Path, study: Study) -> None:
    """Raise if the folder holds results of another recipe, or with other settings or another tuning, or if the recipe
    shows a table of published numbers that does not exist.
    """
    check_table(study.published)
    file = out / RESULTS
    ours = _kind(study)
    if not file.exists():
        return
    stored = read_json(file, dict, "choose another folder")
    stored = dict.fromkeys(TUNING_FLAGS, False) | stored
    names = [name for name in (*TUNING_FLAGS, "scale") if stored.get(name, ours[name]) != ours[name]]
    settings = _different_settings(stored, study) if stored.get("recipe") == ours["recipe"] else []
    if stored.get("recipe") != ours["recipe"] or names or settings:
        scale = f" at the scale {stored['scale']}" if "scale" in names else ""
        flags = "".join(f", with {flag}" for name, flag in TUNING_FLAGS.items() if stored[name])
        there = "".join(f"; {text}" for text in settings)
        raise BsamRuntimeError(
            f"{file} holds other results ({stored.get('recipe')}{scale}{flags}{there}): choose another folder"
        )


def _different_settings(stored: Mapping[str, Any], study: Study) -> list[str]:
    """Return the settings that all runs share and that differ, in words; older versions did not store them."""
    ours = _kind(study)
    usual = default_settings(type(study.plans[0].run.task))
    before = stored.get("settings", ours["settings"])
    now = ours["settings"]
    texts = []
    for name in {**before, **now}:
        there = before.get(name, usual.get(name))
        here = now.get(name, usual.get(name))
        if there != here:
            texts.append(f"{name} {there} there, {here} here")
    files = stored.get("weights", ours["weights"])
    given = ours["weights"]
    is_extended = bool(files) and files.items() <= given.items()  # by the networks of more files
    if files != given and not is_extended:
        texts.append(f"weights {', '.join(files.values()) or 'without files'} there")
    return texts


def _kind(study: Study) -> dict[str, Any]:
    """Return what the results in a folder have in common; seeds and methods may be added later."""
    tuning = study.tuning
    is_tuned = {"tuned": tuning is not None and tuning.radii, "tuned_base": tuning is not None and tuning.base}
    settings = {name: to_json_value(value) for name, value in study.settings.items()}
    shared = {"scale": study.scale, "settings": settings, "weights": dict(study.weights)}
    return {"recipe": study.name, **shared, **is_tuned}


def claim_folder(out: Path, study: Study) -> None:
    """Write what a new folder is for, so that it is known before there are results; raise as :func:`check_folder`."""
    with locked(out, "writing results", wait=True):
        check_folder(out, study)
        if not (out / RESULTS).exists():
            write_json(out / RESULTS, {**_kind(study), "title": study.title, "table": [], "runs": []})


def write_results(study: Study, decision: Decision) -> StudyResult:
    """Write ``table.md``, ``results.json`` and ``report.html``, the page of all runs that have started."""
    now = decision.now
    out = decision.now.out
    entries = [_entry(plan, now) for plan in decision.finals]
    trials = [_entry(plan, now) for plan in decision.trials]
    unreadable = {entry["folder"]: entry["reason"] for entry in (*entries, *trials) if entry["state"] == UNREADABLE}
    runs = join(runs_of(decision.finals, out, unreadable))
    if study.timed:
        runs["training_seconds"] = runs["seconds"] * runs["epochs"]
    begun = runs[runs["state"] != "not started"].reset_index(drop=True)
    page = out / PAGE if len(begun) else None
    compared = None
    findings: list[str] = []
    if study.baseline is not None and runs["state"].isin(ENDED).any():
        compared = comparison(runs, compare_rows(runs, study.baseline), base_sentence(decision.base), page)
        findings += compared.sentences
        if study.name == COMPARE and compared.nobody_learned:
            has_diverged = not (runs["state"] == "finished").any()
            findings.append(comparison_advice([plan.run for plan in decision.finals], has_diverged))
    if study.at_equal_radii:
        findings += _at_equal_radii(runs)
    cells = cells_of(runs, study.published)
    tables_of_tuning, tuning_notes = tuning_tables(decision)
    selected = {plan.name for plan in decision.selected_finals}
    missing = int((~runs["state"].isin(ENDED) & runs["name"].isin(selected)).sum())
    shares = [(Run.of(**entry["settings"]), entry["wrong_labels"]) for entry in entries]
    tables = [*tables_of(cells, study.published, runs["settings"].iloc[0]), *tables_of_tuning]
    notes = [
        *caption(runs, cells, study.published),
        *study.notes,
        *([f"{missing} run{'s are' if missing > 1 else ' is'} not finished."] if missing else []),
        *task_of(study.plans[0].run).table_notes(shares),
        *tuning_notes,
    ]
    content = {
        **_kind(study),
        "title": study.title,
        "unit": score_title(study.plans[0].run),
        "seeds": sorted({plan.run.seed for plan in decision.finals}),
        "table": cells,
        "runs": entries,
        "tuning": trials,
    }
    lines = [*notes, *findings, *origin_info(entries)]
    with locked(out, "writing results", wait=True):  # several processes may work on one folder
        write_json(out / RESULTS, content)
        write(out / TABLE, markdown(study.title, tables, lines).encode())
        if page is not None:
            context = {"findings": findings, "tables": tables, "notes": notes}
            problems = [*unreadable.values(), *runs.attrs["problems"]]
            epochs = read_epochs(begun)
            write_page(page, begun, epochs, study.baseline, study.title, problems=problems, context=context)
    return StudyResult(
        states=now.states(decision.finals),
        tables=tables,
        notes=[*notes, *findings],
        files=[out / TABLE, out / RESULTS, *([] if page is None else [page])],
        page=page,
        comparison=compared,
        unreadable=unreadable,
    )


def runs_of(finals: Sequence[Plan], out: Path, unreadable: Collection[str] = ()) -> pd.DataFrame:
    """Return the table of the final runs in the order of the plan; runs that have not started have no numbers.

    What the plan says of a run is written to its ``run.json`` first: an older version did not, or knew less.

    Args:
        finals: their plans.
        out: the folder of the study.
        unreadable: names of runs whose directories cannot be read; they count as not started.
    """
    begun = [plan for plan in finals if plan.name not in unreadable and (out / plan.name / CONFIG).exists()]
    for plan in begun:
        stored = _stored_about(out / plan.name)
        about = _about(plan, stored)
        if stored != about:
            write_json(out / plan.name / ABOUT, about)
    problems: list[str] = []
    found = read_runs([out / plan.name for plan in begun], problems)
    rows = {row["name"]: row for row in found.to_dict("records")}
    table = [
        {**_not_started(plan, out), **rows.get(plan.name, {}), "settings_chosen": plan.settings_chosen}
        for plan in finals
    ]
    for row, plan in zip(table, finals, strict=True):  # the data changed between two runs: no mean over both
        row["section"] += row["experiment"].removeprefix(plan.about["experiment"])
    runs = pd.DataFrame(table).astype({"published": float, "radius": float, "chosen": object})
    runs.attrs["problems"] = problems
    return runs


def _stored_about(path: Path) -> dict[str, Any]:
    """Return the content of ``run.json``; empty if there is none, or if it is damaged: the plan knows what it was."""
    with contextlib.suppress(BsamRuntimeError):
        return RunDir(path).about() or {}
    return {}


def _about(plan: Plan, stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the plan says of a run that has begun, and whether it shared its device, which only its
    ``run.json`` knows.
    """
    return {**plan.about, "shared": stored.get("shared", True)}


def _not_started(plan: Plan, out: Path) -> dict[str, Any]:
    about = {name: value for name, value in plan.about.items() if name in COLUMNS}
    known = {"seed": plan.run.seed, "settings": plan.run.settings(), "unit": score_title(plan.run)}
    return {**COLUMNS, **about, **known, "state": "not started", "name": plan.name, "path": out / plan.name}


def _at_equal_radii(runs: pd.DataFrame) -> list[str]:
    """Return a sentence on each row, compared with the first row of its experiment with the same total radius."""
    sentences = []
    for (title, _), group in runs.groupby(["experiment", runs["radius"].round(9)], sort=False):
        where = f"{title}: against" if runs["experiment"].nunique() > 1 else "Against"
        rows = [row for row in compare_rows(group).to_dict("records") if row["row"] != row["against"] and row["shared"]]
        sentences += [f"{where} {row['against']}: {sentence(row)}" for row in rows]
    return sentences


def _entry(plan: Plan, now: Snapshot) -> dict[str, Any]:
    """Return settings, what a run is, its state, the metrics of its last epoch, machines and dates.

    If a file is damaged, the entry only says which.
    """
    state = now.state(plan.run)
    known = {"folder": plan.name, "about": dict(plan.about), "settings": plan.run.settings(), "wrong_labels": None}
    reason = state.unreadable
    if reason is None:
        try:
            return {**known, **_stored_numbers(plan, state)}
        except DAMAGED as error:
            reason = str(error) if isinstance(error, BsamError) else f"{state.path} cannot be read ({error})"
    unknown: dict[str, Any] = {
        "epochs_done": 0,
        "last": None,
        "flatness": [],
        "training_seconds": 0.0,
        "machines": [],
    }
    return {**known, "state": UNREADABLE, "reason": reason, **unknown}


def _stored_numbers(plan: Plan, state: RunState) -> dict[str, Any]:
    files = RunDir(state.path)
    task = task_of(plan.run)
    task.untrained(files.note)  # the table needs it
    notes = {name: files.note(name, keys=keys) for name, keys in NOTE_KEYS.items()}
    begun = (state.path / CONFIG).exists()
    return {
        "about": _about(plan, _stored_about(state.path)) if begun else dict(plan.about),
        "state": str(state),
        "reason": state.diverged,
        "epochs_done": len(state.epochs),
        "last": dict(state.epochs[-1]) if state.finished else None,
        "flatness": files.flatness() if state.finished else [],
        "training_seconds": sum(metrics["seconds"] for metrics in state.epochs),
        "wrong_labels": task.wrong_labels(plan.run, files.note),
        "machines": files.machines(),
        **{name: note for name, note in notes.items() if note},
    }


def origin_info(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the origin of the numbers as lines: splits of image files, weights, devices, versions and dates."""
    splits = {dataset_entry(run["settings"]["data"]).title: run["data"] for run in runs if "data" in run}
    lines = []
    for title, data in splits.items():
        counts = [f"{n:,} {SPLIT_WORDS.get(name, name)}" for name, n in data["images"].items()]
        lines.append(f"{title}: {' and '.join(counts)} images; {data['split']}.")
    pretrained = [run for run in runs if "weights" in run and run["settings"].get("init") is None]
    weights = {model_entry(run["settings"]["model"]).title: run["weights"] for run in pretrained}
    lines += [
        f"{title}: initial weights from {file['source']} (SHA-256 {file['sha256'] or 'unknown'}), last layer random."
        for title, file in weights.items()
    ]
    machines = [machine for run in runs for machine in run["machines"]]
    if not machines:
        return lines
    devices = dict.fromkeys(f"{info['device']}, torch {info['torch']}, bsam {info['bsam']}" for info in machines)
    dates = sorted({machine["date"][:10] for machine in machines})
    return [*lines, f"Run on {'; '.join(devices)}, {' to '.join(dict.fromkeys((dates[0], dates[-1])))}."]
