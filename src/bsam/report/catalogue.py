"""The list of methods, in plain text: it needs torch and numpy alone."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from itertools import zip_longest

from ..methods import METHODS

HEADER = ("name", "title", "class", "passes", "memory", "needs", "for", "reference")
NARROWEST, WIDEST = 100, 160


def methods_info() -> list[tuple[str, ...]]:
    """One row per method, in the order of the header; a dash where it needs nothing.

    Example:
        >>> methods_info()[0]
        ('sam', 'SAM', 'SAM', '2', '2', '-', 'Flat minima at twice the price: the method to start with.', 'Foret et al., ICLR 2021')
    """
    return [(m.name, m.title, m.cls.__name__, f"{m.passes:g}", m.memory, m.needs or "-", m.purpose, m.reference) for m in METHODS.values()]


def methods_table(width: int) -> str:
    """The rows below their header, in ``width`` columns (100 at least, 160 at most); long texts wrap.

    Example:
        >>> print("\\n".join(methods_table(160).splitlines()[:3]))  # doctest: +ELLIPSIS
        name ...  title ...  class ...  passes  memory ...  needs ...  for ...  reference
        ------...
        sam  ...  SAM   ...  SAM   ...  2       2      ...  -     ...  Flat ...  Foret et al., ICLR 2021
    """
    rows = [HEADER, *methods_info()]
    widths = _widths(rows, min(max(width, NARROWEST), WIDEST) - 2 * (len(HEADER) - 1))
    header, *body = (_lines(row, widths) for row in rows)
    return "\n".join([*header, "-" * (sum(widths) + 2 * (len(HEADER) - 1)), *(line for lines in body for line in lines)])


def _widths(rows: Sequence[Sequence[str]], room: int) -> list[int]:
    """Columns as wide as their texts, narrowed one by one where it costs the fewest lines, until they fit; no word is cut."""
    columns = list(zip(*rows, strict=True))
    words = [max(len(word) for text in column for word in text.split()) for column in columns]
    widths = [max(map(len, column)) for column in columns]
    while sum(widths) > room:
        narrower = [[*widths[:i], widths[i] - 1, *widths[i + 1 :]] for i in range(len(widths)) if widths[i] > words[i]]
        widths = min(narrower, key=lambda tried: (sum(len(_lines(row, tried)) for row in rows), max(tried)))
    return widths


def _lines(row: Sequence[str], widths: Sequence[int]) -> list[str]:
    cells = [textwrap.wrap(text, width) for text, width in zip(row, widths, strict=True)]
    return ["  ".join(part.ljust(width) for part, width in zip(parts, widths, strict=True)).rstrip() for parts in zip_longest(*cells, fillvalue="")]
