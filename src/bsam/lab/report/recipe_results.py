"""The files of a recipe: its table, the last numbers of every run with its machine and date, figures, and its page."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeAlias

from ...common.errors import BsamRuntimeError, BsamValueError
from ..analysis.outcome import score_title
from ..analysis.runs_table import read_epochs, read_runs
from ..data import dataset_entry
from ..models import model_entry
from ..recipes.choices import Choice
from ..recipes.columns import CellSummary
from ..recipes.experiments import Recipe, table_info
from ..recipes.variants import variant_of
from ..training.files import locked, read_json, write, write_json
from ..training.run_dir import RunDir, RunState
from .figures.epoch_figures import draw_demo, draw_training_curves
from .figures.prediction_pictures import draw_skeletons
from .figures.probe_figures import draw_gradient_conflict, draw_sharpness_curves
from .figures.setting_figures import draw_accuracy_lines, draw_radius
from .page.page import write_page
from .recipe_table import caption, markdown, sections_info
from .tuning_section import tuning_notes, tuning_sections

Draw: TypeAlias = Callable[[Recipe, Sequence[RunState], Path], None]
FIGURES: dict[str, Draw] = {  # by the names that recipes use; a recipe may also pass a function
    "accuracy_lines": draw_accuracy_lines,
    "training_curves": draw_training_curves,
    "sharpness_curves": draw_sharpness_curves,
    "gradient_conflict": draw_gradient_conflict,
    "demo": draw_demo,
    "skeletons": draw_skeletons,
    "radius": draw_radius,
}
WORDS = {"train": "training"}  # for the names of splits
PAGE = "report.html"
TUNED = {"tuned": "--tune", "tuned_base": "--tune-base"}  # entries of results.json, and the flags that set them
NOTES = ("data", "weights")  # notes of a run: the split of its image files, and its initial weights


def runs_info(states: Sequence[RunState], how: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
    """Return an entry per run: settings, state, the metrics of the last epoch if it is finished, machines and dates.

    Args:
        states: the runs.
        how: how the settings of tuned runs were chosen, in words, by the name of the run directory.
    """
    return [
        {
            "folder": state.path.name,
            "title": variant_of(state.run).title,
            "state": str(state),
            "reason": state.diverged,
            "epochs_done": len(state.epochs),
            "last": dict(state.epochs[-1]) if state.finished else None,
            "top_eigenvalue": RunDir(state.path).top_eigenvalue() if state.finished else None,
            "training_seconds": sum(metrics["seconds"] for metrics in state.epochs),
            "settings": state.run.settings(),
            "wrong_labels": _wrong_labels(state),
            "machines": RunDir(state.path).machines(),
            **{name: note for name in NOTES if (note := RunDir(state.path).note(name))},
            **({"chosen": how[state.path.name]} if how and state.path.name in how else {}),
        }
        for state in states
    ]


def _wrong_labels(state: RunState) -> float | None:
    """Return the fraction of the training labels that are wrong; None without label noise, or if it is not known."""
    run = state.run
    return RunDir(state.path).note("labels").get("wrong", run.wrong_labels()) if run.label_noise else None


def cell_info(summary: CellSummary) -> dict[str, Any]:
    """Return a cell of the table as plain values."""
    ours = {"mean": None, "std": None, "n": 0} if summary.ours is None else asdict(summary.ours)
    counts = {"diverged": summary.diverged, "missing": summary.missing}
    paper = None if summary.paper is None else asdict(summary.paper)
    details = {name: None if numbers is None else asdict(numbers) for name, numbers in summary.details.items()}
    return {**asdict(summary.cell), **ours, **counts, "paper": paper, **details, "chosen": summary.chosen}


def text_below(
    recipe: Recipe,
    summaries: Sequence[CellSummary],
    states: Sequence[RunState],
    chosen: Sequence[Choice] = (),
    selected: Collection[str] | None = None,
    base: Choice | None = None,
) -> list[str]:
    """Return the lines below a table: its caption, how the runs were tuned, and what the numbers show.

    Args:
        recipe: the experiment.
        summaries: the cells of its table.
        states: the states of its final runs.
        chosen: what tuning chose.
        selected: the directories of the runs that count as missing if they are not finished; None counts all.
        base: what tuning chose for the base optimizer.
    """
    missing = sum(not state.ended and (selected is None or state.path.name in selected) for state in states)
    lines = [*caption(recipe, summaries, states[0].run, missing), *_noise_line(states)]
    return [*lines, *tuning_notes(recipe, chosen, base), *recipe.findings(summaries, states)]


def _noise_line(states: Sequence[RunState]) -> list[str]:
    """Return a line on the label noise of the runs, with the share of wrong labels if it is known; empty without it."""
    texts: dict[tuple[str, float], str] = {}
    for state in states:
        key = state.run.data, state.run.label_noise
        texts[key] = max(texts.get(key, ""), state.run.noise_text(_wrong_labels(state)), key=len)
    shown = [text for text in dict.fromkeys(texts.values()) if text]
    return [f"Label noise: {'; '.join(shown)}."] if shown else []


def origin_info(runs: Sequence[dict[str, Any]]) -> list[str]:
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


def figure_of(figure: str | Draw) -> tuple[str, Draw]:
    """Return the name of a figure, which is also that of its file, and the function that draws it."""
    if not isinstance(figure, str):
        return figure.__name__.removeprefix("draw_"), figure
    if figure not in FIGURES:
        raise BsamValueError(f"a figure must be a function or one of {', '.join(FIGURES)}; got {figure!r}")
    return figure, FIGURES[figure]


def check_folder(out: Path, recipe: Recipe) -> None:
    """Raise if the folder holds results of another recipe or another tuning, or if a figure is unknown."""
    for figure in recipe.figures:
        figure_of(figure)
    file = out / "results.json"
    ours = {"recipe": recipe.name, "tuned": recipe.tuned, "tuned_base": recipe.base_tuning is not None}
    stored = read_json(file, dict, "choose another folder, or remove it") if file.exists() else ours
    stored = dict.fromkeys(TUNED, False) | stored
    if any(stored.get(name) != value for name, value in ours.items()):
        flags = "".join(f", with {flag}" for name, flag in TUNED.items() if stored[name])
        raise BsamRuntimeError(f"{file} holds other results ({stored.get('recipe')}{flags}): choose another folder")


def write_results(
    out: Path,
    recipe: Recipe,
    scale: str,
    states: Sequence[RunState],
    tuning: Sequence[RunState] = (),
    chosen: Sequence[Choice] = (),
    selected: Collection[str] | None = None,
    base: Choice | None = None,
    how: Mapping[str, str] | None = None,
) -> list[Path]:
    """Write ``table.md``, ``results.json`` and the recipe's figures from the finished runs.

    Args:
        out: the folder of the experiment.
        recipe: the experiment.
        scale: its scale.
        states: the states of its final runs.
        tuning: the states of its tuning runs.
        chosen: what tuning chose.
        selected: as for :func:`text_below`.
        base: what tuning chose for the base optimizer.
        how: how the settings of tuned runs were chosen, in words, by the name of the run directory.

    Returns:
        the paths of the files.
    """
    summaries, runs = table_info(recipe, states), runs_info(states, how)
    content = {
        "recipe": recipe.name,
        "scale": scale,
        "tuned": recipe.tuned,
        **({"tuned_base": True} if recipe.base_tuning is not None else {}),
        "title": recipe.title,
        "unit": score_title(states[0].run),
        "seeds": sorted({state.run.seed for state in states}),
        "table": [cell_info(summary) for summary in summaries],
        "runs": runs,
        "tuning": runs_info(tuning),
    }
    table, numbers = out / "table.md", out / "results.json"
    paths = [table, numbers]
    with locked(out, "writing results", wait=True):  # several processes may work on one folder
        sections = [*sections_info(recipe, summaries), *tuning_sections(recipe, chosen, base)]
        lines = [*text_below(recipe, summaries, states, chosen, selected, base), *origin_info(runs)]
        write_json(numbers, content)
        write(table, markdown(recipe.title, sections, lines).encode())
        if any(state.finished for state in states):
            for name, draw in map(figure_of, recipe.figures):
                paths.append(out / f"{name}.png")
                draw(recipe, states, paths[-1])
    return [path for path in paths if path.exists()]


def write_recipe_page(
    out: Path,
    recipe: Recipe,
    states: Sequence[RunState],
    baseline: str | None = None,
    how: Mapping[str, str] | None = None,
) -> list[Path]:
    """Write ``report.html``, the page of all runs that have started; nothing if there are none.

    Args:
        out: the folder of the experiment.
        recipe: the experiment.
        states: the states of its final runs and of its tuning runs, which are not shown.
        baseline: the title of the method that the others are compared with; None takes the base optimizer.
        how: as for :func:`write_results`.

    Returns:
        the path of the page.
    """
    runs = read_runs([state.path for state in states if state.path.exists()], [])
    if runs.empty:
        return []
    runs["chosen"] = [(how or {}).get(name, chosen) for name, chosen in zip(runs["name"], runs["chosen"], strict=True)]
    with locked(out, "writing results", wait=True):
        write_page(out / PAGE, runs, read_epochs(runs), baseline, recipe.title)
    return [out / PAGE]
