"""Tables: our numbers beside the paper's, as text for files and for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..recipes.experiments import Recipe, TableCell
from ..recipes.paper import DECIMALS, DEFAULT_DECIMALS, DEFAULT_EPOCHS, EPOCHS, Published
from ..recipes.variants import MATCHED_NOTES
from ..tasks import TASKS
from ..training.config import Run
from .summaries import DETAILS, CellSummary

if TYPE_CHECKING:
    from rich.table import Table

FOOTNOTE_MARKS = "ᵃᵇᶜᵈᵉᶠᵍʰ"
PAPER_ROW = ", paper"  # ends the label of a row with published numbers


def score_title(run: Run) -> str:
    """Return what the numbers of a table are."""
    return f"{run.eval_split} {TASKS[run.task].measure.title}"


def ours_text(summary: CellSummary) -> str:
    """Return our number as text."""
    if summary.ours is None:
        return "diverged" if summary.diverged else "-"
    return f"{summary.ours}" + (f", {summary.diverged} diverged" if summary.diverged else "")


def paper_text(number: Published | None, notes: Sequence[str], decimals: int = DEFAULT_DECIMALS) -> str:
    """Return the paper's number as text, with the mark of its note."""
    if number is None:
        return "-"
    numbers = " ± ".join(f"{value:.{decimals}f}" for value in (number.mean, number.std) if value is not None)
    return numbers + (FOOTNOTE_MARKS[notes.index(number.note)] if number.note else "")


@dataclass(frozen=True)
class TableSection:
    """A section of the table as text: title, header and rows. If it is wide, a terminal has deviations below means."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    wide: bool = False


def shown_summaries(summaries: Sequence[CellSummary]) -> list[CellSummary]:
    """Return the cells of rows, and of a section's columns, in which a run has ended; all cells before the first has.

    A row that has ended in one section is shown in all, with dashes where it is missing.
    """
    ended = [each.cell for each in summaries if each.ours is not None or each.diverged]
    rows, columns = {cell.row for cell in ended}, {(cell.section, cell.column) for cell in ended}

    def is_shown(cell: TableCell) -> bool:
        return cell.row in rows and (cell.section, cell.column) in columns

    return [each for each in summaries if not ended or is_shown(each.cell)]


def sections_info(recipe: Recipe, summaries: Sequence[CellSummary]) -> list[TableSection]:
    """Return the table as text, without rows and columns in which nothing has ended.

    The paper's numbers stand beside ours in sections where it has any; below ours where the columns are measures.
    """
    shown = shown_summaries(summaries)
    section = _measures_section if recipe.measures else _section
    return [section(recipe, title, shown) for title in dict.fromkeys(each.cell.section for each in shown)]


def _section(recipe: Recipe, title: str, summaries: Sequence[CellSummary]) -> TableSection:
    own = {(each.cell.row, each.cell.column): each for each in summaries if each.cell.section == title}
    rows, columns = (list(dict.fromkeys(key[i] for key in own)) for i in (0, 1))
    has_paper_column = any(each.paper is not None for each in own.values())
    notes = notes_info(summaries)

    def texts(summary: CellSummary) -> list[str]:
        paper = [paper_text(summary.paper, notes)] if has_paper_column else []
        details = [DETAILS[name].text(summary.details.get(name)) for name in recipe.details]
        return [ours_text(summary), *paper, *details, *([chosen_text(summary.chosen)] if recipe.tuning else [])]

    further = ["paper"] if has_paper_column else []
    further += [*(DETAILS[name].header for name in recipe.details), *(["chosen"] if recipe.tuning else [])]
    header = [text for column in columns for text in (column, *further)]
    blank = CellSummary(TableCell(title, "", ""), None, 0, 0, None)  # a baseline may not be known in all columns
    body = [(row, *(text for column in columns for text in texts(own.get((row, column), blank)))) for row in rows]
    return TableSection(recipe.titled(title), (recipe.rows, *header), tuple(body))


def _measures_section(recipe: Recipe, title: str, summaries: Sequence[CellSummary]) -> TableSection:
    """Return a section with a column for each measure, and the paper's numbers in rows of their own."""
    rows: dict[str, list[CellSummary]] = {}
    for each in summaries:
        if each.cell.section == title:
            rows.setdefault(each.cell.row, []).append(each)
    header = dict.fromkeys(each.cell.column for own in rows.values() for each in own)
    notes, decimals = notes_info(summaries), DECIMALS.get(recipe.table, DEFAULT_DECIMALS)
    with_n = len(_seed_counts(summaries)) > 1
    body = {}
    for row, own in rows.items():
        label = _row_label(row, own, with_n) + (f", {chosen_text(own[0].chosen)}" if own[0].chosen else "")
        body[label] = ["-" if each.ours is None else each.ours.without_n for each in own]
    for row, own in rows.items():
        if any(each.paper is not None for each in own):  # the paper has one BSAM
            body[row.partition(" (")[0] + PAPER_ROW] = [paper_text(each.paper, notes, decimals) for each in own]
    rows_of_text = tuple((label, *texts) for label, texts in body.items())
    return TableSection(recipe.titled(title), (recipe.rows, *header), rows_of_text, wide=True)


