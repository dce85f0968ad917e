"""Figures of loss landscapes. Models of a group are drawn on the same scale."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ....common.extras import require_package
from ....flatness.landscape import Landscape
from ....flatness.products import Array
from ...inference.flatness_numbers import LandscapeInfo, landscape_info
from ...recipes.experiments import Recipe
from ...training.files import write
from ...training.run_dir import RunDir, RunState
from .panels import MAX_COLUMNS, group_heading, grouped, panel_title, panels, save, typeset

LEVELS = 12
STEEPNESS = 2.0  # the height of level n grows with n to this power, to resolve the bottom; colours follow the levels
ROW = 480  # pixels of the interactive page, for each row of surfaces
# plotly has no shared camera: copy each rotation of a surface to the others, while it happens and when it ends
TURN_TOGETHER = """
const page = document.getElementById("{plot_id}");
const scenes = Object.keys(page.layout).filter(name => name.startsWith("scene"));
let busy = false;
function follow(change) {
    const turned = scenes.find(name => change && change[name + ".camera"]);
    if (busy || !turned) return;
    busy = true;
    const cameras = Object.fromEntries(scenes.map(name => [name + ".camera", change[turned + ".camera"]]));
    Plotly.relayout(page, cameras).then(() => { busy = false; });
}
page.on("plotly_relayouting", follow);
page.on("plotly_relayout", follow);
"""


def recipe_landscapes_info(recipe: Recipe, states: Sequence[RunState]) -> list[LandscapeInfo]:
    """Return the landscapes of finished runs, grouped by the sections of the table."""
    infos = []
    for state in states:
        if state.finished and (surface := RunDir(state.path).surface()) is not None:
            axis, cell = np.array(surface.axis), recipe.cell(state.run)
            infos += landscape_info(
                {cell.row: Landscape((axis, axis), np.array(surface.loss, dtype=float))}, cell.section
            )
    return infos


def plot_contours(infos: Sequence[LandscapeInfo], path: Path) -> None:
    """Draw contours of the loss around each model; a group shares its levels."""
    figure, groups = panels(infos, 3.4, 3.7)
    # the constrained layout cuts off titles, because axes with equal scales do not fill the height of their cells
    figure.set_layout_engine("compressed", w_pad=0.1, h_pad=0.1)
    for group in groups:
        draw_contours(figure, group)
        info, ax = group[0]
        ax.set_ylabel(f"{group_heading(info, groups)}second direction")
    save(figure, path)


def draw_contours(figure: Any, group: Sequence[tuple[LandscapeInfo, Any]]) -> None:
    """Draw contours on shared levels, with one colour bar.

    Args:
        figure: a figure or subfigure.
        group: the models with their panels.
    """
    levels, colours = _levels([info for info, _ in group])
    clipped = any(np.max(np.nan_to_num(info.loss, nan=np.inf)) > levels[-1] for info, _ in group)
    style = {"levels": levels, **colours, "extend": "max" if clipped else "neither"}
    for info, ax in group:
        loss = _clipped(info, levels[-1]).T  # the first direction is the horizontal axis
        filled = ax.contourf(info.axis, info.axis, loss, **style)
        ax.contour(info.axis, info.axis, loss, levels=levels, colors="white", linewidths=0.6)
        ax.plot(0, 0, marker="+", color="white", markersize=9)
        ax.set_title(_title(info), fontsize=10)
        ax.set_aspect("equal")
        _label(ax, info)
    axes = [ax for _, ax in group]
    figure.colorbar(filled, ax=axes, label="loss", format="%.3g", ticks=levels, shrink=0.85, aspect=25, pad=0.02)


def plot_surfaces(infos: Sequence[LandscapeInfo], path: Path) -> None:
    """Draw the loss around each model as a surface; a group shares its vertical scale."""
    figure, groups = panels(infos, 4.2, 3.7, projection="3d")
    for group in groups:
        levels, colours = _levels([info for info, _ in group])
        style = {**colours, "rstride": 1, "cstride": 1, "linewidth": 0.1, "edgecolor": "#00000030"}
        for info, ax in group:
            x, y = np.meshgrid(info.axis, info.axis, indexing="ij")
            ax.plot_surface(x, y, _clipped(info, levels[-1]), **style)
            ax.set_zlim(levels[0], levels[-1])
            ax.set_title(group_heading(info, groups) + _title(info), y=0.98, fontsize=10)
            ax.locator_params(axis="z", nbins=5)
            _label(ax, info)
            ax.set(ylabel="second direction", zlabel="loss")
            ax.set_box_aspect(None, zoom=0.88)  # otherwise the label of the vertical axis is cut off
    save(figure, path)


def write_interactive(infos: Sequence[LandscapeInfo], path: Path, title: str = "Loss around each network") -> None:
    """Write an interactive page with a surface per model. It works offline, and the surfaces rotate together.

    A group shares its scale.
    """
    require_package("plotly", "plot")
    import plotly.graph_objects as go
    from plotly.colors import get_colorscale

    groups = grouped(infos)
    columns = min(max(map(len, groups)), MAX_COLUMNS)
    rows = sum(math.ceil(len(group) / columns) for group in groups)
    page = go.Figure()
    layout: dict[str, Any] = {}
    colours = [(position**STEEPNESS, colour) for position, colour in get_colorscale("Viridis")]
    notes: list[dict[str, Any]] = []
    above = 0
    for n, group in enumerate(groups):
        levels, _ = _levels(group)
        low, ceiling = float(levels[0]), float(levels[-1])
        group_rows = math.ceil(len(group) / columns)
        middle, height = 1 - (above + group_rows / 2) / rows, 0.8 * group_rows / rows
        bar = {"title": {"text": "loss"}, "y": middle, "len": height}
        colour_axis = f"coloraxis{n + 1 if n else ''}"
        layout[colour_axis] = {"cmin": low, "cmax": ceiling, "colorscale": colours, "colorbar": bar}
        for m, info in enumerate(group):
            scene = f"scene{len(notes) + 1 if notes else ''}"
            left, top = m % columns / columns, 1 - (above + m // columns) / rows
            layout[scene] = {
                "xaxis": {"title": {"text": "first direction"}},
                "yaxis": {"title": {"text": "second direction"}},
                "zaxis": {"title": {"text": "loss"}, "range": [low, ceiling]},
                "domain": {"x": [left, left + 1 / columns], "y": [top - 0.98 / rows, top - 0.1 / rows]},
                "aspectmode": "cube",
                "camera": {"eye": {"x": 1.8, "y": 1.8, "z": 1.2}},  # plotly's default cuts the lower corner
            }
            name = re.sub(r"\brho_(max|min)\b", "\u03c1<sub>\\1</sub>", html.escape(info.title, quote=False))
            heading = html.escape(group_heading(info, groups), quote=False).replace("\n", "<br>")
            text = f"{heading}<b>{name}</b><br>loss {info.centre:.3g}"
            anchor = {"x": left + 0.5 / columns, "y": top, "xanchor": "center", "yanchor": "top"}
            notes.append({"text": text, "showarrow": False, "xref": "paper", "yref": "paper", **anchor})
            z = _clipped(info, ceiling).T  # rows of z go along y
            page.add_surface(x=info.axis, y=info.axis, z=z, name=info.title, scene=scene, coloraxis=colour_axis)
        above += group_rows
    layout |= {"annotations": notes, "margin": {"l": 0, "r": 0, "b": 0, "t": 60}, "height": 60 + ROW * rows}
    page.update_layout(title={"text": title, "x": 0.5}, **layout)
    write(path, page.to_html(include_plotlyjs=True, post_script=TURN_TOGETHER).encode())


def _title(info: LandscapeInfo) -> str:
    return f"{typeset(panel_title(info.title))}\nloss {info.centre:.3g}"


def _label(ax: Any, info: LandscapeInfo) -> None:
    """Label the first direction, with ticks at the ends and the centre only: more would run into the labels."""
    ends = [info.axis[0], 0, info.axis[-1]]
    ax.set(xticks=ends, yticks=ends, xlabel="first direction")


def shared_range(lowest: Sequence[float], highest: Sequence[float]) -> tuple[float, float]:
    """Return the range of losses to show for several models, given the ends of the range of each.

    It ends at the highest loss, or at twice the height of the flattest model if that is lower: otherwise a steep model
    would leave few levels for the others.
    """
    low = min(lowest, default=0.0)
    ceiling = min(max(highest), low + 2 * (min(highest) - low)) if highest else low
    return low, ceiling if ceiling > low else low + 1.0


def _levels(infos: Sequence[LandscapeInfo]) -> tuple[Array, dict[str, Any]]:
    """Return levels for all models, denser near the bottom, and colours in equal steps between them."""
    from matplotlib.colors import PowerNorm

    finite = [info for info in infos if np.isfinite(info.lowest)]
    low, ceiling = shared_range([info.lowest for info in finite], [info.highest for info in finite])
    levels = low + (ceiling - low) * np.linspace(0, 1, LEVELS) ** STEEPNESS
    return levels, {"cmap": "viridis", "norm": PowerNorm(1 / STEEPNESS, levels[0], levels[-1])}


def _clipped(info: LandscapeInfo, ceiling: float) -> Array:
    return np.nan_to_num(np.minimum(np.array(info.loss, dtype=float), ceiling), nan=ceiling, posinf=ceiling)
