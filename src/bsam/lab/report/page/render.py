"""The template of the page, filled: one HTML file that works offline."""

from __future__ import annotations

import base64
import gzip
from collections.abc import Iterable
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from ....common.extras import require_package

if TYPE_CHECKING:
    import plotly.graph_objects as go
    from jinja2 import Template


FILES = files(__package__) / "files"


@cache
def packed_plotly() -> str:
    """Return plotly.js, gzipped and in base64: 2 MB instead of 5."""
    from plotly.offline import get_plotlyjs

    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), 9, mtime=0)).decode()


@cache
def template(name: str) -> Template:
    """Return a template of the folder ``files``, which escapes what it shows."""
    require_package("jinja2", "plot")
    from jinja2 import Environment

    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["class"] = lambda text: text.lstrip("0123456789 ").replace(" ", "-")
    return environment.from_string((FILES / name).read_text("utf-8"))


def render(plots: bool = True, **parts: Any) -> str:
    """Return the page with these parts, and what draws its plots; it leaves out the others."""
    page = template("page.html.j2")
    from markupsafe import Markup

    code = {
        "style": Markup((FILES / "page.css").read_text("utf-8")),
        "script": Markup((FILES / "page.js").read_text("utf-8")),
        "plotly": packed_plotly() if plots else "",
    }
    return page.render(**code, **parts)


def figure_info(figure: go.Figure, name: str = "") -> dict[str, Any]:
    """Return what the template shows of a figure; its plot is JSON, without letters that end a script in HTML."""
    from plotly.io.json import to_json_plotly

    plot = figure.to_plotly_json()
    layout = plot["layout"]
    del layout["template"]
    title = layout.pop("title")["text"]
    caption = layout["meta"].pop("caption")
    is_surface = any(trace["type"] == "surface" for trace in plot["data"])
    about = {"wide": "grid" in layout, "surfaces": is_surface}
    return {"name": name, "title": title, "caption": caption, "plot": to_json_plotly(plot), **about}


def figures_html(title: str, figures: Iterable[go.Figure]) -> bytes:
    """Return a page with the figures. It needs no internet; surfaces of a figure rotate together."""
    return render(title=title, figures=[figure_info(figure) for figure in figures]).encode("utf-8", "replace")
