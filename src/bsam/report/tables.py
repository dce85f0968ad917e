"""Tables: our numbers beside the paper's. ``*_info`` functions compute the numbers; the others format them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..recipes.experiments import Recipe, TableCell
from ..recipes.paper import DEFAULT_EPOCHS, EPOCHS, Published
from ..recipes.runner import score_of
from ..tasks import TASKS
from ..training.config import Run
from ..training.run_dir import RunDir
from ..training.run_state import RunState

if TYPE_CHECKING:
    from rich.table import Table

FOOTNOTE_MARKS = "ᵃᵇᶜᵈᵉᶠᵍʰ"


@dataclass(frozen=True)
class SeedStatistics:
    """Mean and sample standard deviation (None for a single value) of n values."""

    mean: float
    std: float | None
    n: int

    def __str__(self) -> str:
        deviation = "" if self.std is None else f" ± {self.std:.2f}"
        return f"{self.mean:.2f}{deviation} ({self.n})"


def seed_statistics(values: Sequence[float]) -> SeedStatistics:
    """Return mean and standard deviation.

    Example:
        >>> seed_statistics([1.0, 3.0])
        SeedStatistics(mean=2.0, std=1.4142135623730951, n=2)
        >>> seed_statistics([1.0])
        SeedStatistics(mean=1.0, std=None, n=1)
    """
    return SeedStatistics(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None, len(values))


@dataclass(frozen=True)
class ExtraColumn:
    """A further column of a table: mean and standard deviation over the finished seeds.

    Args:
        header: of the column.
        format: of a number.
        value: called with a finished run; None if that has no such number.
    """

    header: str
    format: str
    value: Callable[[RunState], float | None]

    def text(self, found: SeedStatistics | None) -> str:
        """Return mean and standard deviation as text."""
        if found is None:
            return "-"
        return " ± ".join(format(value, self.format) for value in (found.mean, found.std) if value is not None)


def _memorised(state: RunState) -> float | None:
    share = state.epochs[-1].get("memorised")
    return None if share is None else 100 * share


DETAILS: dict[str, ExtraColumn] = {
    "memorised": ExtraColumn("memorised, %", ".1f", _memorised),
    "top_eigenvalue": ExtraColumn("λmax", ".1f", lambda state: RunDir(state.path).top_eigenvalue()),
}


@dataclass(frozen=True)
class CellSummary:
    """A cell of the table: the score after the last epoch over the finished seeds, the number of seeds that diverged or
    are not finished, the paper's number, further columns of its row, and the settings that tuning chose, by name.
    """

    cell: TableCell
    ours: SeedStatistics | None
    diverged: int
    missing: int
    paper: Published | None
    details: Mapping[str, SeedStatistics | None] = field(default_factory=dict)
    chosen: Mapping[str, Any] | None = None


def table_info(recipe: Recipe, states: Sequence[RunState]) -> list[CellSummary]:
    """Return the cells of a recipe's table, in the order of the runs."""
    cells: dict[TableCell, list[RunState]] = {}
    for state in states:
        cells.setdefault(recipe.cell(state.run), []).append(state)
    return [_summary(recipe, cell, group) for cell, group in cells.items()]


def _summary(recipe: Recipe, cell: TableCell, states: Sequence[RunState]) -> CellSummary:
    finished = [state for state in states if state.finished]
    diverged = sum(state.diverged is not None and not state.finished for state in states)
    details: dict[str, SeedStatistics | None] = {}
    for name in recipe.details:
        values = [value for state in finished if (value := DETAILS[name].value(state)) is not None]
        details[name] = seed_statistics(values) if values else None
    ours = seed_statistics([score_of(state) for state in finished]) if finished else None
    missing = len(states) - len(finished) - diverged
    chosen = _chosen(recipe, finished[0].run) if finished else None
    return CellSummary(cell, ours, diverged, missing, recipe.published(states[0].run), details, chosen)


def _chosen(recipe: Recipe, run: Run) -> dict[str, Any] | None:
    """Return what tuning chose for a run: the settings, and arguments of its method, in which the candidates differ."""
    candidates = recipe.tuning.settings(run) if recipe.tuning is not None else []
    tried = [{**candidate, **candidate.get("arguments", {})} for candidate in candidates]
    varied = {name for each in tried for name in each if each[name] != tried[0][name]} - {"arguments"}
    return {name: value for name, value in {**run.settings(), **run.arguments}.items() if name in varied} or None


def score_title(run: Run) -> str:
    """Return what the numbers of a table are.

    Example:
        >>> score_title(Run("sgd"))
        'test accuracy in %'
    """
    return f"{run.eval_split} {TASKS[run.task].measure.title}"


def ours_text(summary: CellSummary) -> str:
    """Return our number as text.

    Example:
        >>> cell = TableCell("", "", "")
        >>> ours_text(CellSummary(cell, SeedStatistics(96.8, 0.1, 3), 1, 0, None))
        '96.80 ± 0.10 (3), 1 diverged'
        >>> ours_text(CellSummary(cell, None, 2, 0, None))
        'diverged'
    """
    if summary.ours is None:
        return "diverged" if summary.diverged else "-"
    return f"{summary.ours}" + (f", {summary.diverged} diverged" if summary.diverged else "")


def paper_text(number: Published | None, notes: Sequence[str]) -> str:
    """Return the paper's number as text, with the mark of its note.

    Example:
        >>> paper_text(Published(97.82, 0.07, "after 300 epochs"), ["after 300 epochs"]), paper_text(None, [])
        ('97.82 ± 0.07ᵃ', '-')
    """
    if number is None:
        return "-"
    deviation = "" if number.std is None else f" ± {number.std:.2f}"
    return f"{number.mean:.2f}{deviation}{_mark(notes.index(number.note)) if number.note else ''}"


