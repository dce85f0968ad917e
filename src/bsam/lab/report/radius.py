"""The figure for the study of the total radius."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from ..recipes.columns import MEMORISED, TOP_EIGENVALUE, SeedStatistics, Value, score_of, statistics_of
from ..recipes.experiments import Recipe
from ..recipes.radius_study import total_radius
from ..recipes.variants import variant_of, variants
from ..training.run_dir import RunState
from .figures import error_bars, network_and_data, score_metric
from .panels import figure, legend, line_style, save, seeds_text, tidy

METRICS: Mapping[str, Value] = {
    "": score_of,  # labelled with the measure of the task
    "wrong labels memorised, %": MEMORISED.value,
    TOP_EIGENVALUE.header: TOP_EIGENVALUE.value,
}
Line: TypeAlias = dict[float, list[SeedStatistics | None]]  # METRICS by total radius; 0 for the base optimizer alone


def radius_lines_info(states: Sequence[RunState]) -> dict[str, Line]:
    """Return a line per method, from finished runs, by title in the order of the tables."""
    order = [variant.title for variant in variants().values()]
    groups: dict[str, dict[float, list[RunState]]] = {}
    for state in states:
        if state.finished:
            groups.setdefault(variant_of(state.run).title, {}).setdefault(total_radius(state.run), []).append(state)
    return {
        title: {
            x: [statistics_of(groups[title][x], value) for value in METRICS.values()] for x in sorted(groups[title])
        }
        for title in sorted(groups, key=order.index)
    }


def draw_radius(recipe: Recipe, states: Sequence[RunState], path: Path) -> None:
    """Draw accuracy, memorised labels and the largest eigenvalue against the total radius, with a line per method.

    The base optimizer alone is a horizontal line.
    """
    lines, run = radius_lines_info(states), states[0].run
    drawn = figure(13.0, 4.4)
    axes = drawn.subplots(1, len(METRICS))
    for i, (ax, label) in enumerate(zip(axes, METRICS, strict=True)):
        for number, (title, line) in enumerate(lines.items()):
            _draw_line(ax, {x: point for x, points in line.items() if (point := points[i]) is not None}, title, number)
        _label_axis(ax, label or score_metric(run).label, sorted({x for line in lines.values() for x in line if x}))
    counts = [points[0].n for line in lines.values() for points in line.values() if points[0] is not None]
    legend(drawn, columns=len(lines), handlelength=3)
    spread = ", whiskers of one standard deviation" if max(counts) > 1 else ""
    drawn.suptitle(f"{network_and_data(run)}, {run.noise_text()}; {seeds_text(counts)}{spread}", fontsize=11)
    save(drawn, path)


def _draw_line(ax: Any, points: Mapping[float, SeedStatistics], title: str, number: int) -> None:
    style = line_style(number)
    if list(points) == [0.0]:
        ax.axhline(points[0.0].mean, label=title, linewidth=1.2, **style)
        return
    x = [total * 1.03**number for total in points]  # separates the whiskers
    error_bars(ax, x, list(points.values()), label=title, **style)


def _label_axis(ax: Any, label: str, ticks: Sequence[float]) -> None:
    ax.set_xscale("log")
    ax.set_xticks(ticks, [f"{x:g}" for x in ticks])
    ax.minorticks_off()
    ax.set_xlabel(r"total radius: $\rho$, or $\rho_{\max} + \rho_{\min}$")
    ax.set_ylabel(label)
    tidy(ax)
