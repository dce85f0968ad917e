"""The tables of a recipe: pivots of the table of runs by section, row and column."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import pandas as pd

from ..analysis.outcome import score_title
from ..common.printing import count_text, group_by, printable
from ..config import Run
from ..paper import published_number, published_tables
from ..recipes.plan import measured_on, setting_text
from ..recipes.variants import variants
from ..tasks import task_class
from ..training.run_dir import RunDir
from .table import Cell, Table

FOOTNOTE_MARKS = "ᵃᵇᶜᵈᵉᶠᵍʰ"
PAPER_ROW = ", paper"  # the end of the label of a row with published numbers
ENDED = ("finished", "diverged")
MEAN_COLUMN = "Mean"  # the column of the score next to those of its parts
EXTRAS = ("memorised", "top_eigenvalue", "training_seconds")  # shown if runs have them


def extra_headers(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the headers of the further columns; ``settings`` are those of a run."""
    return dict(zip(EXTRAS, ("memorised, %", f"λmax, {measured_on(settings)}", "seconds"), strict=True))


def cells_of(runs: pd.DataFrame, published: str = "") -> list[dict[str, Any]]:
    """Return the cells of the table: position, our numbers, further columns, and the published number.

    If the score has parts, such as the groups of joints of a pose, a run has a number for each, in separate columns. A
    task may add a row without training.

    Args:
        runs: a table of :func:`bsam.lab.analysis.runs_table.read_runs`, with a column ``settings_chosen`` for the
            settings that tuning chose, and perhaps one with the ``training_seconds``.
        published: the name of a table in ``published.json``, for standard deviations and footnotes.
    """
    task = task_class(runs["settings"].iloc[0]["task"])
    groups = task.groups
    measures = [*((measure.title, measure) for measure in groups), (MEAN_COLUMN if groups else "", task.score)]
    cells = []
    baselines = {}
    for (section, row, column), group in runs.groupby(["section", "row", "column"], sort=False):
        run = Run.of(**group["settings"].iloc[0])
        finished = group[group["state"] == "finished"]
        number = group["published"].iloc[0]
        planned = None if pd.isna(number) else {"mean": float(number), "std": None, "note": ""}
        untrained, reached = task.untrained(RunDir(finished["path"].iloc[0]).note) if len(finished) else ("", {})
        for title, measure in measures:
            scores = pd.Series([last.get(measure.metric(run.eval_split)) for last in finished["last"]], dtype=float)
            paper = published_number(published, run, measure=measure.name) if published else None
            if measure is task.score and (planned or not groups) and not (paper and paper["mean"] == number):
                paper = planned
            cell = {
                "section": section,
                "row": row,
                "column": title or column,
                **_statistics(measure.factor * scores),
                "diverged": int((group["state"] == "diverged").sum()),
                "missing": int((~group["state"].isin(ENDED)).sum()),
                "paper": paper,
                "chosen": next(iter(group["settings_chosen"].dropna()), None),
            }
            extras = [name for name in EXTRAS if measure is task.score and name in finished]
            extras = [name for name in extras if finished[name].notna().any()]
            cells.append({**cell, **{name: _statistics(finished[name]) for name in extras}})
            if measure.name in reached:
                empty = {"std": None, "n": 0, "diverged": 0, "missing": 0, "paper": None, "chosen": None}
                mean = measure.factor * reached[measure.name]
                baselines[untrained, title] = {**cell, **empty, "row": untrained, "mean": mean}
    return [*cells, *baselines.values()]


def _statistics(values: pd.Series) -> dict[str, Any]:
    mean, std = (None if math.isnan(number) else float(number) for number in (values.mean(), values.std()))
    return {"mean": mean, "std": std, "n": int(values.count())}


