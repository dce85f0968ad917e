"""Results of a classifier by class: accuracies, the confusion matrix and the worst mistakes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...analysis.experiment_titles import network_and_data
from ...recipes.variants import variant_of
from ...training.config import Run
from .panels import COLOURS, encoded, new_figure, panel_title, picture_grid, printable

MAX_COUNTS = 20  # classes; with more, the cells of the matrix show no numbers
MAX_NAMES = 60  # classes; with more, their names do not fit along the axes
MAX_LETTERS = 25  # letters of a name along the axes; longer names would shrink the matrix
CELL = 0.42  # inches, the side of a cell with a number


@dataclass(frozen=True)
class ClassAccuracy:
    """The accuracy of a classifier on one class.

    Args:
        name: the name of the class.
        samples: the number of its samples in the evaluation set.
        accuracy: the share that is classified correctly; None without samples.
        mistaken_for: the most frequent wrong prediction and its count; None if there is none.
    """

    name: str
    samples: int
    accuracy: float | None
    mistaken_for: tuple[str, int] | None


def classes_info(predictions: Mapping[str, NDArray[Any]]) -> list[ClassAccuracy]:
    """Return the accuracy of each class, from the ``predictions.npz`` of a classification run.

    Example:
        >>> predictions = {
        ...     "confusion": np.array([[8, 2], [0, 5]]),
        ...     "class_names": np.array(["cat", "dog"]),
        ... }
        >>> classes_info(predictions)[0]
        ClassAccuracy(name='cat', samples=10, accuracy=0.8, mistaken_for=('dog', 2))
    """
    names, confusion = _names(predictions), predictions["confusion"]
    classes = []
    for number, row in enumerate(confusion):
        samples, right = int(row.sum()), int(row[number])
        wrong = row.copy()
        wrong[number] = 0
        worst = (names[wrong.argmax()], int(wrong.max())) if wrong.any() else None
        classes.append(ClassAccuracy(names[number], samples, right / samples if samples else None, worst))
    return classes


def classes_table(run: Run, predictions: Mapping[str, NDArray[Any]]) -> str:
    """Return the accuracies as a table in Markdown, the lowest first."""
    rows = sorted(classes_info(predictions), key=lambda row: math.inf if row.accuracy is None else row.accuracy)
    lines = [f"# {_title(run, predictions)}", "", "| class | samples | accuracy in % | most often mistaken for |"]
    lines.append("|---|---|---|---|")
    for row in rows:
        accuracy = "-" if row.accuracy is None else f"{100 * row.accuracy:.1f}"
        mistaken_for = "-" if row.mistaken_for is None else f"{row.mistaken_for[0]} ({row.mistaken_for[1]})"
        cells = (text.replace("|", "\\|") for text in (row.name, str(row.samples), accuracy, mistaken_for))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def draw_confusion(run: Run, predictions: Mapping[str, NDArray[Any]]) -> Any:
    """Return a figure of the confusion matrix: a row per true class, a column per predicted class."""
    from matplotlib.colors import PowerNorm

    confusion = predictions["confusion"]
    names = [name if len(name) <= MAX_LETTERS else f"{name[: MAX_LETTERS - 1]}…" for name in _names(predictions)]
    share = confusion / np.maximum(confusion.sum(axis=1, keepdims=True), 1)
    side = min(max(CELL * len(names), 3.0), CELL * MAX_COUNTS)
    figure = new_figure(side + 2.2, side + 1.4)
    ax = figure.add_subplot()
    picture = ax.imshow(share, cmap="Blues", norm=PowerNorm(0.5, 0, 1))  # makes rare mistakes visible
    if len(names) <= MAX_COUNTS:
        for (row, column), count in np.ndenumerate(confusion):
            colour = "white" if share[row, column] > 0.4 else "black"
            ax.text(column, row, str(count) if count else "", ha="center", va="center", fontsize=8, color=colour)
    if len(names) <= MAX_NAMES:
        size = 9 if len(names) <= MAX_COUNTS else 6
        long = max(map(len, names)) > 3
        ax.set_xticks(range(len(names)), names, rotation=90 if long else 0, fontsize=size, parse_math=False)
        ax.set_yticks(range(len(names)), names, fontsize=size, parse_math=False)
    ax.set(xlabel="predicted class", ylabel="true class")
    ax.set_title(_figure_title(run, predictions), fontsize=10, parse_math=False)
    figure.colorbar(picture, ax=ax, shrink=0.8, label="share of the class")
    return figure


def draw_mistakes(run: Run, predictions: Mapping[str, NDArray[Any]]) -> Any:
    """Return a figure of the most confident wrong predictions, the most confident first."""
    names, pixels = _names(predictions), predictions["pixels"]
    figure, axes = picture_grid(len(pixels), 1.9, 2.3, margin=0.6, least=3.2)
    for number, ax in enumerate(axes):
        truth, predicted = names[predictions["truth"][number]], names[predictions["found"][number]]
        ax.imshow(pixels[number].squeeze(), cmap="gray", vmin=0, vmax=255)
        title = panel_title(f"{predicted}, {predictions['confidence'][number]:.1%}")
        ax.set_title(title, fontsize=9, color=COLOURS[2], parse_math=False)
        ax.set_xlabel(panel_title(f"true: {truth}"), fontsize=9, parse_math=False)
    figure.suptitle(f"{_figure_title(run, predictions)}, most confident mistakes", fontsize=10, parse_math=False)
    return figure


def class_report(run: Run, predictions: Mapping[str, NDArray[Any]]) -> dict[str, bytes]:
    """Return the files that ``bsam train`` adds to a classification run, by name: a table, and pictures if matplotlib
    is installed.
    """
    if "confusion" not in predictions:
        return {}
    files = {"classes.md": classes_table(run, predictions).encode()}
    if find_spec("matplotlib") is None:
        return files
    files["confusion.png"] = encoded(draw_confusion(run, predictions), "png")
    if len(predictions["pixels"]):
        files["mistakes.png"] = encoded(draw_mistakes(run, predictions), "png")
    return files


def _title(run: Run, predictions: Mapping[str, NDArray[Any]]) -> str:
    confusion = predictions["confusion"]
    accuracy = confusion.trace() / confusion.sum()
    return printable(f"{variant_of(run).title}, {network_and_data(run)}: {run.eval_split} accuracy {accuracy:.1%}")


def _figure_title(run: Run, predictions: Mapping[str, NDArray[Any]]) -> str:
    return _title(run, predictions).replace(": ", "\n", 1)


def _names(predictions: Mapping[str, NDArray[Any]]) -> list[str]:
    return [printable(name) for name in predictions["class_names"].tolist()]
