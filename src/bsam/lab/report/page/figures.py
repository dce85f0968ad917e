"""The figures of the page by name: functions from runs and epochs to what the template shows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import pandas as pd

from ...recipes.planning import measured_on
from ...training.run_dir import CURVATURE, RunDir
from ..figures.flatness_figures import contour_figure, density_figure, eigenvalue_figure, surface_figure
from ..figures.score_figures import SCORE_FIGURES, column_figure, seed_numbers
from .pictures import PICTURES
from .plot_panels import figure_info

Shown: TypeAlias = dict[str, Any] | None
Figures: TypeAlias = Callable[[pd.DataFrame, pd.DataFrame], Shown]
FLATNESS = {  # the part of an entry, the heading, and the function that draws it
    "eigenvalues": ("Eigenvalues of the Hessian", eigenvalue_figure),
    "density": ("Density of all eigenvalues", density_figure),
    "contours": ("Loss around each network", contour_figure),
    "surfaces": ("Loss around each network, in 3-D", surface_figure),
}


def _of_table(draw: Any) -> Figures:
    def shown(runs: pd.DataFrame, epochs: pd.DataFrame) -> Shown:
        figure = draw(runs, epochs)
        if figure is None:
            return None
        return figure_info(figure.layout.title.text, figure.layout.meta["caption"], figure)

    return shown


def flatness_entries(runs: pd.DataFrame, part: str) -> tuple[pd.DataFrame, dict[str, Mapping[str, Any]]]:
    """Return the first run of each row with this part of a ``flatness.json``, and the entries by title.

    A loss surface may also be that of the end of training.
    """
    found: dict[int, Mapping[str, Any]] = {}
    for place, run in runs.iterrows():
        entry = run["flatness"] or {"run": run["settings"]}
        curvature = run["path"] is not None and (run["path"] / CURVATURE).exists()
        if part == "landscape" and not entry.get(part) and curvature:
            surface = RunDir(run["path"]).surface()
            entry = {"run": run["settings"]} | ({} if surface is None else {part: vars(surface)})
        if entry.get(part):
            found[place] = {**entry, "architecture": run["model"]}
    first = runs.loc[list(found)].drop_duplicates("row")
    several = first["seed"].nunique() > 1
    titles = [f"{run['row']}, seed {run['seed']}" if several else run["row"] for _, run in first.iterrows()]
    return first, {title: found[place] for title, place in zip(titles, first.index, strict=True)}


def _of_flatness(name: str) -> Figures:
    heading, draw = FLATNESS[name]
    part = name if name in ("eigenvalues", "density") else "landscape"

    def shown(runs: pd.DataFrame, _: pd.DataFrame) -> Shown:
        first, entries = flatness_entries(runs, part)
        figure = draw(entries) if entries else None
        if figure is None:
            return None
        if part != "landscape":  # the caption says what was measured
            figure.for_each_xaxis(lambda axis: axis.title.update(text=axis.title.text.partition(" (")[0]))
        if part == "density":
            figure.update_layout(height=None)
        labels = dict.fromkeys(measured_on(entry["run"], entry.get("samples")) for entry in entries.values())
        caption = f"Networks of {seed_numbers(first)}; {' or '.join(labels)}, with the labels used in training."
        caption += " Along two random directions, on one scale for all methods." if part == "landscape" else ""
        caption += " Drag to turn them all." if name == "surfaces" else ""
        return figure_info(heading, caption, figure)

    return shown


EXPERIMENT_FIGURES: dict[str, Figures] = {
    **{name: _of_table(draw) for name, draw in SCORE_FIGURES.items()},
    **{name: _of_flatness(name) for name in FLATNESS},
    **PICTURES,
}
RECIPE_FIGURES: dict[str, Figures] = {"columns": _of_table(column_figure)}
