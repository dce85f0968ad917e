"""The demo's picture."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..recipes.columns import TOP_EIGENVALUE, SeedStatistics
from ..recipes.experiments import Recipe, table_info
from ..training.run_dir import RunState
from .figures import LEGEND_COLUMNS, EpochMetric, curves_info, curves_text, draw_curves, score_metric
from .landscapes import draw_contours, recipe_landscapes_info
from .panels import MAX_COLUMNS, figure, legend, line_style, save, tidy

MEMORISED_METRIC = EpochMetric("wrong labels memorised, %", lambda metrics: 100 * metrics["memorised"])
WIDTH = 13.0  # of the picture, in inches


def draw_demo(recipe: Recipe, states: Sequence[RunState], path: Path) -> None:
    """Draw accuracy and memorised labels over the epochs, the largest eigenvalues, and the loss around each network."""
    accuracy = score_metric(states[0].run)
    curves = curves_info(recipe, states, (accuracy, MEMORISED_METRIC))
    eigenvalues = {summary.cell.row: summary.details[TOP_EIGENVALUE.name] for summary in table_info(recipe, states)}
    surfaces = recipe_landscapes_info(recipe, states)  # none before the first seed's runs are finished
    columns = min(max(len(surfaces), 1), MAX_COLUMNS)
    heights = [4.2, 4.0 * math.ceil(len(surfaces) / columns)][: 1 + bool(surfaces)]
    drawn = figure(WIDTH, sum(heights))
    parts = drawn.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    left, middle, right = parts[0].subplots(1, 3, width_ratios=(3, 3, 2))
    draw_curves(left, curves, 0, accuracy.label)
    draw_curves(middle, curves, 1, MEMORISED_METRIC.label)
    _draw_eigenvalues(right, {curve.title: eigenvalues[curve.title] for curve in curves})
    legend(parts[0], columns=LEGEND_COLUMNS, handlelength=3)
    parts[0].suptitle(f"{curves[0].where}, {states[0].run.noise_text()}; {curves_text(curves)}", fontsize=11)
    if surfaces:
        axes = parts[1].subplots(math.ceil(len(surfaces) / columns), columns, squeeze=False).flatten()
        draw_contours(parts[1], list(zip(surfaces, axes, strict=False)))
        axes[0].set_ylabel("second direction")
        titles = [curve.title for curve in curves]
        for info, ax in zip(surfaces, axes, strict=False):
            ax.set_title(ax.get_title(), fontsize=10, color=line_style(titles.index(info.title))["color"])
        for ax in axes[len(surfaces) :]:
            ax.set_visible(False)
        parts[1].suptitle(f"Loss on the training data around the network of seed {states[0].run.seed}", fontsize=11)
    save(drawn, path)


def _draw_eigenvalues(ax: Any, eigenvalues: Mapping[str, SeedStatistics | None]) -> None:
    values = list(eigenvalues.values())
    for number, value in enumerate(values):
        if value is not None:
            colour = line_style(number)["color"]
            ax.errorbar(number, value.mean, value.std, color=colour, marker="o", markersize=7, capsize=4)
    ax.set_xticks(range(len(values)), list(eigenvalues), rotation=35, ha="right", rotation_mode="anchor", fontsize=8)
    ax.set_xlim(-0.5, len(values) - 0.5)
    ends = [0.0, *(value.mean + side * (value.std or 0.0) for value in values if value is not None for side in (-1, 1))]
    margin = 0.06 * (max(ends) - min(ends)) or 1.0
    ax.set_ylim(min(ends) - margin, max(ends) + margin)
    ax.set_ylabel(textwrap.fill(TOP_EIGENVALUE.header, 24))  # in two lines
    tidy(ax)
