"""Results of a classifier by class: accuracies, the confusion matrix and the worst mistakes."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...common.printing import printable
from ...config import Run
from ...inference.pictures import GAP, PICTURES_PER_ROW, arrange, card, encoded, text_picture
from ...recipes.variants import variant_of
from ...tasks import task_of
from ...tasks.classification import mistakes
from ..page.render import template
from ..table import Column, Table
from .style import COLOURS


def classes_table(title: str, predictions: Mapping[str, NDArray[Any]]) -> str:
    """Return the accuracy of each class and its most frequent mistake as a table in Markdown, the lowest first."""
    names = [printable(name) for name in predictions["class_names"].tolist()]
    confusion = predictions["confusion"]
    samples = confusion.sum(axis=1)
    right = confusion.diagonal()
    accuracies = np.where(samples > 0, 100 * right / np.maximum(samples, 1), np.nan)
    mistaken = confusion - np.diag(right)
    data = []
    for n in accuracies.argsort(kind="stable"):  # classes without samples are last
        worst = mistaken[n].argmax()
        about = {"worst": names[worst], "count": mistaken[n, worst] or None}
        data.append({"class": names[n], "samples": samples[n], "accuracy": accuracies[n], **about})
    columns = (
        Column("class", "class", words=True),
        Column("samples", "samples"),
        Column("accuracy in %", "accuracy", ".1f"),
        Column("most often mistaken for", "count", lambda row: f"{row['worst']} ({row['count']})", words=True),
    )
    return f"# {title}\n\n{Table.of('', data, columns).to_markdown()}\n"


def confusion_page(title: str, predictions: Mapping[str, NDArray[Any]]) -> str:
    """Return the confusion matrix as a table in HTML: a row per true class, a column per predicted class.

    A cell has the number of samples. Its colour is the share of the true class, on a scale that makes rare mistakes
    visible. Point at a cell to read its classes.
    """
    names = [printable(name) for name in predictions["class_names"].tolist()]
    confusion = predictions["confusion"]
    percents = 100 * confusion / np.maximum(confusion.sum(axis=1, keepdims=True), 1)
    rows = []
    for truth, counts, shares in zip(names, confusion.tolist(), percents.tolist(), strict=True):
        rows.append((truth, list(zip(names, counts, shares, strict=True))))
    return template("confusion.html.j2").render(title=title, names=names, rows=rows) + "\n"


def class_report(run: Run, predictions: Mapping[str, NDArray[Any]]) -> dict[str, bytes]:
    """Return the files that ``bsam train`` adds to a classification run, by name.

    They are a table, the confusion matrix and, if Pillow is installed, a picture of the most confident mistakes.
    """
    if "confusion" not in predictions:
        return {}
    accuracy = predictions["confusion"].trace() / predictions["confusion"].sum()
    where = " on ".join(task_of(run).titles(run))
    title = printable(f"{variant_of(run).title}, {where}: {run.eval_split} accuracy {accuracy:.1%}")
    files = {
        "classes.md": classes_table(title, predictions).encode(),
        "confusion.html": confusion_page(title, predictions).encode(),
    }
    if find_spec("PIL") is not None and len(predictions["pixels"]):
        sheet = arrange([card(one, COLOURS[2]) for one in mistakes(predictions, ".1%")], PICTURES_PER_ROW, GAP)
        heading = text_picture([f"{title}, most confident mistakes"], sheet.width)
        files["mistakes.png"] = encoded(arrange([heading, sheet]), "png")
    return files
