"""Our numbers beside the paper's: first the numbers, then the drawing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..core.extras import need
from ..recipes.catalogue import Recipe, TableCell
from ..recipes.paper import EPOCHS, Published
from ..recipes.runner import State
from ..tasks import TASKS
from ..training.config import Run
from .tables import Spread, spread

if TYPE_CHECKING:
    from rich.table import Table

MARKS = "ᵃᵇᶜᵈᵉᶠᵍʰ"


@dataclass(frozen=True)
class Entry:
    """A place of the table: accuracy in % after the last epoch, over the seeds that are finished; how many diverged,
    how many are not there yet.
    """

    place: TableCell
    ours: Spread | None
    diverged: int
    missing: int
    paper: Published | None


def comparison_info(recipe: Recipe, states: Sequence[State]) -> list[Entry]:
    """One entry per place, in the order of the runs."""
    places: dict[TableCell, list[State]] = {}
    for state in states:
        places.setdefault(recipe.place(state.run), []).append(state)
    return [_entry(recipe, place, group) for place, group in places.items()]


def _entry(recipe: Recipe, place: TableCell, states: Sequence[State]) -> Entry:
    found = [shown(state) for state in states if state.finished]
    diverged = sum(state.diverged is not None and not state.finished for state in states)
    return Entry(
        place,
        spread(found) if found else None,
        diverged,
        len(states) - len(found) - diverged,
        recipe.published(states[0].run),
    )


def shown(state: State) -> float:
    """After the last epoch of a finished run, never the best one."""
    return TASKS[state.run.task].measure.shown(state.epochs[-1], state.run.eval_split)


def unit(run: Run) -> str:
    """What the numbers of a table are.

    Example:
        >>> unit(Run("sgd"))
        'test accuracy in %'
    """
    return f"{run.eval_split} {TASKS[run.task].measure.title}"


def ours_text(entry: Entry) -> str:
    """Our side of a place.

    Example:
        >>> ours_text(Entry(TableCell("", "", ""), Spread(96.8, 0.1, 3), 1, 0, None)), ours_text(Entry(TableCell("", "", ""), None, 2, 0, None))
        ('96.80 ± 0.10 (3), 1 diverged', 'diverged')
    """
    if entry.ours is None:
        return "diverged" if entry.diverged else "-"
    deviation = "" if entry.ours.std is None else f" ± {entry.ours.std:.2f}"
    return f"{entry.ours.mean:.2f}{deviation} ({entry.ours.n})" + (
        f", {entry.diverged} diverged" if entry.diverged else ""
    )


def paper_text(number: Published | None, notes: Sequence[str]) -> str:
    """The paper's side, with the mark of its note.

    Example:
        >>> paper_text(Published(97.82, 0.07, "after 300 epochs"), ["after 300 epochs"]), paper_text(None, [])
        ('97.82 ± 0.07ᵃ', '-')
    """
    if number is None:
        return "-"
    deviation = "" if number.std is None else f" ± {number.std:.2f}"
    return f"{number.mean:.2f}{deviation}{MARKS[notes.index(number.note)] if number.note else ''}"


@dataclass(frozen=True)
class TableSection:
    """A part of the table, as text: what its numbers are of, the header, the rows."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def parts_info(recipe: Recipe, entries: Sequence[Entry]) -> list[TableSection]:
    """The table as text. Beside each of our numbers stands the paper's, where the paper has any in that part."""
    return [_part(recipe, title, entries) for title in dict.fromkeys(entry.place.part for entry in entries)]


def _part(recipe: Recipe, title: str, entries: Sequence[Entry]) -> TableSection:
    own = {(entry.place.row, entry.place.column): entry for entry in entries if entry.place.part == title}
    rows, columns = (list(dict.fromkeys(key[i] for key in own)) for i in (0, 1))
    beside = any(entry.paper is not None for entry in own.values())
    notes = notes_info(entries)

    def cells(row: str) -> list[str]:
        found = [own[row, column] for column in columns]
        return [
            text
            for entry in found
            for text in ([ours_text(entry), paper_text(entry.paper, notes)] if beside else [ours_text(entry)])
        ]

    header = [text for column in columns for text in ([column, "paper"] if beside else [column])]
    return TableSection(title, (recipe.rows, *header), tuple((row, *cells(row)) for row in rows))


def notes_info(entries: Sequence[Entry]) -> list[str]:
    """What has to be said of the paper's numbers, in the order of the marks."""
    return list(dict.fromkeys(entry.paper.note for entry in entries if entry.paper is not None and entry.paper.note))


def caption(entries: Sequence[Entry], run: Run) -> list[str]:
    """What has to be said below a table of runs like this one, in lines."""
    lines = [
        f"{unit(run).capitalize()}, after the last of {run.epochs} epochs: mean ± standard deviation (number of seeds)."
    ]
    if any(entry.paper is not None for entry in entries):
        lines.append(
            f"paper: as published, after {EPOCHS} epochs. It has one BSAM, which stands beside all three forms of ours."
        )
    lines += [f"{mark} {note}" for mark, note in zip(MARKS, notes_info(entries), strict=False)]
    if any(entry.diverged for entry in entries):
        lines.append(
            "diverged: the loss was no number; such a run is run anew once its folder is removed (which one: "
            "results.json)."
        )
    missing = sum(entry.missing for entry in entries)
    return [*lines, f"{missing} run{'s are' if missing > 1 else ' is'} not finished."] if missing else lines


def comparison_tables(recipe: Recipe, entries: Sequence[Entry]) -> list[Table]:
    """One table per part, for the terminal."""
    need("rich", "train")
    from rich import box
    from rich.table import Table

    tables = []
    for part in parts_info(recipe, entries):
        table = Table(
            title=part.title,
            box=box.SIMPLE_HEAD,
            padding=(0, 1, 0, 0),
            show_edge=False,
            title_style="bold",
            title_justify="left",
            min_width=len(part.title),
        )
        table.add_column(part.header[0], no_wrap=True)
        for name in part.header[1:]:
            table.add_column(name, justify="right", style="dim" if name == "paper" else "", no_wrap=name == "paper")
        for row in part.rows:
            table.add_row(*row)
        tables.append(table)
    return tables


def comparison_markdown(recipe: Recipe, entries: Sequence[Entry], run: Run, origin: Sequence[str]) -> str:
    """The whole table with its caption and where the numbers come from, as Markdown."""
    text = [f"# {recipe.title}", ""]
    for part in parts_info(recipe, entries):
        rows = [part.header, ("---", *["---:"] * (len(part.header) - 1)), *part.rows]
        text += [f"## {part.title}", "", *(f"| {' | '.join(row)} |" for row in rows), ""]
    return "\n".join([*text, *(f"{line}  " for line in [*caption(entries, run), *origin])]) + "\n"
