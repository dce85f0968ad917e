"""What a recipe leaves behind: its table, every run's last numbers with their machine and date, and its figures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..core.errors import BsamRuntimeError
from ..recipes.catalogue import Recipe
from ..recipes.runner import State
from ..recipes.variants import variant_of
from ..training.files import read_json, write, write_json
from ..training.lock import locked
from .comparison import Entry, comparison_info, comparison_markdown, unit
from .recipe_figures import FIGURES

ORIGIN = ("device", "torch", "bsam", "date")  # what is told of a machine


def runs_info(states: Sequence[State]) -> list[dict[str, Any]]:
    """One entry per run: its settings, how far it is, the metrics of its last epoch if it is finished, and each machine
    that worked on it, with dates.
    """
    return [
        {
            "folder": state.path.name,
            "title": variant_of(state.run).title,
            "state": str(state),
            "reason": state.diverged,
            "epochs_done": len(state.epochs),
            "last": dict(state.epochs[-1]) if state.finished else None,
            "training_seconds": sum(metrics["seconds"] for metrics in state.epochs),
            "settings": state.run.settings(),
            "machines": _machines(state.path),
        }
        for state in states
    ]


def _machines(folder: Path) -> list[dict[str, Any]]:
    file = folder / "environment.json"
    if not file.exists():
        return []
    mend = "remove the file to report without the machine that the run was on"
    found = read_json(file, list, mend)
    if not all(isinstance(one, dict) and all(isinstance(one.get(name), str) for name in ORIGIN) for one in found):
        raise BsamRuntimeError(f"{file} is damaged: {' and '.join(ORIGIN)} are not in each entry; {mend}")
    return found


def table_info(entries: Sequence[Entry]) -> list[dict[str, Any]]:
    """The table as plain values."""
    return [
        {
            "part": entry.place.part,
            "row": entry.place.row,
            "column": entry.place.column,
            "mean": None if entry.ours is None else entry.ours.mean,
            "std": None if entry.ours is None else entry.ours.std,
            "n": 0 if entry.ours is None else entry.ours.n,
            "diverged": entry.diverged,
            "missing": entry.missing,
            "paper": None
            if entry.paper is None
            else {"mean": entry.paper.mean, "std": entry.paper.std, "note": entry.paper.note},
        }
        for entry in entries
    ]


def origin_info(runs: Sequence[dict[str, Any]]) -> list[str]:
    """Where the numbers come from, in lines: devices, versions and dates."""
    machines = [machine for run in runs for machine in run["machines"]]
    if not machines:
        return []
    devices = dict.fromkeys(
        f"{machine['device']}, torch {machine['torch']}, bsam {machine['bsam']}" for machine in machines
    )
    dates = sorted(machine["date"][:10] for machine in machines)
    return [f"Run on {'; '.join(devices)}, {dates[0] if dates[0] == dates[-1] else f'{dates[0]} to {dates[-1]}'}."]


def write_outcome(out: Path, recipe: Recipe, scale: str, states: Sequence[State]) -> list[Path]:
    """Write ``table.md``, ``results.json`` and the recipe's figures, of those runs that are finished."""
    damaged = next((state.damaged for state in states if state.damaged is not None), None)
    if damaged is not None:  # it may be finished: a table without it would be wrong
        raise BsamRuntimeError(damaged)
    entries, runs = comparison_info(recipe, states), runs_info(states)
    seeds = sorted({state.run.seed for state in states})
    paths = [out / "table.md", out / "results.json"]
    with locked(out, "writing results", wait=True):  # several processes may work on one folder
        write(paths[0], comparison_markdown(recipe, entries, states[0].run, origin_info(runs)).encode())
        content = {
            "recipe": recipe.name,
            "scale": scale,
            "title": recipe.title,
            "unit": unit(states[0].run),
            "seeds": seeds,
            "table": table_info(entries),
        }
        write_json(paths[1], {**content, "runs": runs})
        if any(state.finished for state in states):
            for name in recipe.figures:
                paths.append(out / f"{name}.png")
                FIGURES[name](recipe, states, paths[-1])
    return paths