def _row_label(row: str, own: Sequence[CellSummary], with_n: bool) -> str:
    """Return the label of a row, with what its columns share: the number of seeds, and how many diverged."""
    n = max(_seed_counts(own), default=0)
    seeds = f", {n} seed{'s' * (n > 1)}" if n and with_n else ""
    return row + seeds + (f", {own[0].diverged} diverged" if own[0].diverged else "")


def _seed_counts(summaries: Sequence[CellSummary]) -> set[int]:
    return {each.ours.n for each in summaries if each.ours is not None and each.ours.n}


def chosen_text(chosen: Mapping[str, Any] | None) -> str:
    """Return the settings that tuning chose as text.

    Example:
        >>> (
        ...     chosen_text({"rho_max": 0.1, "rho_min": 0.1}),
        ...     chosen_text({"weight_decay": 0.1}),
        ...     chosen_text(None),
        ... )
        ('rho_max 0.1, rho_min 0.1', 'weight decay 0.1', '-')
    """
    words = {"weight_decay": "weight decay"}
    return ", ".join(f"{words.get(name, name)} {value:g}" for name, value in (chosen or {}).items()) or "-"


def notes_info(summaries: Sequence[CellSummary]) -> list[str]:
    """Return the notes on the paper's numbers, in the order of the marks."""
    return list(dict.fromkeys(each.paper.note for each in summaries if each.paper is not None and each.paper.note))


def caption(recipe: Recipe, summaries: Sequence[CellSummary], run: Run, missing: int = 0) -> list[str]:
    """Return the lines below a table of runs like this one, of which some are missing."""
    title = score_title(run)
    epochs = f"{run.epochs} epoch{'s' * (run.epochs > 1)}"
    lines = [f"{title[0].upper()}{title[1:]}, after the last of {epochs}: {_seeds_text(recipe, summaries)}."]
    if any(each.paper is not None for each in summaries):
        theirs = EPOCHS.get(recipe.table, DEFAULT_EPOCHS)
        after = f", after {theirs} epochs" if theirs else "; the paper does not say after how many epochs"
        repeated = "" if recipe.measures else "; its number is repeated for our three variants"
        lines.append(f"paper: as published{after}. The paper reports one BSAM{repeated}.")
    notes = notes_info(shown_summaries(summaries))
    lines += [f"{mark} {note}" for mark, note in zip(FOOTNOTE_MARKS, notes, strict=False)]
    rows = {each.cell.row for each in shown_summaries(summaries)}
    lines += [note for title, note in MATCHED_NOTES.items() if title in rows]
    lines += recipe.notes(run)
    if any(each.diverged for each in summaries):
        lines.append(
            "diverged: the loss was not finite; to run it again, remove its directory (listed in results.json)."
        )
    return [*lines, f"{missing} run{'s are' if missing > 1 else ' is'} not finished."] if missing else lines


def _seeds_text(recipe: Recipe, summaries: Sequence[CellSummary]) -> str:
    """Return what the numbers are; where the columns are measures, also the number of seeds, if all rows share it."""
    counts = _seed_counts(summaries)
    if not recipe.measures:
        return "mean ± standard deviation (number of seeds)"
    if counts == {1}:
        return "one seed"
    return f"mean ± standard deviation of {counts.pop() if len(counts) == 1 else 'the'} seeds"


def rich_tables(sections: Sequence[TableSection]) -> list[Table]:
    """Return the sections as tables for the terminal."""
    from rich import box
    from rich.table import Table

    tables = []
    for section in sections:
        style: dict[str, Any] = {"title_style": "bold", "title_justify": "left", "min_width": len(section.title)}
        table = Table(title=section.title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, **style)
        table.add_column(section.header[0], no_wrap=not section.wide)
        for name in section.header[1:]:
            paper = name == "paper"
            table.add_column(name, justify="right", style="dim" if paper else "", no_wrap=paper, overflow="fold")
        for row in section.rows:
            texts = [text.replace(" ± ", "\n± ") for text in row] if section.wide else row
            table.add_row(*texts, style="dim" if row[0].endswith(PAPER_ROW) else "")
        tables.append(table)
    return tables


def markdown(title: str, sections: Sequence[TableSection], lines: Sequence[str]) -> str:
    """Return the whole table with the lines below it, as Markdown."""
    text = [f"# {title}", ""]
    for section in sections:
        rows = [section.header, ("---", *["---:"] * (len(section.header) - 1)), *section.rows]
        text += [f"## {section.title}", "", *(f"| {' | '.join(row)} |" for row in rows), ""]
    return "\n".join([*text, *(f"{line}  " for line in lines)]) + "\n"
