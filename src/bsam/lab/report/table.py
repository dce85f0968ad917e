"""One table for all that is shown: plain text for a terminal, Markdown, HTML and CSV."""

from __future__ import annotations

import csv
import io
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from itertools import count, zip_longest
from typing import Any, TypeAlias

from ..common.printing import printable

Row: TypeAlias = Mapping[str, Any]
COLUMN_GAP = "  "  # between columns of text
LONGEST = 24  # characters of a word that text does not break
PARTS = ("marks", "interval", "best", "more")  # of a cell, which rows of data may have


@dataclass(frozen=True)
class Cell:
    """A cell.

    Args:
        text: what is shown; None if there is nothing, which is a dash in text and Markdown.
        value: sorts the rows of the page; None if the text does.
        fields: what CSV has; empty if it has the value.
        marks: words behind the text.
        interval: zero, low end, high end and mean of an interval, as percentages of the width of its drawing.
        best: whether the text is bold.
        more: what the page shows when the cell is selected, a paragraph per line.
        link: the address that the text leads to.
    """

    text: str | None = None
    value: Any = None
    fields: tuple[Any, ...] = ()
    marks: tuple[str, ...] = ()
    interval: tuple[float, ...] = ()
    best: bool = False
    more: str = ""
    link: str = ""

    def __str__(self) -> str:
        return ", ".join(filter(None, (self.text, *self.marks))) or ("-" if self.text is None else "")

    @property
    def key(self) -> Any:
        """The value that sorts, empty if it is missing."""
        value = self.text if self.value is None else self.value
        return "" if _is_missing(value) else value

    @property
    def csv(self) -> str:
        """The fields as CSV."""
        return csv_line(self.fields or [self.key])


@dataclass(frozen=True)
class Column:
    """A column, and what it shows of rows of data.

    Data may have more of a cell: "VALUE marks", "VALUE interval", "VALUE best" and "VALUE more", where VALUE is the
    name of the column's value.

    Args:
        title: its title.
        value: the name in the data; it sorts the rows, and a cell without it has no text.
        text: the format of the value, or a function from a row to its text; None shows the value as it is.
        fields: names in CSV, and in the data; None copies the value.
        note: what it means, for the lines below the table.
        words: whether it has words rather than numbers.
        descending: whether the first click sorts it from the highest to the lowest.
    """

    title: str
    value: str = ""
    text: str | Callable[[Row], str] | None = None
    fields: Mapping[str, str] | None = None
    note: str = ""
    words: bool = False
    descending: bool = False

    def cell(self, row: Row) -> Cell:
        """Return the cell of a row of data."""
        value = row[self.value]
        text = None if _is_missing(value) or value == "" else str(value)
        if text and self.text is not None:
            text = format(value, self.text) if isinstance(self.text, str) else self.text(row)
        fields = tuple(row[name] for name in self.fields.values()) if self.fields else ()
        more = {part: row[name] for part in PARTS if (name := f"{self.value} {part}") in row}
        return Cell(text, value, fields, **more)

    @property
    def csv(self) -> str:
        """The names of the fields as CSV."""
        return csv_line(self.fields or [self.title])


