"""Colours, dashes and symbols of methods. A method has one colour in all figures."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from zlib import crc32

from ....methods import METHODS
from ...training.config import BASE

# after Okabe and Ito; the contrast is at least 3 on white and on dark pages
COLOURS = ("#7d858d", "#2f8fd0", "#dd6a1f", "#0fa37b", "#bf66a3", "#ad7f00", "#7a74d6", "#d4525a")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "x", "triangle-down", "star", "pentagon")
FIRST = (BASE, "sam", "bsam")  # have the first colours for themselves


@dataclass(frozen=True)
class Style:
    """The style of a row: the index of its colour in ``COLOURS``, and plotly's names of dashes and symbol."""

    colour: int
    dash: str
    symbol: str

    @property
    def trace(self) -> dict[str, Any]:
        """The arguments ``line`` and ``marker`` of a plotly trace."""
        colour = COLOURS[self.colour]
        return {
            "line": {"color": colour, "dash": self.dash, "width": 2},
            "marker": {"color": colour, "symbol": self.symbol, "size": 9},
        }


def style_of(method: str, row: str, rows: Sequence[str] = ()) -> Style:
    """Return the style of a row of a table.

    Args:
        method: a name in ``bsam.METHODS``, or ``"base"``; empty if unknown, then the name in ``row`` decides.
        row: the row.
        rows: all rows of this method, in order; they differ in dashes and symbols.
    """
    others = [name for name in METHODS if name not in FIRST]
    titles = {METHODS[name].title: name for name in METHODS} | {"SGD": BASE}
    method = method or titles.get(re.split(r" \(|, ", row)[0], "")
    place = others.index(method) if method in others else crc32(row.encode("utf-8", "replace"))
    shared = len(COLOURS) - len(FIRST)
    colour = FIRST.index(method) if method in FIRST else len(FIRST) + place % shared
    number = (0 if method in FIRST else place // shared % len(DASHES)) + (rows.index(row) if row in rows else 0)
    return Style(colour, DASHES[(colour + number) % len(DASHES)], SYMBOLS[(colour + number) % len(SYMBOLS)])
