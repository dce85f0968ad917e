"""Plotly figures as parts of the page: a plot for each panel, so that a phone shows them below each other."""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import Markup

from ...common.grouping import group_by

if TYPE_CHECKING:
    import plotly.graph_objects as go

DIGITS = 5  # significant digits of what is drawn
PAGE_SETS = {"height", "width", "margin", "title", "meta", "annotations", "showlegend", "legend", "coloraxis"}


def figure_info(title: str, caption: str, figure: go.Figure) -> dict[str, Any]:
    """Return what the page shows of a figure: its panels with their JSON, a legend, and the scale of its colours."""
    content = _plain(json.loads(figure.to_json(validate=False)))
    data, layout = content["data"], content["layout"]
    groups = group_by(data, _subplot)
    titles = [plain_text(note["text"]) for note in layout.get("annotations", [])]
    panels = []
    for number, key in enumerate(sorted(groups, key=_number)):
        name = titles[number] if number < len(titles) else ""
        panels.append({"title": name, "plot": {"data": groups[key], "layout": _panel_layout(layout, key)}})
        for trace in groups[key]:
            for axis in ("xaxis", "yaxis", "scene"):
                trace.pop(axis, None)
    kind = "surfaces" if any(trace["type"] == "surface" for trace in data) else ""
    kind = kind or ("contours" if any(trace["type"] == "contour" for trace in data) else "")
    height = layout.get("height") if len(groups) == 1 and not kind else None
    about = {"title": title, "caption": caption, "kind": kind, "panels": panels, "height": height}
    return {**about, "legend": _legend(data), "scale": _scale(layout)}


def plain_text(text: str) -> str:
    """Return a text of plotly, which is HTML, as plain text.

    Example:
        >>> plain_text("<b>SAM &lt;1&gt;</b><br>loss 0.1")
        'SAM <1>: loss 0.1'
    """
    return str(Markup(text.replace("</b><br>", "</b>: ").replace("<br>", " ")).striptags())


def _plain(value: Any) -> Any:
    """Return JSON values with rounded numbers, None for those that are not finite, and lists instead of base64."""
    if isinstance(value, Mapping):
        if "bdata" not in value:
            return {name: _plain(item) for name, item in value.items() if name != "template"}
        array = np.frombuffer(base64.b64decode(value["bdata"]), value["dtype"])
        sides = [int(side) for side in str(value.get("shape", len(array))).split(",")]
        return _plain(array.reshape(sides).tolist())
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
    return value


def _subplot(trace: Mapping[str, Any]) -> str:
    """Return the name of the horizontal axis or the scene that a trace is drawn in."""
    return str(trace.get("scene", trace.get("xaxis", "x")))


def _number(subplot: str) -> int:
    return int(re.sub(r"\D", "", subplot) or 1)


def _panel_layout(layout: Mapping[str, Any], subplot: str) -> dict[str, Any]:
    """Return the layout of a panel, whose axes are the first ones of their plot."""
    number = re.sub(r"\D", "", subplot)
    axes = {name: dict(layout.get(f"{name}{number}", {})) for name in ("xaxis", "yaxis", "scene")}
    for axis in axes.values():
        for name in ("domain", "anchor", "matches"):
            axis.pop(name, None)
    if "scaleanchor" in axes["yaxis"]:
        axes["yaxis"]["scaleanchor"] = "x"
    others = [name for name in layout if not re.fullmatch(r"([xy]axis|scene)\d*", name) and name not in PAGE_SETS]
    kept = {name: layout[name] for name in others}
    if "coloraxis" in layout:
        scale = {name: value for name, value in layout["coloraxis"].items() if name != "colorbar"}
        kept["coloraxis"] = {**scale, "showscale": False}
    unused = ("scene",) if not subplot.startswith("scene") else ("xaxis", "yaxis")
    return kept | {name: axis for name, axis in axes.items() if name not in unused}


def _legend(data: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return an entry for each group of traces that has one: its name, line and symbol."""
    entries: dict[str, dict[str, Any]] = {}
    for trace in data:
        if trace["type"] != "scatter" or not trace.get("showlegend", True) or "name" not in trace:
            continue
        mode, line = trace.get("mode", "lines"), trace.get("line", {})
        marker = trace.get("marker", {})
        shown = {"dash": line.get("dash") if "lines" in mode else None}
        shown["symbol"] = marker.get("symbol") if "markers" in mode else None
        colour = line.get("color") or marker.get("color")
        entries.setdefault(
            trace["name"], {"key": trace["name"], "name": plain_text(trace["name"]), "colour": colour, **shown}
        )
    return list(entries.values())


def _scale(layout: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the ticks of a colour bar: their places from 0 to 1, and their texts."""
    bar = layout.get("coloraxis", {}).get("colorbar")
    if bar is None:
        return None
    return {
        "title": plain_text(bar["title"]["text"]),
        "ticks": list(zip(bar["tickvals"], bar["ticktext"], strict=True)),
    }
