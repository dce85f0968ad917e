"""What a probe recorded: sharpness, and the cosine of g and g_min. First the numbers, then the drawing."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from ..flatness.probe import Reading
from ..recipes.experiments import Recipe
from ..recipes.variants import variant_of
from ..training.run_dir import RunDir, RunState
from .figures import network_and_data
from .panels import COLOURS, figure, integer_ticks, legend, save, seeds_text, tidy

READING_FIELDS = tuple(field.name for field in fields(Reading))
SHARPNESS = {"max_sharpness": "MaxS", "min_sharpness": "MinS", "bilateral": "BilS"}
LETTERS = 10  # of a title that fit into an inch
SMOOTHED = 40  # the number of independent points of a smoothed line, about


def probe_info(readings: Sequence[Reading]) -> dict[str, list[float]]:
    """Return the readings as columns by name.

    Example:
        >>> rest = [1.0] * 6 + [0]
        >>> probe_info(
        ...     [Reading(0, 2.0, 0.3, 0.1, 0.4, *rest), Reading(10, 1.0, 0.2, 0.1, 0.3, *rest)]
        ... )["bilateral"]
        [0.4, 0.3]
    """
    return _columns([asdict(reading) for reading in readings])


def read_probe(folder: Path) -> dict[str, list[float]]:
    """Return the readings of a run as columns by name; a number that is null in the file is NaN."""
    return _columns(RunDir(folder).probe())


def _columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    return {name: [math.nan if row[name] is None else row[name] for row in rows] for name in READING_FIELDS}


def plot_probe(columns: Mapping[str, Sequence[Any]], path: str | Path) -> None:
    """Draw sharpness above the cosine of g and g_min, over the steps of a run."""
    drawn = figure(6.4, 6.0)
    upper, lower = drawn.subplots(2, 1, sharex=True)
    for (name, label), colour in zip(SHARPNESS.items(), COLOURS[1:], strict=False):
        upper.plot(columns["step"], columns[name], color=colour, label=label)
    largest = max((abs(value) for value in columns["bilateral"] if math.isfinite(value)), default=0.0)
    if largest > 0:  # the first steps are much sharper than the others, and MinS may be negative
        upper.set_yscale("symlog", linthresh=largest / 100, linscale=0.5)
        upper.yaxis.set_major_formatter("{x:g}")
    upper.set_ylabel("sharpness of the batch")
    upper.legend(frameon=False)
    lower.plot(columns["step"], columns["cosine"], color=COLOURS[0])
    lowest = min((value for value in columns["cosine"] if math.isfinite(value)), default=0.0)
    lower.set_ylim(lowest - 0.1 * (1.1 - lowest), 1 + 0.1 * (1.1 - lowest))
    lower.set_ylabel(r"cosine of $g$ and $g_{\min}$")
    lower.set_xlabel("step")
    integer_ticks(lower)
    for ax in (upper, lower):
        tidy(ax)
    save(drawn, path)


@dataclass(frozen=True)
class ProbeSeries:
    """The readings of a row of the recipe's table, each on one mini-batch: the mean over the seeds, by step."""

    title: str
    where: str
    section: str
    row: str
    columns: dict[str, list[float]]
    n: int


def probe_series_info(recipe: Recipe, states: Sequence[RunState]) -> list[ProbeSeries]:
    """Return the series of each row of the table, of finished runs."""
    groups: dict[tuple[str, str], list[RunState]] = {}
    for state in states:
        if state.finished:
            cell = recipe.cell(state.run)
            groups.setdefault((cell.section, cell.row), []).append(state)
    return [_series(recipe, section, row, group) for (section, row), group in groups.items()]


def _series(recipe: Recipe, section: str, row: str, states: Sequence[RunState]) -> ProbeSeries:
    seeds, run = [read_probe(state.path) for state in states], states[0].run
    columns = {name: np.mean([seed[name] for seed in seeds], axis=0).tolist() for name in READING_FIELDS}
    where = recipe.titled(network_and_data(run))
    return ProbeSeries(variant_of(run).title, where, section, row, columns, len(seeds))


def smooth(values: Sequence[float], points: int = SMOOTHED) -> list[float]:
    """Return a centred running mean, over fewer values at both ends.

    Example:
        >>> smooth([0.0, 3.0, 0.0, 3.0, 0.0, 3.0], points=2)
        [1.5, 1.0, 2.0, 1.0, 2.0, 1.5]
    """
    half = len(values) // points // 2
    return [float(np.mean(values[max(i - half, 0) : i + half + 1])) for i in range(len(values))]


def draw_sharpness_curves(recipe: Recipe, states: Sequence[RunState], path: Path) -> None:
    """Draw a panel per method on one scale: MaxS, MinS and BilS over the steps."""
    found = probe_series_info(recipe, states)
    drawn = figure(3.4 * len(found), 3.9)
    axes = drawn.subplots(1, len(found), squeeze=False, sharey=True)[0]
    for ax, series in zip(axes, found, strict=True):
        for i, (name, label) in enumerate(SHARPNESS.items()):
            _draw_series(ax, series, name, COLOURS[i + 1], label)
        _finish(ax, series.title)
    axes[0].set_ylabel("difference in loss, on a mini-batch")
    legend(drawn, columns=len(SHARPNESS))
    _headline(drawn, found, " (at each method's own radii: BSAM's $\\rho_{\\min}$ falls with the learning rate)")
    save(drawn, path)


def draw_gradient_conflict(recipe: Recipe, states: Sequence[RunState], path: Path) -> None:
    """Draw a column per form of BSAM: the cosine of g and g_min over the steps, and rho_min below it, a line per
    schedule.
    """
    found = probe_series_info(recipe, states)
    sections, rows = (list(dict.fromkeys(getattr(series, name) for series in found)) for name in ("section", "row"))
    colours = dict(zip(rows, COLOURS[1:], strict=False))  # the same one for a schedule in all columns
    drawn = figure(4.2 * len(sections), 5.6)
    axes = drawn.subplots(2, len(sections), squeeze=False, sharex=True, sharey="row", height_ratios=(3, 1))
    for (upper, lower), section in zip(axes.T, sections, strict=True):
        own = [series for series in found if series.section == section]
        for series in own:
            colour = colours[series.row]
            _draw_series(upper, series, "cosine", colour, f"$\\rho_{{\\min}}$ {series.row}")
            lower.plot(series.columns["step"], series.columns["rho_min"], color=colour, linewidth=1.5)
        upper.axhline(0, color="black", linewidth=0.8)
        upper.set_title(own[0].title, fontsize=10)
        tidy(upper)
        _finish(lower)
    axes[0, 0].set_ylabel(r"cosine of $g$ and $g_{\min}$")
    axes[1, 0].set_ylabel(r"$\rho_{\min}$")
    legend(drawn, columns=len(rows))
    _headline(drawn, found)
    save(drawn, path)


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


def _headline(drawn: Any, found: Sequence[ProbeSeries], remark: str = "") -> None:
    seeds = seeds_text(series.n for series in found)
    text = f"{found[0].where}: running mean over the steps, {seeds}{remark}"
    drawn.suptitle(textwrap.fill(text, int(LETTERS * drawn.get_figwidth())), fontsize=11)
