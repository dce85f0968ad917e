"""Results of a classifier by class: accuracies, the confusion matrix and the worst mistakes."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping
from importlib.util import find_spec
from string import Template
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ...common.printing import printable
from ...config import Run
from ...inference.prediction_pictures import captioned, encoded, grid, stack, text_picture
from ...recipes.plan import titles_of
from ...recipes.variants import variant_of
from ..table import Column, Table
from .style import COLOURS

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

CONFUSION = Template("""<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>$title</title>
<style>body { font: 15px system-ui, sans-serif; color: #1b1f24; background: #fff } table { border-collapse: collapse }
th { font-weight: 400; text-align: right; padding: 0 0.4em; white-space: nowrap }
th span { writing-mode: vertical-rl; transform: rotate(180deg) }
td { min-width: 2em; height: 2em; padding: 0; text-align: center; border: 1px solid #e8ecf0;
  background: color-mix(in srgb, #08519c calc(10% * var(--share, 0)), #fff); color: #1b1f24 }
td[style] { color: hsl(0 0% calc((var(--share) - 5) * 1000%)) }</style>
<h1>$title</h1>
<p>A row per true class, a column per predicted class. The colour is the share of the class.</p>
<table>
$rows
</table>
</html>
""")


def classes_table(run: Run, predictions: Mapping[str, NDArray[Any]]) -> str:
    """Return the accuracy of each class and its most frequent mistake as a table in Markdown, the lowest first."""
    names, confusion = _names(predictions), predictions["confusion"]
    samples, right = confusion.sum(axis=1), confusion.diagonal()
    accuracies = np.where(samples > 0, 100 * right / np.maximum(samples, 1), np.nan)
    mistakes = confusion - np.diag(right)
    data = []
    for n in accuracies.argsort(kind="stable"):  # classes without samples are last
        worst = mistakes[n].argmax()
        mistaken = {"worst": names[worst], "count": mistakes[n, worst] or None}
        data.append({"class": names[n], "samples": samples[n], "accuracy": accuracies[n], **mistaken})
    columns = (
        Column("class", "class", words=True),
        Column("samples", "samples"),
        Column("accuracy in %", "accuracy", ".1f"),
        Column("most often mistaken for", "count", lambda row: f"{row['worst']} ({row['count']})", words=True),
    )
    return f"# {_title(run, predictions)}\n\n{Table.of('', data, columns).to_markdown()}\n"


def confusion_page(title: str, predictions: Mapping[str, NDArray[Any]]) -> str:
    """Return the confusion matrix as a table in HTML: a row per true class, a column per predicted class.

    A cell has the number of samples. Its colour is the share of the true class, on a scale that makes rare mistakes
    visible. Point at a cell to read its classes.
    """
    names, confusion = [html.escape(name) for name in _names(predictions)], predictions["confusion"]
    shares = 100 * confusion / np.maximum(confusion.sum(axis=1, keepdims=True), 1)
    rows = ["<tr><th>" + "".join(f"<th><span>{name}</span>" for name in names)]
    for truth, counts, parts in zip(names, confusion.tolist(), shares.tolist(), strict=True):
        cells = [
            f'<td style="--share:{math.sqrt(part):.1f}" title="true {truth}, predicted {guess}: {n} ({part:.1f} %)">{n}'
            if n
            else "<td>"
            for guess, n, part in zip(names, counts, parts, strict=True)
        ]
        rows.append(f"<tr><th>{truth}{''.join(cells)}")
    return CONFUSION.substitute(title=html.escape(title), rows="\n".join(rows))


def mistakes_picture(run: Run, predictions: Mapping[str, NDArray[Any]]) -> Picture:
    """Return a picture of the most confident wrong predictions, the most confident first."""
    names = _names(predictions)
    columns = (predictions[name] for name in ("pixels", "found", "confidence", "truth"))
    pictures = [
        captioned(pixels, f"{names[predicted]}, {confidence:.1%}", [f"true: {names[truth]}"], COLOURS[2])
        for pixels, predicted, confidence, truth in zip(*columns, strict=True)
    ]
    sheet = grid(pictures)
    return stack(text_picture([f"{_title(run, predictions)}, most confident mistakes"], sheet.width), sheet)


def class_report(run: Run, predictions: Mapping[str, NDArray[Any]]) -> dict[str, bytes]:
    """Return the files that ``bsam train`` adds to a classification run, by name.

    They are a table, the confusion matrix and, if Pillow is installed, the worst mistakes.
    """
    if "confusion" not in predictions:
        return {}
    matrix = confusion_page(_title(run, predictions), predictions)
    files = {"classes.md": classes_table(run, predictions).encode(), "confusion.html": matrix.encode()}
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
