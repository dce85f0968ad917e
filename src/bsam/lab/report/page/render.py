"""The template of the page, filled: one HTML file that works offline."""

from __future__ import annotations

import base64
import gzip
from collections.abc import Iterable
from functools import cache
from importlib.resources import files
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ....common.extras import require_package

if TYPE_CHECKING:
    import plotly.graph_objects as go


@cache
def packed_plotly() -> str:
    """Return plotly.js, gzipped and in base64: 2 MB instead of 5; without plotly, nothing."""
    if find_spec("plotly") is None:
        return ""
    from plotly.offline import get_plotlyjs

    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), 9, mtime=0)).decode()


def render(**parts: Any) -> str:
    """Return the page with these parts; it leaves out the others."""
    require_package("jinja2", "plot")
    from jinja2 import Environment
    from markupsafe import Markup

    texts = {path.name: path.read_text("utf-8") for path in (files(__package__) / "files").iterdir()}
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["class"] = lambda text: text.lstrip("0123456789 ").replace(" ", "-")
    code = {"style": Markup(texts["page.css"]), "script": Markup(texts["page.js"]), "plotly": packed_plotly()}
    return environment.from_string(texts["page.html.j2"]).render(**code, **parts)


def figure_info(figure: go.Figure, name: str = "") -> dict[str, Any]:
    """Return what the template shows of a figure; its plot is JSON, without letters that end a script in HTML."""
    from plotly.io.json import to_json_plotly

    plot = figure.to_plotly_json()
    layout = plot["layout"]
    del layout["template"]
    title, caption = layout.pop("title")["text"], layout["meta"].pop("caption")
    is_surface = any(trace["type"] == "surface" for trace in plot["data"])
    about = {"wide": "grid" in layout, "surfaces": is_surface}
    return {"name": name, "title": title, "caption": caption, "plot": to_json_plotly(plot), **about}


def figures_html(title: str, figures: Iterable[go.Figure]) -> bytes:
    """Return a page with the figures. It needs no internet; surfaces of a figure rotate together."""
    return render(title=title, figures=[figure_info(figure) for figure in figures]).encode("utf-8", "replace")
