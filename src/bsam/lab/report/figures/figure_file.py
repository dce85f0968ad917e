"""Plotly figures as one HTML file that works offline."""

from __future__ import annotations

import base64
import gzip
import html
import re
import textwrap
from collections.abc import Mapping
from functools import cache
from string import Template
from typing import TYPE_CHECKING

from ....common.extras import require_package

if TYPE_CHECKING:
    import plotly.graph_objects as go

TEMPLATE = "plotly_white"
# plotly has no shared camera: the script copies each rotation of a surface to the others of its figure
PAGE = Template("""<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>$title</title>
<style>body { font: 16px system-ui, sans-serif; max-width: 1400px; margin: 0 auto; padding: 1em; background: #fff }
h1 { font-size: 1.4em } h2 { font-size: 1.15em } .figure { min-width: 800px }</style>
<h1>$title</h1>
$sections
<script type="text/plain" id="plotly">$plotly</script>
<script type="module">
const packed = await fetch("data:application/gzip;base64," + document.getElementById("plotly").textContent);
const code = await new Response(packed.body.pipeThrough(new DecompressionStream("gzip"))).text();
document.head.append(Object.assign(document.createElement("script"), {textContent: code}));
for (const place of document.querySelectorAll("div.figure")) {
  const {data, layout} = JSON.parse(place.nextElementSibling.textContent);
  await Plotly.newPlot(place, data, layout, {responsive: true, displaylogo: false,
      toImageButtonOptions: {format: "svg"}});
  const scenes = Object.keys(layout).filter(name => name.startsWith("scene"));
  let busy = false;
  const turn = change => {
    const turned = scenes.find(name => change[name + ".camera"]);
    if (busy || !turned) return;
    busy = true;
    const cameras = scenes.map(name => [name + ".camera", change[turned + ".camera"]]);
    Plotly.relayout(place, Object.fromEntries(cameras)).then(() => { busy = false; });
  };
  place.on("plotly_relayouting", turn);
  place.on("plotly_relayout", turn);
}
</script>
</html>
""")


def plot_text(text: str, width: int = 60) -> str:
    """Return text for plotly, which reads it as HTML: wrapped, and with the names of radii as symbols.

    Example:
        >>> plot_text("BSAM, rho_min 0.1 <b>"), plot_text("a long name", 6)
        ('BSAM, ρ<sub>min</sub> 0.1 &lt;b&gt;', 'a long<br>name')
    """
    escaped = "<br>".join(html.escape(line, quote=False) for line in textwrap.wrap(text, width))
    return re.sub(r"\brho\b", "\u03c1", re.sub(r"\brho_(max|min)\b", "\u03c1<sub>\\1</sub>", escaped))


@cache
def packed_plotly() -> str:
    """Return plotly.js, gzipped and in base64: 2 MB instead of 5."""
    require_package("plotly", "plot")
    from plotly.offline import get_plotlyjs

    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), 9, mtime=0)).decode()


def figures_html(title: str, figures: Mapping[str, go.Figure]) -> bytes:
    """Return a page with the figures, by heading. It needs no internet; surfaces of a figure rotate together."""
    sections = [
        f'<h2>{html.escape(heading)}</h2>\n<div class="figure"></div>\n'
        f'<script type="application/json">{figure.to_json().replace("<", chr(92) + "u003c")}</script>'
        for heading, figure in figures.items()
    ]
    parts = {"title": html.escape(title), "sections": "\n".join(sections), "plotly": packed_plotly()}
    return PAGE.substitute(parts).encode("utf-8", "replace")
