"""The figures of the recipes: accuracy against a setting, loss and accuracy over the epochs. First the numbers, then
the drawing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from ..data import DATASETS
from ..models import MODELS
from ..recipes.catalogue import BASELINES, Recipe
from ..recipes.paper import Published
from ..recipes.runner import State
from ..recipes.variants import variant_of
from ..training.config import Run
from .comparison import shown
from .figures import COLOURS
from .panels import figure, legend, save, tidy
from .probe_figures import plot_conflicts, plot_sharpness, readings_info, seeds_text
from .tables import Spread, spread


@dataclass(frozen=True)
class Line:
    """Accuracy in % of a method on a data set, against a setting; and the paper's, where it has any."""

    panel: str
    title: str
    method: str
    x: tuple[float, ...]
    ours: tuple[Spread, ...]
    paper: tuple[Published | None, ...]


def accuracy_lines_info(recipe: Recipe, states: Sequence[State]) -> list[Line]:
    """One line per data set and method, of finished runs: against the share of flipped labels, or against rho_min."""
    setting = label_noise_of if recipe.table == "label_noise" else rho_min_of
    groups: dict[tuple[str, str], dict[float, list[State]]] = {}
    for state in states:
        if state.finished:
            panel = f"{DATASETS[state.run.data].title}, {MODELS[state.run.model].title}"
            groups.setdefault((panel, variant_of(state.run).name), {}).setdefault(setting(state.run), []).append(state)
    return [_line(recipe, panel, points) for (panel, _), points in groups.items()]


def label_noise_of(run: Run) -> float:
    """In %.

    Example:
        >>> label_noise_of(Run("sgd", label_noise=0.2))
        20.0
    """
    return 100 * run.label_noise


def rho_min_of(run: Run) -> float:
    """The radius downhill."""
    return run.arguments["rho_min"]


def _line(recipe: Recipe, panel: str, points: Mapping[float, Sequence[State]]) -> Line:
    x, groups = zip(*sorted(points.items()), strict=True)
    run = groups[0][0].run
    ours = tuple(spread([shown(state) for state in group]) for group in groups)
    return Line(
        panel,
        variant_of(run).title,
        variant_of(run).name,
        x,
        ours,
        tuple(recipe.published(group[0].run) for group in groups),
    )


def plot_accuracy_lines(lines: Sequence[Line], xlabel: str, path: Path, log: bool = False) -> None:
    """A panel per data set: ours in full, with whiskers of one standard deviation; the paper's dashed."""
    titles = list(dict.fromkeys(line.panel for line in lines))
    drawn = figure(5.2 * len(titles), 4.2)
    axes = drawn.subplots(1, len(titles), squeeze=False)[0]
    for ax, title in zip(axes, titles, strict=True):
        own = [line for line in lines if line.panel == title]
        for i, line in enumerate(own):
            means, deviations = [point.mean for point in line.ours], [point.std or 0.0 for point in line.ours]
            x = [value * 1.02**i for value in line.x] if log and any(deviations) else line.x  # whiskers side by side
            ax.errorbar(
                x,
                means,
                deviations if any(deviations) else None,
                color=colour(line.method),
                marker="o",
                markersize=4,
                capsize=3,
                label=line.title,
            )
        for line in own:
            known = [(x, number.mean) for x, number in zip(line.x, line.paper, strict=True) if number is not None]
            if known and line.method in ("sgd", "sam", "bsam"):  # the paper has one BSAM
                ax.plot(
                    *zip(*known, strict=True),
                    color=colour(line.method),
                    linestyle="--",
                    linewidth=1,
                    label=f"{line.title.split(' (')[0]}, paper",
                )
        if log:
            ax.set_xscale("log")
            ticks = sorted({x for line in own for x in line.x})
            ax.set_xticks(ticks, [f"{x:g}" for x in ticks])
            ax.minorticks_off()
        else:
            ax.set_xticks(sorted({x for line in own for x in line.x}))
        ax.set_title(title)
        ax.set_xlabel(xlabel)
        tidy(ax)
    axes[0].set_ylabel("test accuracy, last epoch, %")
    legend(drawn, columns=2 * len(titles))
    save(drawn, path)


@dataclass(frozen=True)
class Course:
    """A training: losses and accuracy (in %) after each epoch, the mean over the seeds."""

    where: str
    title: str
    method: str
    train_loss: tuple[float, ...]
    test_loss: tuple[float, ...]
    test_accuracy: tuple[float, ...]
    n: int


def training_curves_info(states: Sequence[State]) -> list[Course]:
    """One course per method, of finished runs."""
    groups: dict[str, list[State]] = {}
    for state in states:
        if state.finished:
            groups.setdefault(variant_of(state.run).name, []).append(state)
    return [_course(group) for group in groups.values()]


def _course(states: Sequence[State]) -> Course:
    epochs = list(zip(*(state.epochs for state in states), strict=True))

    def means(name: str, factor: float = 1) -> tuple[float, ...]:
        return tuple(factor * spread([metrics[name] for metrics in epoch]).mean for epoch in epochs)

    run, column = states[0].run, variant_of(states[0].run)
    where = f"{MODELS[run.model].title} on {DATASETS[run.data].title}"
    return Course(
        where,
        column.title,
        column.name,
        means("train_loss"),
        means("test_loss"),
        means("test_accuracy", 100),
        len(states),
    )


def plot_training_curves(courses: Sequence[Course], path: Path) -> None:
    """Training loss, test loss, test accuracy."""
    shown = (
        ("train_loss", "training loss, label smoothing in it"),
        ("test_loss", "test loss"),
        ("test_accuracy", "test accuracy, %"),
    )
    drawn = figure(4.2 * len(shown), 4.1)
    axes = drawn.subplots(1, len(shown))
    for ax, (name, label) in zip(axes, shown, strict=True):
        for course in courses:
            values = getattr(course, name)
            marker = "o" if len(values) < 4 else ""
            ax.plot(
                range(1, len(values) + 1),
                values,
                color=colour(course.method),
                label=course.title,
                linewidth=1.5,
                marker=marker,
            )
        ax.set_title(label, fontsize=10)
        ax.set_xlabel("epoch")
        ax.xaxis.get_major_locator().set_params(integer=True)
        tidy(ax)
    legend(drawn, columns=len(courses))
    drawn.suptitle(f"{courses[0].where}, {seeds_text(course.n for course in courses)}", fontsize=11)
    save(drawn, path)


def colour(method: str) -> str:
    """The same one for a method in all figures."""
    return COLOURS[BASELINES.index(method)]


Draw: TypeAlias = Callable[[Recipe, Sequence[State], Path], None]


def _accuracy_lines(recipe: Recipe, states: Sequence[State], path: Path) -> None:
    noise = recipe.table == "label_noise"
    plot_accuracy_lines(
        accuracy_lines_info(recipe, states),
        "flipped training labels, %" if noise else r"$\rho^{min}$ at the start",
        path,
        log=not noise,
    )


FIGURES: dict[str, Draw] = {
    "accuracy_lines": _accuracy_lines,
    "training_curves": lambda recipe, states, path: plot_training_curves(training_curves_info(states), path),
    "sharpness_curves": lambda recipe, states, path: plot_sharpness(readings_info(recipe, states), path),
    "gradient_conflict": lambda recipe, states, path: plot_conflicts(readings_info(recipe, states), path),
}
