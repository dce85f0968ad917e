"""The figures of the page by name: functions from runs and epochs to what the template shows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

import pandas as pd

from ..figures.flatness_figures import contour_figure, density_figure, eigenvalue_figure, surface_figure
from ..figures.score_figures import SCORE_FIGURES, column_figure
from .picture_rows import picture_rows
from .render import figure_info

Figures: TypeAlias = Callable[[pd.DataFrame, pd.DataFrame], dict[str, Any] | None]
FLATNESS_FIGURES = {  # the function that draws a figure, and the part of a measurement that it needs
    "eigenvalues": (eigenvalue_figure, "eigenvalues"),
    "density": (density_figure, "density"),
    "contours": (contour_figure, "landscape"),
    "surfaces": (surface_figure, "landscape"),
}


def flatness_entries(runs: pd.DataFrame, part: str) -> dict[str, Mapping[str, Any]]:
    """Return the first measurement with this part for each row, by title: of a network, that of the most samples.

    The eigenvalue at the end of training is no spectrum: only the table shows it.
    """
    entries: dict[str, Mapping[str, Any]] = {}
    for run in runs[["row", "seed", "flatness", "settings"]].to_dict("records"):
        entry = next((entry for entry in run["flatness"] or () if entry.get(part)), None)
        if entry is None or (part == "eigenvalues" and len(entry[part].get("values", ())) < 2):
            continue
        entries.setdefault(run["row"], {**entry, "run": {**run["settings"], "seed": run["seed"]}})
    several = len({entry["run"]["seed"] for entry in entries.values()}) > 1
    return {f"{row}, seed {entry['run']['seed']}" if several else row: entry for row, entry in entries.items()}


def _draw(name: str, draw: Any, runs: pd.DataFrame, epochs: pd.DataFrame) -> dict[str, Any] | None:
    figure = draw(runs, epochs)
    return None if figure is None else figure_info(figure, name)


def _draw_flatness(name: str, runs: pd.DataFrame, _: pd.DataFrame) -> dict[str, Any] | None:
    draw, part = FLATNESS_FIGURES[name]
    figure = draw(flatness_entries(runs, part))
    return None if figure is None else figure_info(figure, name)


EXPERIMENT_FIGURES: dict[str, Figures] = {
    **{name: partial(_draw, name, draw) for name, draw in SCORE_FIGURES.items()},
    **{name: partial(_draw_flatness, name) for name in FLATNESS_FIGURES},
    "pictures": picture_rows,
}
RECIPE_FIGURES: dict[str, Figures] = {"columns": partial(_draw, "columns", column_figure)}
