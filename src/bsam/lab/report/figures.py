"""Figures of recipes: scores against a setting, and metrics over the epochs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ..recipes.columns import SeedStatistics, TableCell, score_of, seed_statistics
from ..recipes.experiments import Axis, Recipe
from ..recipes.paper import Published
from ..recipes.variants import variant_of
from ..tasks import TASKS
from ..training.config import Run
from ..training.run_dir import RunState
from .epochs import titles_of
from .panels import DASHES, figure, integer_ticks, legend, line_style, save, seeds_text, tidy, typeset

MAX_BANDS = 4  # more hide each other
LEGEND_COLUMNS = 6
BY_GAPS = [DASHES[i] for i in (0, 2, 1, 3, 4)]  # ordered by the size of their gaps


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
    groups: dict[tuple[str, str], dict[float, list[RunState]]] = {}
    for state in states:
        if state.finished:
            run = state.run
            panel = recipe.titled(", ".join(reversed(titles_of(run))))
            groups.setdefault((panel, variant_of(run).name), {}).setdefault(axis.value(run), []).append(state)
    return [_line(recipe, panel, points) for (panel, _), points in groups.items()]


def _line(recipe: Recipe, panel: str, points: Mapping[float, Sequence[RunState]]) -> AccuracyLine:
    x, groups = zip(*sorted(points.items()), strict=True)
    variant = variant_of(groups[0][0].run)
    ours = tuple(seed_statistics([score_of(state) for state in group]) for group in groups)
    paper = tuple(recipe.published(group[0].run) for group in groups)
    return AccuracyLine(panel, variant.title, variant.name, variant.method, x, ours, paper)


def plot_accuracy_lines(lines: Sequence[AccuracyLine], axis: Axis, ylabel: str, path: Path) -> None:
    """Draw a panel per data set: our lines with whiskers of one standard deviation, published ones thin with squares.

    Variants of a method share their published numbers, which are drawn once.
    """
    titles, variants = (list(dict.fromkeys(getattr(line, name) for line in lines)) for name in ("panel", "variant"))
    drawn = figure(5.2 * len(titles), 4.2)
    axes = drawn.subplots(1, len(titles), squeeze=False)[0]
    for ax, title in zip(axes, titles, strict=True):
        in_panel = [line for line in lines if line.panel == title]
        ticks = sorted({x for line in in_panel for x in line.x})
        for line in in_panel:
            _draw_accuracy_line(ax, line, variants, axis.log, span=ticks[-1] - ticks[0])
        drawn_numbers = []
        for line in in_panel:
            known = [(x, number.mean) for x, number in zip(line.x, line.paper, strict=True) if number is not None]
            if known and (line.method, known) not in drawn_numbers:
                drawn_numbers.append((line.method, known))
                style = {"color": line_style(variants.index(line.variant))["color"], "linewidth": 0.6, "alpha": 0.8}
                marker = {"marker": "s", "markersize": 6, "markerfacecolor": "none"}
                ax.plot(*zip(*known, strict=True), label=f"{line.title.split(' (')[0]}, paper", **style, **marker)
        if axis.log:
            ax.set_xscale("log")
        ax.set_xticks(ticks, [f"{x:g}" for x in ticks])
        ax.minorticks_off()
        ax.set_title(title)
        ax.set_xlabel(typeset(axis.label))
        tidy(ax)
    axes[0].set_ylabel(ylabel)
    legend(drawn, columns=2 * len(titles), handlelength=3)
    save(drawn, path)


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


class EpochMetric(NamedTuple):
    """A metric to draw over the epochs: the label of its axis, and a function of the metrics of an epoch."""

    label: str
    value: Callable[[Mapping[str, Any]], float]


TRAIN_LOSS = EpochMetric("training loss", lambda metrics: metrics["train_loss"])


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
    groups: dict[TableCell, list[RunState]] = {}
    for state in states:
        if state.finished:
            groups.setdefault(recipe.cell(state.run), []).append(state)
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


def network_and_data(run: Run) -> str:
    """Return network and data set as text."""
    return " on ".join(titles_of(run))


def plot_curves(curves: Sequence[Curve], metrics: Sequence[EpochMetric], path: Path) -> None:
    """Draw a panel per metric, as :func:`draw_curves` does."""
    drawn = figure(4.6 * len(metrics), 4.2)
    axes = drawn.subplots(1, len(metrics), squeeze=False)[0]
    for i, (ax, metric) in enumerate(zip(axes, metrics, strict=True)):
        draw_curves(ax, curves, i, metric.label)
    legend(drawn, columns=LEGEND_COLUMNS, handlelength=3)
    drawn.suptitle(f"{curves[0].where}, {curves_text(curves)}", fontsize=11)
    save(drawn, path)


def curves_text(curves: Sequence[Curve]) -> str:
    """Describe the number of seeds, and how their deviation is drawn."""
    where = " at the last epoch" if len(curves) > MAX_BANDS else ""
    drawn = "whiskers" if len(curves) > MAX_BANDS else "bands"
    deviation = f", {drawn} of one standard deviation{where}" if max(curve.n for curve in curves) > 1 else ""
    return f"{seeds_text(curve.n for curve in curves)}{deviation}"


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
    ax.set_xlabel("epoch")
    ax.set_ylabel(label)
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