@dataclass(frozen=True)
class Table:
    """A table; the first cell of a row is its name."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, title: str, data: Iterable[Row], columns: Iterable[Column], notes: Iterable[str] = ()) -> Table:
        """Return a table with a row for each row of data.

        Columns in which all cells are empty are left out; what the others mean is the last note.

        Example:
            >>> data = [{"row": "SGD", "mean": 95.128}, {"row": "SAM", "mean": 96.3}]
            >>> print(
            ...     Table.of(
            ...         "", data, [Column("method", "row", words=True), Column("%", "mean", ".2f")]
            ...     )
            ... )
            method      %
            -------------
            SGD     95.13
            SAM     96.30
        """
        rows = list(data)
        shown: list[Column] = []
        cells: list[list[Cell]] = []
        for column in columns:
            of_column = [column.cell(row) for row in rows]
            if any(cell.text or cell.marks for cell in of_column):
                shown.append(column)
                cells.append(of_column)
        legend = " ".join(column.note for column in shown if column.note)
        return cls(title, tuple(shown), tuple(zip(*cells, strict=True)), tuple(filter(None, (*notes, legend))))

    @classmethod
    def pivot(
        cls,
        title: str,
        cells: Iterable[Row],
        row: str,
        column: str,
        parts: Sequence[str] = ("",),
        notes: Iterable[str] = (),
    ) -> Table:
        """Return a table with a row and a column for each name in the data; columns without cells are left out.

        Args:
            title: its title.
            cells: dictionaries with the name of a row (or its cell), the name of a column, and cells by part.
            row: the key of rows in the dictionaries, which is the title of the first column.
            column: the key of columns.
            parts: the keys of cells. Each part is a column of its own; the part "" is titled by the name of the
                column, others by the part.
            notes: lines below the table.

        Example:
            >>> cells = [{"method": "SGD", "data": "digits", "": Cell("95.1")}]
            >>> cells += [
            ...     {"method": "SAM", "data": "digits", "": Cell("96.3"), "paper": Cell("96.7")}
            ... ]
            >>> print(Table.pivot("", cells, "method", "data", ("", "paper")))
            method  digits  paper
            ---------------------
            SGD       95.1      -
            SAM       96.3   96.7
        """
        body: dict[Cell, dict[tuple[str, str], Cell]] = {}
        names: dict[str, None] = {}
        for cell in cells:
            name = cell[row] if isinstance(cell[row], Cell) else Cell(cell[row])
            body.setdefault(name, {}).update({(cell[column], part): cell[part] for part in parts if part in cell})
            names[cell[column]] = None
        filled = {key for found in body.values() for key in found}
        keys = [(name, part) for name in names for part in parts if (name, part) in filled]
        columns = (Column(row, words=True), *(Column(part or name) for name, part in keys))
        rows: list[tuple[Cell, ...]] = []
        for first, found in body.items():
            rows.append((first, *(found.get(key, Cell()) for key in keys)))
        return cls(title, columns, tuple(rows), tuple(notes))

    def __str__(self) -> str:
        return self.to_text()

    def to_text(self, width: int = 120) -> str:
        """Return plain text at most ``width`` characters wide; long texts wrap, numbers are never cut.

        If the columns are too narrow for the longest words, each row becomes a paragraph.
        """
        header = [column.title for column in self.columns]
        rows = [_printed(row) for row in self.rows]
        lines = _paragraphs(header, rows, width)
        widths = _widths(self.columns, [header, *rows], width)
        if widths is not None:
            head, *body = (_lines(row, self.columns, widths) for row in (header, *rows))
            rule = "-" * (sum(widths) + len(COLUMN_GAP) * (len(widths) - 1))
            lines = [*head, rule, *(line for block in body for line in block)]
        notes = [textwrap.fill(printable(note), width) for note in self.notes]
        title = [textwrap.fill(printable(self.title), width)] if self.title else []
        return "\n".join([*title, *lines, *([""] if notes else []), *notes])

    def to_markdown(self) -> str:
        """Return the rows in Markdown."""
        header = [column.title for column in self.columns]
        rule = ["---" if column.words else "---:" for column in self.columns]
        lines = []
        for row in (header, rule, *(map(str, row) for row in self.rows)):
            cells = [printable(text).replace("|", "\\|") for text in row]
            lines.append(f"| {' | '.join(cells)} |")
        return "\n".join(lines)

    def to_csv(self) -> str:
        """Return the fields of all rows as CSV."""
        lines = [",".join(column.csv for column in self.columns)]
        for row in self.rows:
            lines.append(",".join(cell.csv for cell in row))
        return "".join(f"{line}\r\n" for line in lines)

    def to_html(self, name: str = "table") -> str:
        """Return the table in a box that scrolls, for the style sheet and the script of the page.

        Args:
            name: begins the ids of what opens, and must be another for each table of a page.
        """
        label = escape(self.title)
        head = "\n".join(map(_html_heading, self.columns))
        rows = []
        for line, row in enumerate(self.rows):
            cells = [
                _html_cell(cell, column, row[0], f"{name}-{line}-{place}", place == 0)
                for place, (cell, column) in enumerate(zip(row, self.columns, strict=True))
            ]
            rows.append("\n".join(["<tr>", *cells, "</tr>"]))
        body = "\n".join(rows)
        kind = ' class="grid"' if any(cell.more for row in self.rows for cell in row) else ""
        return (
            f'<div class="scroll" tabindex="0" role="region" aria-label="{label}">\n'
            f'<table{kind} aria-label="{label}">\n'
            f"<thead><tr>\n{head}\n</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>\n</div>\n"
        )


def csv_line(values: Iterable[Any]) -> str:
    """Return the fields of a line of CSV; missing numbers are empty.

    Example:
        >>> csv_line(["SAM, rho 0.2", 0.5, float("nan")])
        '"SAM, rho 0.2",0.5,'
    """
    line = io.StringIO()
    csv.writer(line, lineterminator="").writerow(["" if _is_missing(value) else value for value in values])
    return line.getvalue()


def _is_missing(value: Any) -> bool:
    return value is None or value != value  # NaN


# ---- text


def _printed(row: Iterable[Cell]) -> list[str]:
    return [printable(str(cell)) for cell in row]


def _bound(text: str) -> str:
    """Return text in which no line breaks behind a ±."""
    return text.replace("± ", "±\u00a0")


def _wrapped(text: str, width: int) -> list[str]:
    lines = textwrap.wrap(_bound(text), width, break_on_hyphens=False)
    return [line.replace("\u00a0", " ") for line in lines] or [""]


def _longest_word(text: str) -> int:
    return max(map(len, _bound(text).split(" ")))


def _widths(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int) -> list[int] | None:
    """Return widths of columns, which are narrowed where it costs the fewest lines; None if they do not fit."""
    room = width - len(COLUMN_GAP) * (len(columns) - 1)
    texts = list(zip(*rows, strict=True))
    longest_words = [max(map(_longest_word, of_column)) for of_column in texts]
    least = [
        min(longest, LONGEST) if column.words else longest
        for column, longest in zip(columns, longest_words, strict=True)
    ]
    if sum(least) > room:
        return None

    @cache
    def heights(place: int, width: int) -> list[int]:
        return [len(_wrapped(text, width)) for text in texts[place]]

    def cost(widths: list[int]) -> tuple[int, int]:
        return sum(map(max, *map(heights, count(), widths))), max(widths)

    widths = [max(1, *map(len, these)) for these in texts]
    while sum(widths) > room:
        narrower = [[*widths[:n], widths[n] - 1, *widths[n + 1 :]] for n in range(len(widths)) if widths[n] > least[n]]
        widths = min(narrower, key=cost)
    return widths


def _lines(row: Sequence[str], columns: Sequence[Column], widths: Sequence[int]) -> list[str]:
    cells = [_wrapped(text, width) for text, width in zip(row, widths, strict=True)]
    sides = ["<" if column.words else ">" for column in columns]
    lines = []
    for parts in zip_longest(*cells, fillvalue=""):
        aligned = [f"{part:{side}{width}}" for part, side, width in zip(parts, sides, widths, strict=True)]
        lines.append(COLUMN_GAP.join(aligned).rstrip())
    return lines


def _paragraphs(header: Sequence[str], rows: Iterable[Sequence[str]], width: int) -> list[str]:
    paragraphs = []
    for name, *texts in rows:
        cells = "; ".join(f"{title} {text}" for title, text in zip(header[1:], texts, strict=True) if text != "-")
        text = textwrap.fill(_bound(f"{name}: {cells}"), width, subsequent_indent="  ", break_on_hyphens=False)
        paragraphs.append(text.replace("\u00a0", " "))
    return paragraphs


# ---- HTML


def number_text(text: str) -> str:
    """Return numbers with minus signs instead of hyphens, and spaces at which no line breaks, except at intervals.

    Words stay as they are.
    """
    if text[:1] not in set("+-<0123456789"):
        return text
    return text.replace("-", "\u2212").replace(" ", "\u00a0").replace("\u00a0[", " [")


def _html_heading(column: Column) -> str:
    kind = ' class="text"' if column.words else ""
    first = " data-descending" if column.descending else ""
    return (
        f'<th scope="col" aria-sort="none"{kind} data-csv="{escape(column.csv)}"{first}>'
        f'<button type="button">{escape(column.title)}</button></th>'
    )


def _html_cell(cell: Cell, column: Column, row: Cell, name: str, is_name: bool) -> str:
    """Return a cell; what opens has an id, this name."""
    classes = {"text": column.words, "best": cell.best, "none": not (cell.text or cell.marks)}
    content = ""
    if cell.text:
        content = f'<span class="v">{escape(cell.text if column.words else number_text(cell.text))}</span>'
    content += "".join(f' <span class="badge {_css_class(mark)}">{escape(mark)}</span>' for mark in cell.marks)
    if cell.interval:
        content += _drawn(cell.interval)
    if cell.link:
        content = f'<a href="{escape(cell.link)}">{content}</a>'
    if cell.more:
        title = escape(column.title)
        about = escape(f"{column.title}, {row}: {cell}")
        opens = f'class="more" popovertarget="{name}" data-column="{title}" aria-label="{about}"'
        button = f'<button type="button" {opens}>{content}</button>'
        lines = "".join(f"<p>{escape(line)}</p>" for line in cell.more.splitlines())
        content = f'{button}<div popover id="{name}"><h4>{escape(str(row))}</h4>{lines}</div>'
    tag, scope = ("th", ' scope="row"') if is_name else ("td", "")
    shown = " ".join(word for word, holds in classes.items() if holds)
    return (
        f'<{tag}{scope} class="{shown}" data-label="{escape(column.title)}" data-value="{escape(str(cell.key))}" '
        f'data-csv="{escape(cell.csv)}">{content}</{tag}>'
    )


def _css_class(mark: str) -> str:
    return escape("-".join(mark.lstrip("0123456789 ✓✗").split()))


def _drawn(interval: tuple[float, ...]) -> str:
    zero, low, high, mean = interval
    return (
        '<svg class="interval" viewBox="0 0 100 12" preserveAspectRatio="none" aria-hidden="true">'
        f'<line x1="{zero}" x2="{zero}" y1="0" y2="12" stroke="currentColor" stroke-dasharray="2 2" opacity="0.6"/>'
        f'<line x1="{low}" x2="{high}" y1="6" y2="6" stroke="currentColor" stroke-width="2"/>'
        f'<ellipse cx="{mean}" cy="6" rx="3.2" ry="3.2" fill="currentColor"/></svg>'
    )
