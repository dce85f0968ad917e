"""The files of an experiment: its table, the last numbers of every run with its machine and date, and its page."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from ...common.errors import BsamRuntimeError
from ..analysis.outcome import score_title
from ..analysis.runs_table import COLUMNS, read_epochs, read_runs
from ..analysis.sentences import ComparisonResult, comparison, sentence
from ..analysis.significance import compare_rows
from ..data import dataset_entry
from ..models import model_entry
from ..recipes.experiments import Experiment
from ..recipes.planning import Planned, states_of
from ..recipes.tuning import base_sentence, tune
from ..training.config import Run
from ..training.files import locked, read_json, write, write_json
from ..training.run_dir import ABOUT, CONFIG, RunDir, RunState
from .page.page import write_page
from .recipe_table import ENDED, TableSection, caption, cells_of, markdown, sections_of
from .tuning_section import tuning_tables

WORDS = {"train": "training"}  # for the names of splits
PAGE = "report.html"
TUNED = {"tuned": "--tune", "tuned_base": "--tune-base"}  # entries of results.json, and the flags that set them
# notes of a run with their keys: the split of its image files, and its initial weights
NOTES = {"data": ("split", "images"), "weights": ("source", "sha256")}


@dataclass(frozen=True)
class ExperimentResult:
    """The results of an experiment.

    Args:
        states: the states of the final runs.
        sections: the tables.
        notes: the lines below the tables.
        files: the files written.
        page: the page; None if no run has started.
        comparison: the methods compared with the baseline; None without a baseline.
        failure: the error that says which runs failed or diverged; None if there are none.
    """

    states: Sequence[RunState]
    sections: Sequence[TableSection]
    notes: Sequence[str]
    files: Sequence[Path]
    page: Path | None
    comparison: ComparisonResult | None
    failure: Exception | None = None


def check_folder(out: Path, experiment: Experiment) -> None:
    """Raise if the folder holds results of another recipe or another tuning."""
    file, ours = out / "results.json", _kind(experiment)
    stored = dict.fromkeys(TUNED, False) | (read_json(file, dict, "choose another folder") if file.exists() else ours)
    if any(stored.get(name) != value for name, value in ours.items()):
        flags = "".join(f", with {flag}" for name, flag in TUNED.items() if stored[name])
        raise BsamRuntimeError(f"{file} holds other results ({stored.get('recipe')}{flags}): choose another folder")


def _kind(experiment: Experiment) -> dict[str, Any]:
    tuning = experiment.tuning
    is_tuned = {"tuned": tuning is not None and tuning.radii, "tuned_base": tuning is not None and tuning.base}
    return {"recipe": experiment.recipe.name, **is_tuned}


def write_results(experiment: Experiment, out: Path) -> ExperimentResult:
    """Write ``table.md``, ``results.json`` and ``report.html``, the page of all runs that have started."""
    recipe, tuned = experiment.recipe, tune(experiment.planned, experiment.tuning, out)
    runs = runs_of(tuned.finals, out)
    if recipe.timed:
        runs["training_seconds"] = runs["seconds"] * runs["epochs"]
    begun = runs[runs["state"] != "not started"].reset_index(drop=True)
    compared, findings = None, []
    if recipe.baseline is not None and (runs["state"] == "finished").any():
        page = out / PAGE if len(begun) else None
        compared = comparison(runs, compare_rows(runs, recipe.baseline), base_sentence(tuned.base), page)
        findings = compared.sentences
    findings += _at_equal_radii(runs) if recipe.at_equal_radii else []
    cells, (tuning_sections, tuning_notes) = cells_of(runs, recipe.published), tuning_tables(tuned)
    selected = {plan.name for plan in tune(experiment.selected, experiment.tuning, out).finals}
    missing = int((~runs["state"].isin(ENDED) & runs["name"].isin(selected)).sum())
    noise = "; ".join(_noise_texts(runs))
    sections = [*sections_of(cells, recipe.published, runs["settings"].iloc[0]), *tuning_sections]
    notes = [
        *caption(runs, cells, recipe.published),
        *experiment.notes,
        *([f"{missing} run{'s are' if missing > 1 else ' is'} not finished."] if missing else []),
        *([f"Label noise: {noise}."] if noise else []),
        *tuning_notes,
    ]
    entries = [_entry(plan, out) for plan in tuned.finals]
    content = {
        **_kind(experiment),
        "scale": experiment.scale.name,
        "title": experiment.title,
        "unit": score_title(experiment.planned[0].run),
        "seeds": sorted({plan.run.seed for plan in tuned.finals}),
        "table": cells,
        "runs": entries,
        "tuning": [_entry(plan, out) for plan in (*tuned.base_trials, *tuned.trials)],
    }
    files = [out / "table.md", out / "results.json"]
    lines = [*notes, *findings, *origin_info(entries)]
    with locked(out, "writing results", wait=True):  # several processes may work on one folder
        write_json(files[1], content)
        write(files[0], markdown(experiment.title, sections, lines).encode())
        if len(begun):
            files.append(out / PAGE)
            context = {"findings": findings, "tables": sections, "notes": notes}
            options = {"problems": runs.attrs["problems"], "context": context}
            write_page(out / PAGE, begun, read_epochs(begun), recipe.baseline, experiment.title, **options)
    states = states_of(tuned.finals, out)
    return ExperimentResult(states, sections, [*notes, *findings], files, out / PAGE if len(begun) else None, compared)


def runs_of(finals: Sequence[Planned], out: Path) -> pd.DataFrame:
    """Return the table of the final runs in the order of the plan; runs that have not started have no numbers.

    What the plan says of a run is written to its ``run.json`` first: an older version did not, or knew less.
    """
    begun = [plan for plan in finals if (out / plan.name / CONFIG).exists()]
    for plan in begun:
        if _stored_about(out / plan.name) != (about := _about(plan, out)):
            write_json(out / plan.name / ABOUT, about)
    problems: list[str] = []
    rows = {row["name"]: row for row in read_runs([out / plan.name for plan in begun], problems).to_dict("records")}
    table = [{**_not_started(plan, out), **rows.get(plan.name, {}), "settings_chosen": plan.chosen} for plan in finals]
    runs = pd.DataFrame(table).astype({"published": float, "radius": float})
    runs.attrs["problems"] = problems
    return runs


def _stored_about(path: Path) -> dict[str, Any]:
    """Return the content of ``run.json``; empty if there is none, or if it is damaged: the plan knows what it was."""
    with contextlib.suppress(BsamRuntimeError):
        return RunDir(path).about() or {}
    return {}


def _about(plan: Planned, out: Path) -> dict[str, Any]:
    """Return what the plan says of a run, and whether it shared its device while it trained, which only it knows."""
    begun = (out / plan.name / CONFIG).exists()
    return {**plan.about, "shared": _stored_about(out / plan.name).get("shared", begun)}


def _not_started(plan: Planned, out: Path) -> dict[str, Any]:
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


def _noise_texts(runs: pd.DataFrame) -> list[str]:
    """Return the label noise of the runs in words, with the share of wrong labels if it is known."""
    texts: dict[tuple[str, float], str] = {}
    for settings, path in zip(runs["settings"], runs["path"], strict=True):
        run = Run.of(**settings)
        text = run.task.noise_text(run.data, RunDir(path).note("labels").get("wrong")) if run.task.label_noise else ""
        texts[run.data, run.task.label_noise] = max(texts.get((run.data, run.task.label_noise), ""), text, key=len)
    return [text for text in dict.fromkeys(texts.values()) if text]


def _entry(plan: Planned, out: Path) -> dict[str, Any]:
    """Return settings, what a run is, its state, the metrics of its last epoch, machines and dates."""
    files = RunDir(out / plan.name)
    state = files.state(plan.run)
    noise = plan.run.task.label_noise
    return {
        "folder": plan.name,
        "about": _about(plan, out),
        "state": str(state),
        "reason": state.diverged,
        "epochs_done": len(state.epochs),
        "last": dict(state.epochs[-1]) if state.finished else None,
        "top_eigenvalue": files.top_eigenvalue() if state.finished else None,
        "training_seconds": sum(metrics["seconds"] for metrics in state.epochs),
        "settings": plan.run.settings(),
        "wrong_labels": files.note("labels").get("wrong", plan.run.task.wrong_labels(plan.run.data)) if noise else None,
        "machines": files.machines(),
        **{name: note for name, keys in NOTES.items() if (note := files.note(name, keys=keys))},
    }


def origin_info(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the origin of the numbers as lines: splits of image files, weights, devices, versions and dates."""
    splits = {dataset_entry(run["settings"]["data"]).title: run["data"] for run in runs if "data" in run}
    lines = [
        f"{title}: {' and '.join(f'{n:,} {WORDS.get(name, name)}' for name, n in data['images'].items())} images; "
        f"{data['split']}."
        for title, data in splits.items()
    ]
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