def _mark(index: int) -> str:
    return FOOTNOTE_MARKS[index] if index < len(FOOTNOTE_MARKS) else f"[{index + 1}]"


@dataclass(frozen=True)
class TableSection:
    """A section of the table as text: title, header and rows."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def shown_summaries(summaries: Sequence[CellSummary]) -> list[CellSummary]:
    """Return the cells of rows and columns in which a run has ended; all cells before the first has."""
    ended = [each.cell for each in summaries if each.ours is not None or each.diverged]
    rows, columns = {(cell.section, cell.row) for cell in ended}, {(cell.section, cell.column) for cell in ended}

    def is_shown(cell: TableCell) -> bool:
        return (cell.section, cell.row) in rows and (cell.section, cell.column) in columns

    return [each for each in summaries if not ended or is_shown(each.cell)]


def sections_info(recipe: Recipe, summaries: Sequence[CellSummary]) -> list[TableSection]:
    """Return the table as text, without rows and columns in which nothing has ended.

    The paper's numbers stand beside ours in sections where it has any.
    """
    shown = shown_summaries(summaries)
    return [_section(recipe, title, shown) for title in dict.fromkeys(each.cell.section for each in shown)]


def _section(recipe: Recipe, title: str, summaries: Sequence[CellSummary]) -> TableSection:
    own = {(each.cell.row, each.cell.column): each for each in summaries if each.cell.section == title}
    rows, columns = (list(dict.fromkeys(key[i] for key in own)) for i in (0, 1))
    has_paper_column = any(each.paper is not None for each in own.values())
    notes = notes_info(summaries)

    def texts(summary: CellSummary) -> list[str]:
        paper = [paper_text(summary.paper, notes)] if has_paper_column else []
        details = [DETAILS[name].text(found) for name, found in summary.details.items()]
        return [ours_text(summary), *paper, *details, *([chosen_text(summary.chosen)] if recipe.tuning else [])]

    further = ["paper"] if has_paper_column else []
    further += [*(DETAILS[name].header for name in recipe.details), *(["chosen"] if recipe.tuning else [])]
    header = [text for column in columns for text in (column, *further)]
    body = [(row, *(text for column in columns for text in texts(own[row, column]))) for row in rows]
    return TableSection(title, (recipe.rows, *header), tuple(body))


def chosen_text(chosen: Mapping[str, Any] | None) -> str:
    """Return the settings that tuning chose as text.

    Example:
        >>> chosen_text({"rho_max": 0.1, "rho_min": 0.1}), chosen_text({"weight_decay": 0.1}), chosen_text(None)
        ('rho_max 0.1, rho_min 0.1', 'weight decay 0.1', '-')
    """
    words = {"weight_decay": "weight decay"}
    return ", ".join(f"{words.get(name, name)} {value:g}" for name, value in (chosen or {}).items()) or "-"


def notes_info(summaries: Sequence[CellSummary]) -> list[str]:
    """Return the notes on the paper's numbers, in the order of the marks."""
    return list(dict.fromkeys(each.paper.note for each in summaries if each.paper is not None and each.paper.note))


def caption(recipe: Recipe, summaries: Sequence[CellSummary], run: Run) -> list[str]:
    """Return the lines below a table of runs like this one."""
    title = score_title(run).capitalize()
    epochs = f"{run.epochs} epoch{'s' * (run.epochs > 1)}"
    lines = [f"{title}, after the last of {epochs}: mean ± standard deviation (number of seeds)."]
    if any(each.paper is not None for each in summaries):
        theirs = EPOCHS.get(recipe.table, DEFAULT_EPOCHS)
        lines.append(
            f"paper: as published, after {theirs} epochs. The paper reports one BSAM; its number is repeated for our "
            "three variants."
        )
    lines += [f"{_mark(index)} {note}" for index, note in enumerate(notes_info(shown_summaries(summaries)))]
    lines += recipe.notes
    if any(each.diverged for each in summaries):
        lines.append(
            "diverged: the loss was not finite; to run it again, remove its directory (listed in results.json)."
        )
    missing = sum(each.missing for each in summaries)
    return [*lines, f"{missing} run{'s are' if missing > 1 else ' is'} not finished."] if missing else lines


def rich_tables(sections: Sequence[TableSection]) -> list[Table]:
    """Return the sections as tables for the terminal."""
    from rich import box
    from rich.table import Table

    tables = []
    for section in sections:
        style: dict[str, Any] = {"title_style": "bold", "title_justify": "left", "min_width": len(section.title)}
        table = Table(title=section.title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, **style)
        table.add_column(section.header[0], no_wrap=True)
        for name in section.header[1:]:
            table.add_column(name, justify="right", style="dim" if name == "paper" else "", no_wrap=name == "paper")
        for row in section.rows:
            table.add_row(*row)
        tables.append(table)
    return tables


def markdown(title: str, sections: Sequence[TableSection], lines: Sequence[str]) -> str:
    """Return the whole table with the lines below it, as Markdown."""
    text = [f"# {title}", ""]
    for section in sections:
        rows = [section.header, ("---", *["---:"] * (len(section.header) - 1)), *section.rows]
        text += [f"## {section.title}", "", *(f"| {' | '.join(row)} |" for row in rows), ""]
    return "\n".join([*text, *(f"{line}  " for line in lines)]) + "\n"
