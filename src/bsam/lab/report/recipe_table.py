"""The table of a recipe: our numbers next to the published ones, as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..analysis.outcome import score_title
from ..common.grouping import count_text, group_by
from ..recipes.candidates import chosen_text
from ..recipes.columns import CellSummary, TableCell
from ..recipes.experiments import Recipe
from ..recipes.paper import Published
from ..recipes.variants import variants
from ..training.config import Run

FOOTNOTE_MARKS = "ᵃᵇᶜᵈᵉᶠᵍʰ"
PAPER_ROW = ", paper"  # the end of the label of a row with published numbers


def ours_text(summary: CellSummary) -> str:
    """Return our number as text."""
    if summary.ours is None:
        return "diverged" if summary.diverged else "-"
    return f"{summary.ours}" + (f", {summary.diverged} diverged" if summary.diverged else "")


def paper_text(number: Published | None, notes: Sequence[str], decimals: int) -> str:
    """Return a published number as text, with the mark of its footnote."""
    if number is None:
        return "-"
    numbers = " ± ".join(f"{value:.{decimals}f}" for value in (number.mean, number.std) if value is not None)
    return numbers + (FOOTNOTE_MARKS[notes.index(number.note)] if number.note else "")


@dataclass(frozen=True)
class TableSection:
    """A section of the table as text. If it is wide, a terminal shows standard deviations below the means."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    wide: bool = False


def shown_summaries(summaries: Sequence[CellSummary]) -> list[CellSummary]:
    """Return the cells to show: rows and columns in which a run has ended, or all if none has.

    A row with an ended run in one section is shown in all of them, with dashes for missing numbers.
    """
    ended = [summary.cell for summary in summaries if summary.ours is not None or summary.diverged]
    rows, columns = {cell.row for cell in ended}, {(cell.section, cell.column) for cell in ended}
    cells = ((summary, summary.cell) for summary in summaries)
    return [s for s, cell in cells if not ended or (cell.row in rows and (cell.section, cell.column) in columns)]


def sections_info(recipe: Recipe, summaries: Sequence[CellSummary]) -> list[TableSection]:
    """Return the table as text, without rows and columns in which no run has ended.

    Published numbers are next to ours, or below them if the columns are measures.
    """
    shown = shown_summaries(summaries)
    section = _measures_section if recipe.measures else _section
    titles = dict.fromkeys(summary.cell.section for summary in shown)
    return [section(recipe, title, shown) for title in titles]


def _section(recipe: Recipe, title: str, summaries: Sequence[CellSummary]) -> TableSection:
    cells = {(shown.cell.row, shown.cell.column): shown for shown in summaries if shown.cell.section == title}
    rows, columns = (list(dict.fromkeys(key[i] for key in cells)) for i in (0, 1))
    has_paper_column = any(summary.paper is not None for summary in cells.values())
    notes, decimals = notes_info(summaries), _decimals(recipe)

    def texts(summary: CellSummary) -> list[str]:
        paper = [paper_text(summary.paper, notes, decimals)] if has_paper_column else []
        details = [column.text(summary.details.get(column.name)) for column in recipe.details]
        return [ours_text(summary), *paper, *details, *([chosen_text(summary.chosen)] if recipe.tuning else [])]

    extra = ["paper"] if has_paper_column else []
    extra += [*(column.header for column in recipe.details), *(["chosen"] if recipe.tuning else [])]
    header = [text for column in columns for text in (column, *extra)]
    blank = CellSummary(TableCell(title, "", ""), None, 0, 0, None)  # some columns may have no baseline
    body = [(row, *(text for column in columns for text in texts(cells.get((row, column), blank)))) for row in rows]
    return TableSection(recipe.titled(title), (recipe.rows, *header), tuple(body))


