"""Figures of recipes: scores against a setting, such as the radius."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from ...analysis.experiment_titles import network_and_data, titles_of
from ...analysis.paper_numbers import total_radius
from ...common.grouping import group_by
from ...recipes.columns import (
    MEMORISED,
    TOP_EIGENVALUE,
    SeedStatistics,
    Value,
    score_of,
    seed_statistics,
    statistics_of,
)
from ...recipes.experiments import Axis, Recipe
from ...recipes.paper import Published
from ...recipes.variants import variant_of, variants
from ...training.run_dir import RunState
from .epoch_figures import score_metric
from .panels import DASHES, legend, line_style, new_figure, save, seeds_text, tidy, typeset

BY_GAPS = [DASHES[i] for i in (0, 2, 1, 3, 4)]  # ordered by the size of their gaps
METRICS: Mapping[str, Value] = {
    "": score_of,  # labelled with the measure of the task
    "wrong labels memorised, %": MEMORISED.value,
    TOP_EIGENVALUE.header: TOP_EIGENVALUE.value,
}
Line: TypeAlias = dict[float, list[SeedStatistics | None]]  # METRICS by total radius; 0 for the base optimizer alone


@dataclass(frozen=True)
class AccuracyLine:
    """The score of a variant on a data set against a setting, and the published numbers."""

    panel: str
    title: str
    variant: str
    method: str
    x: tuple[float, ...]
    ours: tuple[SeedStatistics, ...]
    paper: tuple[Published | None, ...]


def accuracy_lines_info(recipe: Recipe, states: Sequence[RunState]) -> list[AccuracyLine]:
    """Return a line per data set and variant, from finished runs, against the recipe's axis."""
    axis = recipe.axis
    assert axis is not None  # the recipe has checked it

    def line_of(state: RunState) -> tuple[str, str]:
        return recipe.titled(", ".join(reversed(titles_of(state.run)))), variant_of(state.run).name

    lines = []
    for (panel, _), group in group_by((state for state in states if state.finished), line_of).items():
        variant = variant_of(group[0].run)
        points = sorted(group_by(group, lambda state: axis.value(state.run)).items())
        ours = tuple(seed_statistics([score_of(state) for state in seeds]) for _, seeds in points)
        paper = tuple(recipe.published(seeds[0].run) for _, seeds in points)
        x = tuple(value for value, _ in points)
        lines.append(AccuracyLine(panel, variant.title, variant.name, variant.method, x, ours, paper))
    return lines


def plot_accuracy_lines(lines: Sequence[AccuracyLine], axis: Axis, ylabel: str, path: Path) -> None:
    """Draw a panel per data set: our lines with whiskers of one standard deviation, published ones thin with squares.

    Variants of a method share their published numbers, which are drawn once.
    """
    titles, variants = (list(dict.fromkeys(getattr(line, name) for line in lines)) for name in ("panel", "variant"))
    figure = new_figure(5.2 * len(titles), 4.2)
    axes = figure.subplots(1, len(titles), squeeze=False)[0]
    for ax, title in zip(axes, titles, strict=True):
        in_panel = [line for line in lines if line.panel == title]
        ticks = sorted({x for line in in_panel for x in line.x})
        for line in in_panel:
            _draw_accuracy_line(ax, line, variants, axis.log, span=ticks[-1] - ticks[0])
        known_numbers: list[tuple[str, list[tuple[float, float]]]] = []
        for line in in_panel:
            known = [(x, number.mean) for x, number in zip(line.x, line.paper, strict=True) if number is not None]
            if known and (line.method, known) not in known_numbers:
                known_numbers.append((line.method, known))
                style = {"color": line_style(variants.index(line.variant))["color"], "linewidth": 0.6, "alpha": 0.8}
                marker = {"marker": "s", "markersize": 6, "markerfacecolor": "none"}
                ax.plot(*zip(*known, strict=True), label=f"{line.title.split(' (')[0]}, paper", **style, **marker)
        _label_axis(ax, typeset(axis.label), ticks, axis.log)
        ax.set_title(title)
    axes[0].set_ylabel(ylabel)
    legend(figure, columns=2 * len(titles), handlelength=3)
    save(figure, path)


