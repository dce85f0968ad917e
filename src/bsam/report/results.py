"""What a recipe writes: its table, the last numbers of every run with their machine and date, and its figures."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeAlias

from ..common.errors import BsamRuntimeError
from ..data import dataset_entry
from ..models import model_entry
from ..recipes.choices import Choice
from ..recipes.experiments import Recipe
from ..recipes.variants import variant_of
from ..training.files import locked, read_json, write, write_json
from ..training.run_dir import RunDir, RunState
from .demo_report import demo_findings, draw_demo
from .figures import draw_accuracy_lines, draw_training_curves
from .probes import draw_gradient_conflict, draw_sharpness_curves
from .radius import draw_radius, radius_findings
from .skeletons import draw_skeletons
from .summaries import CellSummary, table_info
from .tables import caption, markdown, score_title, sections_info
from .tuning import tuning_notes, tuning_sections

Draw: TypeAlias = Callable[[Recipe, Sequence[RunState], Path], None]
FIGURES: dict[str, Draw] = {
    "accuracy_lines": draw_accuracy_lines,
    "training_curves": draw_training_curves,
    "sharpness_curves": draw_sharpness_curves,
    "gradient_conflict": draw_gradient_conflict,
    "demo": draw_demo,
    "skeletons": draw_skeletons,
    "radius": draw_radius,
}
WORDS = {"train": "training"}  # for the names of splits
NOTES = ("data", "weights")  # of a run: which split of image files it was trained on, and from which weights
FINDINGS: dict[str, Callable[[Sequence[CellSummary], Sequence[RunState]], list[str]]] = {
    "demo": lambda summaries, states: demo_findings(summaries, states[0].run),
    "radius": radius_findings,
}


def runs_info(states: Sequence[RunState]) -> list[dict[str, Any]]:
    """Return an entry per run: its settings, its state, the metrics of its last epoch if it is finished, and each
    machine that worked on it, with dates.
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
            "machines": RunDir(state.path).machines(),
            **{name: note for name in NOTES if (note := RunDir(state.path).note(name))},
        }
        for state in states
    ]


def cell_info(summary: CellSummary) -> dict[str, Any]:
    """Return a cell of the table as plain values."""
    ours = {"mean": None, "std": None, "n": 0} if summary.ours is None else asdict(summary.ours)
    counts = {"diverged": summary.diverged, "missing": summary.missing}
    paper = None if summary.paper is None else asdict(summary.paper)
    details = {name: None if found is None else asdict(found) for name, found in summary.details.items()}
    return {**asdict(summary.cell), **ours, **counts, "paper": paper, **details, "chosen": summary.chosen}


def text_below(
    recipe: Recipe,
    summaries: Sequence[CellSummary],
    states: Sequence[RunState],
    chosen: Sequence[Choice] = (),
    selected: Collection[str] | None = None,
) -> list[str]:
    """Return the lines below a table of these runs, with how they were tuned and what the numbers show.

    Args:
        recipe: the experiment.
        summaries: of its table.
        states: of its final runs.
        chosen: what tuning chose.
        selected: the directories of the runs that are counted if they are not finished; None counts all.
    """
    findings = FINDINGS[recipe.findings](summaries, states) if recipe.findings else []
    missing = sum(not state.ended and (selected is None or state.path.name in selected) for state in states)
    return [*caption(recipe, summaries, states[0].run, missing), *tuning_notes(recipe, chosen), *findings]


def origin_info(runs: Sequence[dict[str, Any]]) -> list[str]:
    """Return where the numbers come from, as lines: splits of image files, weights, devices, versions and dates."""
    splits = {dataset_entry(run["settings"]["data"]).title: run["data"] for run in runs if "data" in run}
    lines = [
        f"{title}: {' and '.join(f'{n:,} {WORDS.get(name, name)}' for name, n in data['images'].items())} images; "
        f"{data['split']}."
        for title, data in splits.items()
    ]
    own = [run for run in runs if "weights" in run and run["settings"].get("init") is None]  # not from another run
    weights = {model_entry(run["settings"]["model"]).title: run["weights"] for run in own}
    lines += [
        f"{title}: initial weights from {one['source']} (SHA-256 {one['sha256'] or 'unknown'}), last layer random."
        for title, one in weights.items()
    ]
    machines = [machine for run in runs for machine in run["machines"]]
    if not machines:
        return lines
    devices = dict.fromkeys(f"{each['device']}, torch {each['torch']}, bsam {each['bsam']}" for each in machines)
    dates = sorted(machine["date"][:10] for machine in machines)
    return [
        *lines,
        f"Run on {'; '.join(devices)}, {dates[0] if dates[0] == dates[-1] else f'{dates[0]} to {dates[-1]}'}.",
    ]


def check_folder(out: Path, recipe: Recipe) -> None:
    """Raise if a folder holds other results than this recipe's, with the same tuning: they would be overwritten."""
    file, own = out / "results.json", {"recipe": recipe.name, "tuned": recipe.tuned}
    there = {"tuned": False} | (read_json(file, dict, "choose another folder, or remove it") if file.exists() else own)
    if any(there.get(name) != value for name, value in own.items()):
        raise BsamRuntimeError(
            f"{file} holds other results ({there.get('recipe')}{', with --tune' * bool(there['tuned'])}): choose "
            "another folder"
        )


def write_results(
    out: Path,
    recipe: Recipe,
    scale: str,
    states: Sequence[RunState],
    tuning: Sequence[RunState] = (),
    chosen: Sequence[Choice] = (),
    selected: Collection[str] | None = None,
) -> list[Path]:
    """Write ``table.md``, ``results.json`` and the recipe's figures, of the finished runs.

    Args:
        out: the folder of the experiment.
        recipe: the experiment.
        scale: its scale.
        states: of its final runs.
        tuning: of the runs that chose their settings.
        chosen: what they chose.
        selected: as for :func:`text_below`.

    Returns:
        the files that were written.
    """
    summaries, runs, run = table_info(recipe, states), runs_info(states), states[0].run
    content = {
        "recipe": recipe.name,
        "scale": scale,
        "tuned": recipe.tuned,
        "title": recipe.title,
        "unit": score_title(run),
        "seeds": sorted({state.run.seed for state in states}),
        "table": [cell_info(summary) for summary in summaries],
        "runs": runs,
        "tuning": runs_info(tuning),
    }
    paths = [out / "table.md", out / "results.json"]
    with locked(out, "writing results", wait=True):  # several processes may work on one folder
        sections = [*sections_info(recipe, summaries), *tuning_sections(recipe, chosen)]
        lines = [*text_below(recipe, summaries, states, chosen, selected), *origin_info(runs)]
        write_json(paths[1], content)
        write(paths[0], markdown(recipe.title, sections, lines).encode())
        if any(state.finished for state in states):
            for name in recipe.figures:
                paths.append(out / f"{name}.png")
                FIGURES[name](recipe, states, paths[-1])
    return [path for path in paths if path.exists()]
