"""The demo's picture, and what its numbers show."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..data.digits import TEST, TRAIN, VALIDATION
from ..recipes.digits_demo import TUNED_SGD, WEIGHT_DECAYS
from ..recipes.experiments import Recipe
from ..training.config import Run
from ..training.run_dir import RunState
from .figures import ACCURACY, LEGEND_COLUMNS, EpochMetric, curves_info, curves_text, draw_curves
from .landscapes import draw_contours, recipe_landscapes_info
from .panels import MAX_COLUMNS, figure, legend, line_style, save, tidy
from .tables import CellSummary, SeedStatistics, chosen_text, table_info

MEMORISED = EpochMetric("flipped labels learned by heart, %", lambda metrics: 100 * metrics["memorised"])
SGD = "SGD"


def draw_demo(recipe: Recipe, states: Sequence[RunState], path: Path) -> None:
    """Draw accuracy and memorised labels over the epochs, the largest eigenvalue, and the loss around each network."""
    curves = curves_info(recipe, states, (ACCURACY, MEMORISED))
    eigenvalues = {each.cell.row: each.details["top_eigenvalue"] for each in table_info(recipe, states)}
    surfaces = recipe_landscapes_info(recipe, states)
    columns = max(min(len(surfaces), MAX_COLUMNS), 1)
    rows = math.ceil(len(surfaces) / columns)
    drawn = figure(13.5, 4.4 + 3.3 * rows)
    upper, *lower = drawn.subfigures(1 + bool(rows), 1, height_ratios=[4.4, 3.3 * rows][: 1 + bool(rows)], squeeze=False)
    upper = upper[0]
    left, middle, right = upper.subplots(1, 3, width_ratios=(3, 3, 2))
    draw_curves(left, curves, 0, ACCURACY.label)
    draw_curves(middle, curves, 1, MEMORISED.label)
    _draw_eigenvalues(right, [(curve.title, eigenvalues[curve.title]) for curve in curves])
    if rows:
        axes = lower[0][0].subplots(rows, columns, squeeze=False).flatten()
        draw_contours(lower[0][0], list(zip(surfaces, axes, strict=False)))
        for ax in axes[len(surfaces) :]:
            ax.set_visible(False)
    legend(drawn, columns=LEGEND_COLUMNS, handlelength=3)
    noise = states[0].run.label_noise
    drawn.suptitle(f"{curves[0].where}, {noise:.0%} of the training labels flipped. {curves_text(curves).capitalize()}")
    save(drawn, path)


def _draw_eigenvalues(ax: Any, values: Sequence[tuple[str, SeedStatistics | None]]) -> None:
    for number, (title, found) in enumerate(values):
        if found is not None:
            colour = line_style(number)["color"]
            ax.errorbar(number, found.mean, found.std, color=colour, marker="o", markersize=7, capsize=4)
    ax.set_xticks([])
    ax.set_ylabel("largest eigenvalue of the Hessian")
    tidy(ax)
