"""Pictures of recipes with a probe, with matplotlib: sharpness, and the cosine of g and g_min."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np

from ....common.errors import BsamValueError
from ...analysis.experiment_titles import network_and_data
from ...common.grouping import group_by
from ...inference.flatness_numbers import READING_FIELDS, read_probe
from ...recipes.experiments import Recipe
from ...recipes.variants import variant_of
from ...training.run_dir import RunState
from .flatness_figures import SHARPNESS as SHARPNESS
from .flatness_figures import smooth as smooth
from .panels import COLOURS, integer_ticks, legend, new_figure, save, seeds_text, tidy, typeset

LETTERS = 10  # letters of a title per inch


@dataclass(frozen=True)
class ProbeSeries:
    """The readings of the runs in a table cell, averaged over the seeds at each step. A reading uses one mini-batch."""

    title: str
    where: str
    section: str
    row: str
    columns: dict[str, list[float]]
    n: int


def probe_series_info(recipe: Recipe, states: Sequence[RunState]) -> list[ProbeSeries]:
    """Return the series of each cell of the table, from finished runs with a probe."""
    if all(state.run.probe is None for state in states):
        raise BsamValueError(
            f"no run of the recipe {recipe.name} has a probe: set `probe` in its runs to draw readings"
        )
    probed = [state for state in states if state.finished and state.run.probe is not None]
    groups = group_by(probed, lambda state: recipe.cell(state.run))
    series = []
    for cell, group in groups.items():
        seeds, run = [read_probe(state.path) for state in group], group[0].run
        columns = {name: np.mean([seed[name] for seed in seeds], axis=0).tolist() for name in READING_FIELDS}
        title, where = variant_of(run).title, recipe.titled(network_and_data(run))
        series.append(ProbeSeries(title, where, cell.section, cell.row, columns, len(seeds)))
    return series


def draw_sharpness_curves(recipe: Recipe, states: Sequence[RunState], path: Path) -> None:
    """Draw a panel per method on one scale: MaxS, MinS and BilS over the steps."""
    all_series = probe_series_info(recipe, states)
    figure = new_figure(3.4 * len(all_series), 3.9)
    axes = figure.subplots(1, len(all_series), squeeze=False, sharey=True)[0]
    for ax, series in zip(axes, all_series, strict=True):
        for i, (name, label) in enumerate(SHARPNESS.items()):
            _draw_series(ax, series, name, COLOURS[i + 1], label)
        _finish(ax, series.title)
    axes[0].set_ylabel("difference in loss, on a mini-batch")
    legend(figure, columns=len(SHARPNESS))
    _headline(figure, all_series, ", at each method's radii")
    save(figure, path)


def draw_gradient_conflict(recipe: Recipe, states: Sequence[RunState], path: Path) -> None:
    """Draw a column per section of the table and a line per row: the cosine of g and g_min over the steps, and rho_min
    below it.
    """
    all_series = probe_series_info(recipe, states)
    sections = list(dict.fromkeys(series.section for series in all_series))
    rows = list(dict.fromkeys(series.row for series in all_series))
    colours = dict(zip(rows, cycle(COLOURS[1:]), strict=False))  # a row has the same colour in all columns
    figure = new_figure(4.2 * len(sections), 5.6)
    axes = figure.subplots(2, len(sections), squeeze=False, sharex=True, sharey="row", height_ratios=(3, 1))
    for (upper, lower), section in zip(axes.T, sections, strict=True):
        in_section = [series for series in all_series if series.section == section]
        for series in in_section:
            colour = colours[series.row]
            _draw_series(upper, series, "cosine", colour, typeset(f"{recipe.rows} {series.row}"))
            lower.plot(series.columns["step"], series.columns["rho_min"], color=colour, linewidth=1.5)
        upper.axhline(0, color="black", linewidth=0.8)
        upper.set_title(in_section[0].title, fontsize=10)
        tidy(upper)
        _finish(lower)
    axes[0, 0].set_ylabel(r"cosine of $g$ and $g_{\min}$")
    axes[1, 0].set_ylabel(r"$\rho_{\min}$")
    legend(figure, columns=len(rows))
    _headline(figure, all_series)
    save(figure, path)


def _draw_series(ax: Any, series: ProbeSeries, name: str, colour: str, label: str) -> None:
    """Draw every reading faintly, and their running mean."""
    steps, values = series.columns["step"], series.columns[name]
    ax.plot(steps, values, color=colour, linewidth=0.6, alpha=0.3)
    ax.plot(steps, smooth(values), color=colour, linewidth=1.6, label=label)


def _finish(ax: Any, title: str = "") -> None:
    ax.set_title(title, fontsize=10)
    ax.set_xlabel("step")
    integer_ticks(ax)
    tidy(ax)


def _headline(figure: Any, all_series: Sequence[ProbeSeries], remark: str = "") -> None:
    seeds = seeds_text(series.n for series in all_series)
    text = f"{all_series[0].where}: running mean over the steps, {seeds}{remark}"
    figure.suptitle(textwrap.fill(text, int(LETTERS * figure.get_figwidth())), fontsize=11)
