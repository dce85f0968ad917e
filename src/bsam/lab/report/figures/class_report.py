"""Results of a classifier by class: accuracies, the confusion matrix and the worst mistakes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ...recipes.planning import titles_of
from ...recipes.variants import variant_of
from ...training.config import Run
from .figure_file import TEMPLATE, figures_html, plot_text
from .prediction_pictures import captioned, encoded, grid, printable, stack, text_picture
from .style import COLOURS

if TYPE_CHECKING:
    import plotly.graph_objects as go
    from PIL.Image import Image as Picture

MAX_COUNTS = 20  # classes; with more, the cells of the matrix show no numbers
MAX_NAMES = 60  # classes; with more, their names do not fit along the axes
MAX_LETTERS = 25  # letters of a name along the axes; longer names would shrink the matrix
SHARES = (0, 1, 5, 10, 25, 50, 100)  # ticks of the colours, %


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


def confusion_figure(predictions: Mapping[str, NDArray[Any]]) -> go.Figure:
    """Return the confusion matrix: a row per true class, a column per predicted class, coloured by share of the class.

    The scale of the colours makes rare mistakes visible.
    """
    import plotly.graph_objects as go

    names, confusion = _names(predictions), predictions["confusion"]
    share = 100 * confusion / np.maximum(confusion.sum(axis=1, keepdims=True), 1)
    hover = [
        [
            plot_text(f"true {truth}, predicted {found}: {n} ({part:.1f} %)")
            for found, n, part in zip(names, *row, strict=True)
        ]
        for truth, *row in zip(names, confusion, share, strict=True)
    ]
    counts = {"text": np.where(confusion, confusion.astype(str), ""), "texttemplate": "%{text}"}
    bar = {"title": {"text": "share, %"}, "tickvals": np.sqrt(SHARES), "ticktext": [str(n) for n in SHARES]}
    colours = {"colorscale": "Blues", "zmin": 0, "zmax": 10, "colorbar": bar}
    shown = counts if len(names) <= MAX_COUNTS else {}
    heatmap = go.Heatmap(z=np.sqrt(share), hovertext=hover, hoverinfo="text", **colours, **shown)
    ticks: dict[str, Any] = {"showticklabels": False}
    if len(names) <= MAX_NAMES:
        ticks = {"tickvals": list(range(len(names))), "ticktext": [plot_text(name, MAX_LETTERS) for name in names]}
    axis = {"constrain": "domain", "showgrid": False, "zeroline": False, "automargin": True, **ticks}
    figure = go.Figure(heatmap, {"template": TEMPLATE, "height": min(900, 460 + 24 * len(names))})
    figure.update_xaxes(title_text="predicted class", **axis)
    return figure.update_yaxes(title_text="true class", autorange="reversed", scaleanchor="x", **axis)


def mistakes_picture(run: Run, predictions: Mapping[str, NDArray[Any]]) -> Picture:
    """Return a picture of the most confident wrong predictions, the most confident first."""
    names = _names(predictions)
    columns = (predictions[name] for name in ("pixels", "found", "confidence", "truth"))
    pictures = [
        captioned(pixels, f"{names[found]}, {confidence:.1%}", [f"true: {names[truth]}"], COLOURS[2])
        for pixels, found, confidence, truth in zip(*columns, strict=True)
    ]
    sheet = grid(pictures)
    return stack(text_picture([f"{_title(run, predictions)}, most confident mistakes"], sheet.width), sheet)


def class_report(run: Run, predictions: Mapping[str, NDArray[Any]]) -> dict[str, bytes]:
    """Return the files that ``bsam train`` adds to a classification run, by name.

    They are a table; the confusion matrix, if plotly is installed; and the worst mistakes, if Pillow is installed.
    """
    if "confusion" not in predictions:
        return {}
    files = {"classes.md": classes_table(run, predictions).encode()}
    if find_spec("plotly") is not None:
        title = _title(run, predictions)
        files["confusion.html"] = figures_html(title, {"Confusion matrix": confusion_figure(predictions)})
    if find_spec("PIL") is not None and len(predictions["pixels"]):
        files["mistakes.png"] = encoded(mistakes_picture(run, predictions), "png")
    return files


def _title(run: Run, predictions: Mapping[str, NDArray[Any]]) -> str:
    confusion = predictions["confusion"]
    accuracy = confusion.trace() / confusion.sum()
    return printable(
        f"{variant_of(run).title}, {' on '.join(titles_of(run))}: {run.eval_split} accuracy {accuracy:.1%}"
    )


def _names(predictions: Mapping[str, NDArray[Any]]) -> list[str]:
    return [printable(name) for name in predictions["class_names"].tolist()]
