"""Predictions as lines of text, and as a grid of pictures."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from pathlib import Path

from ..training.prediction import Prediction
from .panels import COLOURS, MAX_COLUMNS, figure, panel_title, save

SIDE = 2.6  # inches, of a picture


def class_texts(prediction: Prediction) -> list[str]:
    """Return the classes with their probabilities."""
    return [f"{name} {p:.1%}" for name, p in zip(prediction.classes, prediction.probabilities, strict=True)]


def prediction_lines(predictions: Sequence[Prediction]) -> list[str]:
    """Return a line for each image: its file and its classes."""
    width = max(len(str(each.path)) for each in predictions)
    return [f"{each.path!s:<{width}}  {', '.join(class_texts(each))}" for each in predictions]


def draw_grid(predictions: Sequence[Prediction], path: Path) -> None:
    """Draw the images as the network saw them: the most probable class above, the others below, and their file."""
    columns = min(len(predictions), MAX_COLUMNS)
    rows = math.ceil(len(predictions) / columns)
    others = max(len(each.classes) for each in predictions) - 1
    drawn = figure(SIDE * columns, (SIDE + 0.45 + 0.18 * (others + 1)) * rows)
    for n, each in enumerate(predictions):
        ax = drawn.add_subplot(rows, columns, n + 1)
        ax.imshow(each.pixels)
        ax.set_xticks([])
        ax.set_yticks([])
        first, *rest = class_texts(each)
        ax.set_title(_printable(panel_title(first)), fontsize=10, color=COLOURS[1], parse_math=False)
        below = "\n".join([*rest, panel_title(each.path.name)])
        ax.set_xlabel(_printable(below), fontsize=8, parse_math=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # the font has none for some letters, and draws boxes
        save(drawn, path)


def _printable(name: str) -> str:
    """Return a name without the bytes of a file name that are no text."""
    return name.encode("utf-8", "replace").decode("utf-8")