def _measures_section(recipe: Recipe, title: str, summaries: Sequence[CellSummary]) -> TableSection:
    """Return a section with a column for each measure, and published numbers in separate rows."""
    in_section = [summary for summary in summaries if summary.cell.section == title]
    rows = group_by(in_section, lambda summary: summary.cell.row)
    header = dict.fromkeys(summary.cell.column for cells in rows.values() for summary in cells)
    notes, decimals = notes_info(summaries), _decimals(recipe)
    with_n = len(_seed_counts(summaries)) > 1
    body = {}
    for row, cells in rows.items():
        label = _row_label(row, cells, with_n) + (f", {chosen_text(cells[0].chosen)}" if cells[0].chosen else "")
        body[label] = ["-" if cell.ours is None else f"{cell.ours:.2f}" for cell in cells]
    for row, cells in rows.items():
        if any(cell.paper is not None for cell in cells):  # one row for all variants: BSAM (...)
            body[row.partition(" (")[0] + PAPER_ROW] = [paper_text(cell.paper, notes, decimals) for cell in cells]
    rows_of_text = tuple((label, *texts) for label, texts in body.items())
    return TableSection(recipe.titled(title), (recipe.rows, *header), rows_of_text, wide=True)


def _decimals(recipe: Recipe) -> int:
    return 0 if recipe.published_table is None else recipe.published_table.decimals


def _row_label(row: str, cells: Sequence[CellSummary], with_n: bool) -> str:
    """Return the label of a row, with the numbers of seeds and of diverged runs, which its columns share."""
    n = max(_seed_counts(cells), default=0)
    seeds = f", {count_text(n, 'seed')}" if n and with_n else ""
    return row + seeds + (f", {cells[0].diverged} diverged" if cells[0].diverged else "")


def _seed_counts(summaries: Sequence[CellSummary]) -> set[int]:
    return {summary.ours.n for summary in summaries if summary.ours is not None and summary.ours.n}


def notes_info(summaries: Sequence[CellSummary]) -> list[str]:
    """Return the footnotes of the published numbers, in the order of their marks."""
    numbers = [summary.paper for summary in summaries if summary.paper is not None]
    return list(dict.fromkeys(number.note for number in numbers if number.note))


def caption(recipe: Recipe, summaries: Sequence[CellSummary], run: Run, missing: int = 0) -> list[str]:
    """Return the lines below a table.

    Args:
        recipe: the experiment.
        summaries: the cells of its table.
        run: one of its runs, for the measure and the number of epochs.
        missing: the number of runs that are not finished.
    """
    title = score_title(run)
    epochs = count_text(run.epochs, "epoch")
    lines = [f"{title[0].upper()}{title[1:]}, after the last of {epochs}: {_seeds_text(recipe, summaries)}."]
    if recipe.published_table is not None and any(summary.paper is not None for summary in summaries):
        lines.append(f"paper: {recipe.published_table.about}")
    notes = notes_info(shown_summaries(summaries))
    lines += [f"{mark} {note}" for mark, note in zip(FOOTNOTE_MARKS, notes, strict=False)]
    rows = {summary.cell.row for summary in shown_summaries(summaries)}
    lines += [variant.note for variant in variants().values() if variant.note and variant.title in rows]
    lines += recipe.notes(run)
    if any(summary.diverged for summary in summaries):
        lines.append(
            "diverged: the loss became non-finite; to train a run again, remove its directory (see results.json)."
        )
    return [*lines, f"{missing} run{'s are' if missing > 1 else ' is'} not finished."] if missing else lines


def _seeds_text(recipe: Recipe, summaries: Sequence[CellSummary]) -> str:
    """Describe the numbers, with the number of seeds if the cells do not show it."""
    counts = _seed_counts(summaries)
    if not recipe.measures:
        return "mean ± standard deviation (number of seeds)"
    if counts == {1}:
        return "one seed"
    return f"mean ± standard deviation of {counts.pop() if len(counts) == 1 else 'the'} seeds"


def markdown(title: str, sections: Sequence[TableSection], lines: Sequence[str]) -> str:
    """Return the table and the lines below it as Markdown."""
    text = [f"# {title}", ""]
    for section in sections:
        rows = [section.header, ("---", *["---:"] * (len(section.header) - 1)), *section.rows]
        text += [f"## {section.title}", "", *(f"| {' | '.join(row)} |" for row in rows), ""]
    return "\n".join([*text, *(f"{line}  " for line in lines)]) + "\n"
