"""The files of an experiment: its table, the last numbers of every run with its machine and date, and its page."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from ...common.errors import BsamRuntimeError
from ..analysis.outcome import score_title
from ..analysis.runs_table import COLUMNS, read_epochs, read_runs
from ..data import dataset_entry
from ..models import model_entry
from ..recipes.columns import state_of
from ..recipes.experiments import Experiment
from ..recipes.planning import Planned
from ..recipes.tuning import TunedRuns
from ..training.config import Run
from ..training.files import locked, read_json, write, write_json
from ..training.run_dir import ABOUT, CONFIG, RunDir, RunState
from .recipe_table import ENDED, TableSection, caption, cells_of, markdown, sections_of
from .tuning_section import tuning_notes, tuning_sections

WORDS = {"train": "training"}  # for the names of splits
PAGE = "report.html"
TUNED = {"tuned": "--tune", "tuned_base": "--tune-base"}  # entries of results.json, and the flags that set them
NOTES = ("data", "weights")  # notes of a run: the split of its image files, and its initial weights


@dataclass(frozen=True)
class Results:
    """The results of an experiment: the table of its runs, tables as text, the lines below, and what they show."""

    runs: pd.DataFrame
    cells: Sequence[Mapping[str, Any]]
    sections: Sequence[TableSection]
    notes: Sequence[str]
    findings: Sequence[str] = ()

    @property
    def lines(self) -> list[str]:
        """All lines below the tables."""
        return [*self.notes, *self.findings]


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


def runs_of(tuned: TunedRuns, out: Path) -> pd.DataFrame:
    """Return the table of the final runs in the order of the plan; runs that have not started have no numbers.

    What the plan says of a run is written to its ``run.json`` first: an older version did not, or knew less.
    """
    for plan in tuned.finals:
        if (out / plan.name / CONFIG).exists():
            stored = RunDir(out / plan.name).about()
            shared = True if stored is None else stored["shared"]
            if stored != (about := {**plan.about, "shared": shared}):
                write_json(out / plan.name / ABOUT, about)
    problems: list[str] = []
    begun = read_runs([out / plan.name for plan in tuned.finals if (out / plan.name / CONFIG).exists()], problems)
    rows = {row["name"]: row for row in begun.to_dict("records")}
    table = [rows.get(plan.name) or _not_started(plan, out) for plan in tuned.finals]
    runs = pd.DataFrame(table, columns=list(COLUMNS)).astype({"published": float, "radius": float})
    runs.attrs["problems"] = problems
    return runs.assign(settings_chosen=[tuned.chosen.get(plan.name) for plan in tuned.finals])


def _not_started(plan: Planned, out: Path) -> dict[str, Any]:
    about = {name: value for name, value in plan.about.items() if name in COLUMNS}
    more = {
        "seed": plan.run.seed,
        "state": "not started",
        "settings": plan.run.settings(),
        "unit": score_title(plan.run),
    }
    return {**COLUMNS, **about, **more, "name": plan.name, "path": out / plan.name}


def results_of(
    experiment: Experiment, tuned: TunedRuns, runs: pd.DataFrame, selected: Collection[str], findings: Sequence[str]
) -> Results:
    """Return tables and lines of an experiment.

    Args:
        experiment: the experiment.
        tuned: its runs, with the settings that tuning has chosen.
        runs: from :func:`runs_of`.
        selected: the names of the runs that count as missing if they have not ended.
        findings: sentences on what the numbers show.
    """
    cells = cells_of(runs, experiment.recipe.published)
    missing = int((~runs["state"].isin(ENDED) & runs["name"].isin(selected)).sum())
    waiting = [f"{missing} run{'s are' if missing > 1 else ' is'} not finished."] if missing else []
    shown = _noise_texts(runs)
    notes = [
        *caption(runs, cells, experiment.recipe.published),
        *experiment.notes,
        *waiting,
        *([f"Label noise: {'; '.join(shown)}."] if shown else []),
        *tuning_notes(tuned),
    ]
    sections = [*sections_of(cells, experiment.recipe.published), *tuning_sections(tuned, experiment.tuning)]
    return Results(runs, cells, sections, notes, findings)


def _noise_texts(runs: pd.DataFrame) -> list[str]:
    """Return the label noise of the runs in words, with the share of wrong labels if it is known."""
    texts: dict[tuple[str, float], str] = {}
    for settings, path in zip(runs["settings"], runs["path"], strict=True):
        run = Run.of(**settings)
        text = run.task.noise_text(run.data, RunDir(path).note("labels").get("wrong"))
        texts[run.data, run.task.label_noise] = max(texts.get((run.data, run.task.label_noise), ""), text, key=len)
    return [text for text in dict.fromkeys(texts.values()) if text]


def write_results(out: Path, experiment: Experiment, tuned: TunedRuns, results: Results) -> list[Path]:
    """Write ``table.md`` and ``results.json``, and return their paths."""
    finals, trials = (_entries(plans, out) for plans in (tuned.finals, [*tuned.base_trials, *tuned.trials]))
    content = {
        **_kind(experiment),
        "scale": experiment.scale.name,
        "title": experiment.title,
        "unit": score_title(experiment.planned[0].run),
        "seeds": sorted({plan.run.seed for plan in tuned.finals}),
        "table": list(results.cells),
        "runs": finals,
        "tuning": trials,
    }
    table, numbers = out / "table.md", out / "results.json"
    with locked(out, "writing results", wait=True):  # several processes may work on one folder
        write_json(numbers, content)
        write(table, markdown(experiment.title, results.sections, [*results.lines, *origin_info(finals)]).encode())
    return [table, numbers]


def _entries(planned: Sequence[Planned], out: Path) -> list[dict[str, Any]]:
    """Return an entry per run: settings, what it is, state, the metrics of the last epoch, machines and dates."""
    return [_entry(plan, state_of(plan.run, out)) for plan in planned]


def _entry(plan: Planned, state: RunState) -> dict[str, Any]:
    files = RunDir(state.path)
    noise = plan.run.task.label_noise
    return {
        "folder": state.path.name,
        "about": files.about() or dict(plan.about),
        "state": str(state),
        "reason": state.diverged,
        "epochs_done": len(state.epochs),
        "last": dict(state.epochs[-1]) if state.finished else None,
        "top_eigenvalue": files.top_eigenvalue() if state.finished else None,
        "training_seconds": sum(metrics["seconds"] for metrics in state.epochs),
        "settings": plan.run.settings(),
        "wrong_labels": files.note("labels").get("wrong", plan.run.task.wrong_labels(plan.run.data)) if noise else None,
        "machines": files.machines(),
        **{name: note for name in NOTES if (note := files.note(name))},
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


def write_recipe_page(out: Path, experiment: Experiment, results: Results) -> Path | None:
    """Write ``report.html``, the page of all runs that have started; None if there are none."""
    from .page.page import write_page

    runs = results.runs[results.runs["state"] != "not started"].reset_index(drop=True)
    if runs.empty:
        return None
    context = {"findings": results.findings, "tables": results.sections, "notes": results.notes}
    options = {"problems": results.runs.attrs["problems"], "context": context}
    with locked(out, "writing results", wait=True):
        write_page(out / PAGE, runs, read_epochs(runs), experiment.recipe.baseline, experiment.title, **options)
    return out / PAGE