def _draw_accuracy_line(ax: Any, line: AccuracyLine, variants: Sequence[str], log: bool, span: float) -> None:
    """Draw a line. Lines that coincide stay visible: those with smaller gaps are wider and drawn first, and points are
    shifted sideways.
    """
    number = variants.index(line.variant)
    level = sorted(range(len(variants)), key=lambda n: (BY_GAPS.index(line_style(n)["linestyle"]), n)).index(number)
    shift = number - (len(variants) - 1) / 2
    x = [value * 1.025**shift if log else value + 0.012 * span * shift for value in line.x]
    style = {
        **line_style(number),
        "linewidth": max(3.6 - 0.4 * level, 1.0),
        "elinewidth": 1.2,
        "zorder": 2 + level / 100,
    }
    error_bars(ax, x, line.ours, label=line.title, **style)


def error_bars(ax: Any, x: Sequence[float], points: Sequence[SeedStatistics], **style: Any) -> None:
    """Draw means, with whiskers of one standard deviation if there are several seeds."""
    deviations = [point.std or 0.0 for point in points]
    spread = deviations if any(deviations) else None
    ax.errorbar(x, [point.mean for point in points], spread, marker="o", markersize=4, capsize=3, **style)


def draw_accuracy_lines(recipe: Recipe, states: Sequence[RunState], path: Path) -> None:
    """Draw the score after the last epoch against the recipe's axis."""
    ylabel = score_metric(states[0].run).label.replace(", %", ", last epoch, %")
    assert recipe.axis is not None  # the recipe has checked it
    plot_accuracy_lines(accuracy_lines_info(recipe, states), recipe.axis, ylabel, path)


def radius_lines_info(states: Sequence[RunState]) -> dict[str, Line]:
    """Return a line per method, from finished runs, by title in the order of the tables."""
    order = [variant.title for variant in variants().values()]
    groups = group_by((state for state in states if state.finished), lambda state: variant_of(state.run).title)
    lines = {}
    for title in sorted(groups, key=order.index):
        points = group_by(groups[title], lambda state: total_radius(state.run) or 0.0)
        lines[title] = {x: [statistics_of(points[x], value) for value in METRICS.values()] for x in sorted(points)}
    return lines


def draw_radius(recipe: Recipe, states: Sequence[RunState], path: Path) -> None:
    """Draw accuracy, memorised labels and the largest eigenvalue against the total radius, with a line per method.

    The base optimizer alone is a horizontal line.
    """
    lines, run = radius_lines_info(states), states[0].run
    figure = new_figure(13.0, 4.4)
    axes = figure.subplots(1, len(METRICS))
    for i, (ax, label) in enumerate(zip(axes, METRICS, strict=True)):
        for number, (title, line) in enumerate(lines.items()):
            _draw_line(ax, {x: point for x, points in line.items() if (point := points[i]) is not None}, title, number)
        ticks = sorted({x for line in lines.values() for x in line if x})
        _label_axis(ax, r"total radius: $\rho$, or $\rho_{\max} + \rho_{\min}$", ticks, log=True)
        ax.set_ylabel(label or score_metric(run).label)
    counts = [points[0].n for line in lines.values() for points in line.values() if points[0] is not None]
    legend(figure, columns=len(lines), handlelength=3)
    spread = ", whiskers of one standard deviation" if max(counts) > 1 else ""
    figure.suptitle(f"{network_and_data(run)}, {run.noise_text()}; {seeds_text(counts)}{spread}", fontsize=11)
    save(figure, path)


def _draw_line(ax: Any, points: Mapping[float, SeedStatistics], title: str, number: int) -> None:
    style = line_style(number)
    if list(points) == [0.0]:
        ax.axhline(points[0.0].mean, label=title, linewidth=1.2, **style)
        return
    x = [total * 1.03**number for total in points]  # separates the whiskers
    error_bars(ax, x, list(points.values()), label=title, **style)


def _label_axis(ax: Any, label: str, ticks: Sequence[float], log: bool) -> None:
    if log:
        ax.set_xscale("log")
    ax.set_xticks(ticks, [f"{x:g}" for x in ticks])
    ax.minorticks_off()
    ax.set_xlabel(label)
    tidy(ax)