def tables_of(
    cells: Sequence[Mapping[str, Any]], published: str = "", settings: Mapping[str, Any] = MappingProxyType({})
) -> list[Table]:
    """Return a table for each section, without rows and columns in which no run has ended.

    Published numbers are next to ours or, if there are some for the parts of the score, in rows below them.

    Args:
        cells: from :func:`cells_of`.
        published: the name of a table in ``published.json``.
        settings: the settings of a run, for the name of its loss.
    """
    headers = extra_headers(settings)
    shown = [cell for cell in cells if cell["mean"] is not None or cell["diverged"]]
    notes = footnotes(cells)
    decimals = published_tables()[published]["decimals"] if published else 2
    has_parts = any(cell["column"] == MEAN_COLUMN for cell in cells)
    in_rows = has_parts and any(cell["paper"] and cell["column"] != MEAN_COLUMN for cell in cells)
    tables = []
    for title, group in group_by(shown, lambda cell: cell["section"]).items():
        ours = []
        theirs = []
        for cell in group:
            place = {"method": cell["row"], "column": cell["column"]}
            extras = {header: Cell(_text(cell[name], 1)) for name, header in headers.items() if name in cell}
            ours.append({**place, "": our_number(cell), **extras})
            if cell["paper"]:
                paper = paper_number(cell["paper"], notes, decimals)
                method = cell["row"].partition(" (")[0] + PAPER_ROW
                theirs.append({**place, "method": method, "": paper} if in_rows else {**place, "paper": paper})
            if cell["chosen"] and (not has_parts or cell["column"] == MEAN_COLUMN):
                ours.append({**place, "chosen": Cell(setting_text(cell["chosen"]))})
        parts = ("", "paper", *headers.values(), "chosen")
        tables.append(Table.pivot(title, [*ours, *theirs], "method", "column", parts))
    return tables


def our_number(cell: Mapping[str, Any]) -> Cell:
    """Return our number, if a run has ended."""
    diverged = cell["diverged"]
    if cell["mean"] is None:
        return Cell("diverged" if diverged else None)
    count = f" ({cell['n']})" if cell["n"] else ""
    return Cell(_text(cell, 2) + count, marks=(f"{diverged} diverged",) if diverged else ())


def paper_number(number: Mapping[str, Any], notes: Sequence[str], decimals: int) -> Cell:
    """Return a published number, with the mark of its footnote."""
    return Cell(_text(number, decimals) + (FOOTNOTE_MARKS[notes.index(number["note"])] if number["note"] else ""))


def _text(numbers: Mapping[str, Any], decimals: int) -> str:
    return " ± ".join(f"{numbers[name]:.{decimals}f}" for name in ("mean", "std") if numbers[name] is not None)


def footnotes(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the footnotes of the published numbers, in the order of their marks."""
    notes = [cell["paper"]["note"] for cell in cells if cell["paper"] and (cell["n"] or cell["diverged"])]
    return [note for note in dict.fromkeys(notes) if note]


def caption(runs: pd.DataFrame, cells: Sequence[Mapping[str, Any]], published: str = "") -> list[str]:
    """Return the lines below a table: what the numbers are, their sources and footnotes, and what rows mean."""
    run = Run.of(**runs["settings"].iloc[0])
    title = score_title(run)
    lengths = {settings["epochs"] for settings in runs["settings"]}
    last = f"of {count_text(run.epochs, 'epoch')}" if len(lengths) == 1 else "epoch"
    lines = [f"{title[0].upper()}{title[1:]}, after the last {last}: mean ± standard deviation (number of seeds)."]
    if published and any(cell["paper"] for cell in cells):
        lines.append(f"paper: {' '.join(published_tables()[published]['about'])}")
    lines += [f"{mark} {note}" for mark, note in zip(FOOTNOTE_MARKS, footnotes(cells), strict=False)]
    names = set(runs.loc[runs["state"].isin(ENDED), "variant"])
    lines += [variant.note for name, variant in variants().items() if variant.note and name in names]
    notes = {
        "memorised": "Memorised: the share of the wrong training labels that the network predicts after the last "
        "epoch, in %.",
        "top_eigenvalue": f"λmax: the largest eigenvalue of the Hessian ({measured_on(run.settings())}), without label "
        "smoothing, with the labels used in training.",
        "training_seconds": "Seconds: of the training, without evaluation and checkpoints; epochs times the median of "
        "their seconds. Runs that shared their device are not timed.",
    }
    lines += [note for name, note in notes.items() if name in runs and runs[name].notna().any()]
    if (runs["state"] == "diverged").any():
        lines.append(
            "diverged: the loss became non-finite; to train a run again, remove its directory (see results.json)."
        )
    return lines


def markdown(title: str, tables: Sequence[Table], lines: Sequence[str]) -> str:
    """Return tables and the lines below them as Markdown."""
    parts = [f"# {printable(title)}", *(f"## {printable(table.title)}\n\n{table.to_markdown()}" for table in tables)]
    return "\n\n".join([*parts, "\n".join(f"{printable(line)}  " for line in lines)]) + "\n"
