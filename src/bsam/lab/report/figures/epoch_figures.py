"""Figures of recipes: metrics over the epochs, and the demo's picture."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ...analysis.experiment_titles import network_and_data
from ...common.grouping import group_by
from ...recipes.columns import TOP_EIGENVALUE, SeedStatistics, TableCell, seed_statistics
from ...recipes.experiments import Recipe, table_info
from ...tasks import TASKS
from ...training.config import Run
from ...training.run_dir import RunState
from .landscape_figures import draw_contours, recipe_landscapes_info
from .panels import MAX_COLUMNS, integer_ticks, legend, line_style, new_figure, save, seeds_text, tidy, typeset

MAX_BANDS = 4  # more hide each other
LEGEND_COLUMNS = 6
DEMO_WIDTH = 13.0  # of the demo's picture, in inches


class EpochMetric(NamedTuple):
    """A metric to draw over the epochs: the label of its axis, and a function of the metrics of an epoch."""

    label: str
    value: Callable[[Mapping[str, Any]], float]


TRAIN_LOSS = EpochMetric("training loss", lambda metrics: metrics["train_loss"])
MEMORISED_METRIC = EpochMetric("wrong labels memorised, %", lambda metrics: 100 * metrics["memorised"])


def score_metric(run: Run) -> EpochMetric:
    """Return the measure of a run's task, to draw over the epochs."""
    measure = TASKS[run.task].measure
    label = f"{run.eval_split} {measure.title}".replace(" in %", ", %")
    return EpochMetric(label, lambda metrics: measure.shown(metrics, run.eval_split))


@dataclass(frozen=True)
class Curve:
    """Metrics of a cell of the table after each epoch, over the seeds."""

    title: str
    where: str
    metrics: tuple[tuple[SeedStatistics, ...], ...]

    @property
    def n(self) -> int:
        """The number of seeds."""
        return self.metrics[0][0].n


def curves_info(recipe: Recipe, states: Sequence[RunState], metrics: Sequence[EpochMetric]) -> list[Curve]:
    """Return a curve per cell of the table, from finished runs.

    Its title is the row's, followed by section and column if the table has several.
    """
    groups = group_by((state for state in states if state.finished), lambda state: recipe.cell(state.run))
    single_column = len({(cell.section, cell.column) for cell in groups}) == 1

    def curve(cell: TableCell, group: Sequence[RunState]) -> Curve:
        epochs = list(zip(*(state.epochs for state in group), strict=True))
        numbers = tuple(
            tuple(seed_statistics([metric.value(epoch) for epoch in seeds]) for seeds in epochs) for metric in metrics
        )
        if single_column:
            return Curve(cell.row, recipe.titled(network_and_data(group[0].run)), numbers)
        title = ", ".join(filter(None, (cell.row, cell.section, cell.column)))
        return Curve(title, recipe.title, numbers)

    return [curve(cell, group) for cell, group in groups.items()]


def plot_curves(curves: Sequence[Curve], metrics: Sequence[EpochMetric], path: Path) -> None:
    """Draw a panel per metric, as :func:`draw_curves` does."""
    figure = new_figure(4.6 * len(metrics), 4.2)
    axes = figure.subplots(1, len(metrics), squeeze=False)[0]
    for i, (ax, metric) in enumerate(zip(axes, metrics, strict=True)):
        draw_curves(ax, curves, i, metric.label)
    legend(figure, columns=LEGEND_COLUMNS, handlelength=3)
    figure.suptitle(f"{curves[0].where}, {curves_text(curves)}", fontsize=11)
    save(figure, path)


def curves_text(curves: Sequence[Curve]) -> str:
    """Describe the number of seeds, and how their deviation is drawn."""
    seeds = seeds_text(curve.n for curve in curves)
    if all(curve.n == 1 for curve in curves):
        return seeds
    if len(curves) > MAX_BANDS:
        return f"{seeds}, whiskers of one standard deviation at the last epoch"
    return f"{seeds}, bands of one standard deviation"


def draw_curves(ax: Any, curves: Sequence[Curve], which: int, label: str) -> None:
    """Draw a metric of each curve: the mean over the seeds, in a band of one standard deviation.

    With more than four curves, whiskers at the last epoch replace the bands, which would hide each other.

    Args:
        ax: the panel.
        curves: the curves, in the order of their line styles.
        which: the index of the metric.
        label: the label of the vertical axis.
    """
    for number, curve in enumerate(curves):
        _draw_curve(ax, curve.metrics[which], curve.title, number, len(curves) > MAX_BANDS)
    ax.set(xlabel="epoch", ylabel=label)
    integer_ticks(ax)
    tidy(ax)


def _draw_curve(ax: Any, values: Sequence[SeedStatistics], title: str, number: int, many: bool) -> None:
    style = line_style(number)
    epochs, marker = range(1, len(values) + 1), "o" if len(values) < 4 else ""
    ax.plot(epochs, [value.mean for value in values], label=typeset(title), linewidth=1.6, marker=marker, **style)
    if values[-1].std is not None and many:
        x = len(values) * (1.02 + 0.012 * number)  # side by side
        ax.vlines(x, *_ends(values[-1]), color=style["color"], linewidth=1.5)
        ax.plot(x, values[-1].mean, color=style["color"], marker="o", markersize=3.5)
    elif values[-1].std is not None:
        low, high = zip(*map(_ends, values), strict=True)
        ax.fill_between(epochs, low, high, color=style["color"], alpha=0.13, linewidth=0)


def _ends(value: SeedStatistics) -> tuple[float, float]:
    deviation = value.std or 0.0
    return value.mean - deviation, value.mean + deviation


def draw_training_curves(recipe: Recipe, states: Sequence[RunState], path: Path) -> None:
    """Draw training loss, test loss if the task has one, and the score, such as test accuracy."""
    smoothed = any(state.run.label_smoothing for state in states)
    train_loss = TRAIN_LOSS._replace(label="training loss, with label smoothing") if smoothed else TRAIN_LOSS
    split, metrics = states[0].run.eval_split, [train_loss, score_metric(states[0].run)]
    if all(f"{split}_loss" in epoch for state in states for epoch in state.epochs):
        metrics.insert(1, EpochMetric(f"{split} loss", lambda metrics: metrics[f"{split}_loss"]))
    plot_curves(curves_info(recipe, states, metrics), metrics, path)


def draw_demo(recipe: Recipe, states: Sequence[RunState], path: Path) -> None:
    """Draw accuracy and memorised labels over the epochs, the largest eigenvalues, and the loss around each network."""
    accuracy = score_metric(states[0].run)
    curves = curves_info(recipe, states, (accuracy, MEMORISED_METRIC))
    eigenvalues = {summary.cell.row: summary.details[TOP_EIGENVALUE.name] for summary in table_info(recipe, states)}
    surfaces = recipe_landscapes_info(recipe, states)  # none before the first seed's runs are finished
    columns = min(max(len(surfaces), 1), MAX_COLUMNS)
    heights = [4.2, 4.0 * math.ceil(len(surfaces) / columns)] if surfaces else [4.2]
    figure = new_figure(DEMO_WIDTH, sum(heights))
    parts = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
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
    save(figure, path)


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
