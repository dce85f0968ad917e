"""The look of figures: colours, dashes and symbols of methods, texts, and panels side by side.

A method has one colour in all figures.
"""

from __future__ import annotations

import html
import math
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from zlib import crc32

import numpy as np

from ....common.extras import require_package
from ....methods import METHODS
from ...config import BASE

if TYPE_CHECKING:
    import plotly.graph_objects as go

# after Okabe and Ito; the contrast is at least 3 on white and on dark pages
COLOURS = ("#7d858d", "#2f8fd0", "#dd6a1f", "#0fa37b", "#bf66a3", "#ad7f00", "#7a74d6", "#d4525a")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "x", "triangle-down", "star", "pentagon")
WITH_OWN_COLOUR = (BASE, "sam", "bsam")  # have the first colours for themselves
MAX_NAMES = 20  # in a legend
LEGEND = {"orientation": "h", "x": 0, "y": 0, "yref": "container", "yanchor": "bottom", "maxheight": 1}


def style_of(method: str, row: str, rows: Sequence[str] = ()) -> dict[str, Any]:
    """Return the arguments ``line`` and ``marker`` of a plotly trace for a row of a table.

    Args:
        method: a name in ``bsam.METHODS``, or ``"base"``; empty if unknown, then the name in ``row`` decides.
        row: the row.
        rows: all rows of this method, in order; they differ in dashes and symbols.
    """
    others = [name for name in METHODS if name not in WITH_OWN_COLOUR]
    titles = {METHODS[name].title: name for name in METHODS} | {"SGD": BASE}
    method = method or titles.get(re.split(r" \(|, ", row)[0], "")
    place = others.index(method) if method in others else crc32(row.encode("utf-8", "replace"))
    shared = len(COLOURS) - len(WITH_OWN_COLOUR)
    colour = WITH_OWN_COLOUR.index(method) if method in WITH_OWN_COLOUR else len(WITH_OWN_COLOUR) + place % shared
    number = colour + (0 if method in WITH_OWN_COLOUR else place // shared % len(DASHES))
    number += rows.index(row) if row in rows else 0
    return {
        "line": {"color": COLOURS[colour], "dash": DASHES[number % len(DASHES)], "width": 2},
        "marker": {"color": COLOURS[colour], "symbol": SYMBOLS[number % len(SYMBOLS)], "size": 9},
    }


def named_styles(methods: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Return name, legend group, line and marker of the trace of each row, given the methods by row."""
    rows: dict[str, list[str]] = {}
    for row, method in methods.items():
        rows.setdefault(method, []).append(row)
    return {
        row: {"type": "scatter", "name": plot_text(row), "legendgroup": row, **style_of(method, row, rows[method])}
        for row, method in methods.items()
    }


def plot_text(text: str, width: int = 60) -> str:
    """Return text for plotly, which reads it as HTML: escaped, and wrapped to lines of at most ``width`` letters.

    Example:
        >>> plot_text("BSAM <b>"), plot_text("a long name", 6)
        ('BSAM &lt;b&gt;', 'a long<br>name')
    """
    return "<br>".join(html.escape(line, quote=False) for line in textwrap.wrap(text, width))


def new_axis(title: str, **options: Any) -> dict[str, Any]:
    """Return a labelled axis."""
    return {"title": {"text": title, "standoff": 5}, **options}


def new_figure(title: str, caption: str, data: Iterable[Mapping[str, Any]], **layout: Any) -> go.Figure:
    """Return a figure; its caption is ``layout.meta["caption"]``. Numbers take half of the bytes of float64.

    A legend of more than ``MAX_NAMES`` names would take the place of the curves; names are then shown on hover.
    """
    require_package("plotly", "plot")
    import plotly.graph_objects as go

    traces = [_small(trace) for trace in data]
    if len({trace.get("name") for trace in traces}) > MAX_NAMES:
        layout |= {"showlegend": False, "hovermode": "closest"}
        caption += " Point at a line or a marker to see its name."
    meta = {"caption": caption, **layout.pop("meta", {})}
    shown = {"template": "plotly_white", "title": {"text": title}, "meta": meta, "legend": LEGEND, **layout}
    return go.Figure({"data": traces, "layout": shown}, _validate=False)


def _small(trace: Mapping[str, Any]) -> dict[str, Any]:
    """Return a trace with float32 arrays instead of float64."""
    small = dict(trace)
    for name, value in trace.items():
        if isinstance(value, np.ndarray) and value.dtype == np.float64:
            small[name] = value.astype(np.float32)
    return small


def panel_layout(titles: Sequence[str], columns: int, width: int, height: int = 0, **axes: Any) -> dict[str, Any]:
    """Return the layout of panels with the axes x1 and y1, x2 and y2, ..., or scene1, scene2, ...

    Args:
        titles: the titles of the panels, as plotly reads them.
        columns: the number of columns; pages have fewer if a panel would be narrower than ``width`` pixels.
        width: the smallest width of a panel on a page.
        height: its height; 0 if it is a square.
        axes: the options of all ``xaxis`` and ``yaxis``, or of all ``scene``.
    """
    rows = math.ceil(len(titles) / columns)
    notes = []
    gap = {} if height else {"xgap": 0.02 if "scene" in axes else 0.3}  # for the labels between squares
    layout: dict[str, Any] = {"grid": {"rows": rows, "columns": columns, "pattern": "independent", **gap}}
    for number, title in enumerate(titles):
        row, column = divmod(number, columns)
        place: dict[str, Any] = {"xref": f"x{number + 1} domain", "x": 0, "yref": f"y{number + 1} domain", "y": 1}
        for name, options in axes.items():
            layout[f"{name}{number + 1}"] = dict(options)
        if "scene" in axes:
            layout[f"scene{number + 1}"]["domain"] = {"row": row, "column": column}
            place = {"xref": "paper", "x": column / columns, "yref": "paper", "y": 1 - row / rows}
        elif not height:
            layout[f"yaxis{number + 1}"]["scaleanchor"] = f"x{number + 1}"
        corner = {"xanchor": "left", "yanchor": "bottom", "align": "left", "showarrow": False}
        notes.append({"text": title, **place, **corner})
    size = {"annotations": notes, "height": rows * (height or 360) + 150, "margin": {"t": 110}}
    return {**layout, **size, "meta": {"panel": {"width": width, "height": height}}}
