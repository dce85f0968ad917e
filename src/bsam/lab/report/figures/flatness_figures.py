"""Figures of flatness: eigenvalues of the Hessian, the loss around networks, sharpness during training.

They show the entries of ``flatness.json`` by title. Networks of one architecture are drawn on the same scale.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ....common.extras import require_package
from ....flatness.density import smoothed
from ...common.grouping import group_by
from ...recipes.planning import measured_on
from .figure_file import TEMPLATE, plot_text
from .style import style_of

if TYPE_CHECKING:
    import plotly.graph_objects as go

Entries: TypeAlias = Mapping[str, Mapping[str, Any]]  # of flatness.json, by title

SHARPNESS = {"max_sharpness": "MaxS", "min_sharpness": "MinS", "bilateral": "BilS"}
CHOSEN = {"largest": "the top {}", "magnitude": "the {} of largest magnitude", "both ends": "the {} at both ends"}
POINTS = 1000  # along a density
DECADES = 6  # shown below the peak of a density
LEVELS = 12
STEEPNESS = 2.0  # the height of level n grows with n to this power, to resolve the bottom; colours follow the levels
MAX_COLUMNS = 4
MAX_SURFACES = 12  # browsers draw at most 16 at a time
SMOOTHED = 40  # approximate number of independent points of a smoothed line
MAX_READINGS = 400  # points of a line
ROW, LINE = 360, 40  # pixels: the height of a row of panels, and of a network's eigenvalues


def entry_label(entry: Mapping[str, Any]) -> str:
    """Return the loss of an entry and its samples."""
    if "run" in entry:
        return measured_on(entry["run"], entry.get("samples"))
    return f"the loader's loss, {entry['samples']:,} samples" if "samples" in entry else ""


def _groups(entries: Entries, part: str) -> list[dict[str, Mapping[str, Any]]]:
    """Return the entries with this part, by architecture and title."""
    pairs = [(title, entry) for title, entry in entries.items() if entry.get(part)]
    groups = group_by(pairs, lambda pair: pair[1].get("architecture", ""))
    return [dict(group) for group in groups.values()]


def _styles(methods: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Return name, line and marker of the trace of each title, given the methods by title."""
    rows = group_by(methods, lambda title: methods[title])
    return {
        title: {"name": plot_text(title), **style_of(method, title, rows[method]).trace}
        for title, method in methods.items()
    }


def _methods(entries: Entries) -> dict[str, str]:
    return {title: entry.get("run", {}).get("method", "") for title, entry in entries.items()}


def _panels(rows: int, columns: int, height: float, **options: Any) -> go.Figure:
    """Return a figure of panels; ``height`` is in pixels, without the margins."""
    require_package("plotly", "plot")
    from plotly.subplots import make_subplots

    gap = min(100 / height, 0.5 / rows)
    figure = make_subplots(rows, columns, vertical_spacing=gap, **options)
    return figure.update_layout(template=TEMPLATE, height=height + 150, margin={"t": 90, "b": 60})


def _eigenvalue_axis(group: Entries, chosen: str = "") -> str:
    labels = " or ".join(dict.fromkeys(filter(None, map(entry_label, group.values()))))
    return f"eigenvalue of the Hessian{chosen}" + (f" ({labels})" if labels else "")


def eigenvalue_figure(entries: Entries) -> go.Figure | None:
    """Return the eigenvalues of each network as dots on a line."""
    groups, styles = _groups(entries, "eigenvalues"), _styles(_methods(entries))
    if not groups:
        return None
    heights = [LINE * (len(group) + 1) for group in groups]
    figure = _panels(len(groups), 1, sum(heights) + 100 * (len(groups) - 1), row_heights=heights)
    for row, group in enumerate(groups, 1):
        names: list[str] = []
        for title, entry in group.items():
            part = entry["eigenvalues"]
            values = np.array(part["values"], dtype=float)
            name = plot_text(title + ("" if part["converged"] else " (not converged)"))
            hover = f"%{{x:.4g}}<extra>mean {part['mean']:.3g}<br>variance {part['variance']:.3g}</extra>"
            dots = {**styles[title], "mode": "markers", "opacity": 0.7, "hovertemplate": hover, "showlegend": False}
            figure.add_scatter(x=values, y=[len(names)] * len(values), **dots, row=row, col=1)
            names.append(f"{name}<br>max {part['maximum']:.3g}")
        chosen = CHOSEN[part.get("which", "largest")].format(len(values))
        figure.update_xaxes(title_text=_eigenvalue_axis(group, f", {chosen}"), row=row, col=1)
        ticks = {"tickvals": list(range(len(names))), "ticktext": names, "range": [len(names) - 0.5, -0.5]}
        figure.update_yaxes(**ticks, zeroline=False, automargin=True, row=row, col=1)
    return figure


def density_figure(entries: Entries) -> go.Figure | None:
    """Return the densities of all eigenvalues, on a logarithmic axis, since most are near 0.

    Densities of a group are smoothed with the largest of their widths, so that their peaks are equally broad.
    """
    groups, styles = _groups(entries, "density"), _styles(_methods(entries))
    if not groups:
        return None
    figure = _panels(len(groups), 1, ROW * len(groups))
    for row, group in enumerate(groups, 1):
        parts = {title: entry["density"] for title, entry in group.items()}
        sigma = max(part["sigma"] for part in parts.values())
        ends = [end for part in parts.values() for end in (min(part["nodes"]), max(part["nodes"]))]
        x = np.linspace(min(ends) - 6 * sigma, max(ends) + 6 * sigma, POINTS)
        curves = {t: smoothed(x, np.array(p["nodes"]), np.array(p["weights"]), sigma) for t, p in parts.items()}
        peak = max(float(curve.max()) for curve in curves.values())
        top = math.log10(2 * peak)
        for title, curve in curves.items():
            y = np.maximum(curve, 10.0 ** (top - DECADES - 3))  # below the axis; 0 would leave gaps in the line
            figure.add_scatter(x=_small(x), y=_small(y), mode="lines", **styles[title], row=row, col=1)
        figure.update_xaxes(title_text=_eigenvalue_axis(group), row=row, col=1)
        axis = {"type": "log", "range": [top - DECADES, top], "exponentformat": "power", "dtick": 1}
        figure.update_yaxes(title_text="density", **axis, row=row, col=1)
    return figure


def _small(values: Any) -> NDArray[np.float32]:
    """Return numbers as half as many bytes, which plotly writes in base64."""
    return np.asarray(values, dtype=np.float32)


def shared_range(lowest: Sequence[float], highest: Sequence[float]) -> tuple[float, float]:
    """Return the range of losses to show for several models, given the ends of the range of each.

    It ends at the highest loss, or at twice the height of the flattest model if that is lower: otherwise a steep model
    would leave few levels for the others.
    """
    low = min(lowest, default=0.0)
    ceiling = min(max(highest), low + 2 * (min(highest) - low)) if highest else low
    return low, ceiling if ceiling > low else low + 1.0


def round_ticks(low: float, high: float) -> list[float]:
    """Return a few round numbers between ``low`` and ``high``, denser near ``low``, as the colours of losses are.

    Example:
        >>> round_ticks(0.0, 8.0), round_ticks(2.31, 2.9)
        ([0.0, 0.4, 1.5, 3.0, 6.0, 8.0], [2.32, 2.34, 2.4, 2.5, 2.7, 2.8])
    """
    ticks = set()
    for n in range(6):
        value, before = (low + (high - low) * (m / 5) ** STEEPNESS for m in (n, abs(n - 1)))
        gap = abs(value - before)
        power = 10.0 ** math.floor(math.log10(gap))
        step = max(factor * power for factor in (1, 2, 5) if factor * power <= gap)
        ticks.add(float(f"{step * round(value / step):.6g}"))
    return sorted(tick for tick in ticks if low <= tick <= high)


def _landscapes(entries: Entries, kind: str) -> go.Figure | None:
    """Return a panel per network, with colours that have one scale for each group."""
    groups = _groups(entries, "landscape")
    if not groups:
        return None
    columns = min(max(map(len, groups)), MAX_COLUMNS)
    rows = [math.ceil(len(group) / columns) for group in groups]
    titles, losses = [], {}
    for group, n in zip(groups, rows, strict=True):
        for title, entry in group.items():
            losses[title] = np.array(entry["landscape"]["loss"], dtype=float)
            middle = len(losses[title]) // 2
            titles.append(f"<b>{plot_text(title, 34)}</b><br>loss {losses[title][middle, middle]:.3g}")
        titles += [""] * (n * columns - len(group))
    options: dict[str, Any] = {"specs": [[{"type": kind}] * columns] * sum(rows), "subplot_titles": titles}
    options |= {"horizontal_spacing": 0.01} if kind == "scene" else {}  # room for the labels of the axes
    figure = _panels(sum(rows), columns, (ROW + 60) * sum(rows), **options)
    for n, group in enumerate(groups, 1):
        finite = [z[np.isfinite(z)] for title in group if np.isfinite(z := losses[title]).any()]
        low, ceiling = shared_range([float(z.min()) for z in finite], [float(z.max()) for z in finite])
        above = sum(rows[: n - 1])
        cut = f"<br>(cut off<br>at {ceiling:.3g})" if any(z.max() > ceiling for z in finite) else ""
        ticks = round_ticks(low, ceiling)
        bar: dict[str, Any] = {"title": {"text": f"loss{cut}"}, "ticktext": [f"{tick:g}" for tick in ticks]}
        bar |= {"tickvals": _height(ticks, low, ceiling), "len": rows[n - 1] / sum(rows)}
        bar |= {"y": 1 - (above + rows[n - 1] / 2) / sum(rows)}
        figure.update_layout({f"coloraxis{n}": {"cmin": 0, "cmax": 1, "colorscale": "Viridis", "colorbar": bar}})
        for m, (title, entry) in enumerate(group.items()):
            place = {"row": above + m // columns + 1, "col": m % columns + 1}
            z = np.nan_to_num(np.minimum(losses[title], ceiling), nan=ceiling).T  # rows of z go along y
            axis, colour = _small(entry["landscape"]["axis"]), _small(_height(z, low, ceiling))
            trace = {"x": axis, "y": axis, "name": plot_text(title), "coloraxis": f"coloraxis{n}"}
            hover = "%{x:.3g}, %{y:.3g}: loss %{customdata:.3g}<extra></extra>"
            trace |= {"customdata": _small(z), "hovertemplate": hover}
            if kind == "scene":
                figure.add_surface(z=_small(z), surfacecolor=colour, **trace, **place)
                figure.update_scenes(zaxis_range=[low, ceiling], **place)
            else:
                lines = {"start": 0, "end": 1, "size": 1 / (LEVELS - 1)}
                figure.add_contour(z=colour, contours=lines, **trace, **place)
                cross = {"symbol": "cross-thin", "size": 11, "line": {"color": "white", "width": 2}}
                figure.add_scatter(x=[0], y=[0], marker=cross, showlegend=False, hoverinfo="skip", **place)
    return figure


def _height(loss: Any, low: float, ceiling: float) -> NDArray[Any]:
    """Return the places of losses on the scale of the colours, from 0 to 1."""
    return np.asarray(((np.asarray(loss) - low) / (ceiling - low)) ** (1 / STEEPNESS))


def contour_figure(entries: Entries) -> go.Figure | None:
    """Return contours of the loss around each network; a group shares its levels."""
    figure = _landscapes(entries, "xy")
    if figure is not None:
        figure.update_xaxes(title_text="direction 1", nticks=5, constrain="domain")
        figure.update_yaxes(title_text="direction 2", nticks=5, constrain="domain")
        figure.for_each_yaxis(lambda axis: axis.update(scaleanchor=axis.anchor))
    return figure


def surface_figure(entries: Entries) -> go.Figure | None:
    """Return the loss around each of the first 12 networks as a surface; a group shares its vertical scale."""
    figure = _landscapes(dict(list(entries.items())[:MAX_SURFACES]), "scene")
    if figure is not None:
        titles = {"x": "direction 1", "y": "direction 2", "z": "loss"}
        axes = {f"{name}axis": {"title": {"text": text}, "nticks": 5} for name, text in titles.items()}
        eye, centre = {"x": 2.1, "y": 2.1, "z": 1.4}, {"x": 0.09, "y": -0.09, "z": -0.1}  # the default cuts labels
        camera = {"eye": eye, "center": centre}
        figure.update_scenes(aspectmode="cube", camera=camera, **axes)
    return figure


def smooth(values: Sequence[float], points: int = SMOOTHED) -> list[float]:
    """Return a centred running mean, over fewer values at the ends.

    Example:
        >>> smooth([0.0, 3.0, 0.0, 3.0, 0.0, 3.0], points=2)
        [1.5, 1.0, 2.0, 1.0, 2.0, 1.5]
    """
    half = len(values) // points // 2
    return [float(np.mean(values[max(i - half, 0) : i + half + 1])) for i in range(len(values))]


def probe_figure(
    readings: Mapping[str, Mapping[str, Sequence[float]]], methods: Mapping[str, str] | None = None
) -> go.Figure | None:
    """Return the running means of sharpness, and of the cosine of g and g_min, over the steps of training.

    Args:
        readings: the columns of a probe by title, each as ``probe_info`` returns them.
        methods: the method of each title, for the colours; by default the one that the title names.
    """
    if not readings:
        return None
    panels = SHARPNESS | {"cosine": "cosine of g and g<sub>min</sub>"}
    figure = _panels(2, 2, 2 * ROW, subplot_titles=list(panels.values()))
    styles = _styles({title: (methods or {}).get(title, "") for title in readings})
    for n, name in enumerate(panels):
        for title, columns in readings.items():
            values = np.array(columns[name], dtype=float)
            known = np.isfinite(values)
            steps, means = np.array(columns["step"])[known], _small(smooth(values[known].tolist()))
            shown = np.unique(np.linspace(0, len(means) - 1, min(len(means), MAX_READINGS)).round().astype(int))
            mode = "lines" if len(shown) > 1 else "markers"
            line = {**styles[title], "mode": mode, "legendgroup": title, "showlegend": n == 0}
            figure.add_scatter(x=steps[shown], y=means[shown], **line, row=n // 2 + 1, col=n % 2 + 1)
    return figure.update_xaxes(title_text="step").update_layout(hovermode="x unified")


def flatness_figures(entries: Entries) -> dict[str, go.Figure]:
    """Return all figures of the entries by heading."""
    readings = {title: entry["probe"] for title, entry in entries.items() if "probe" in entry}
    figures = {
        "Eigenvalues of the Hessian": eigenvalue_figure(entries),
        "Density of all eigenvalues": density_figure(entries),
        "Loss around each network": contour_figure(entries),
        "Loss around each network, in 3-D": surface_figure(entries),
        "Sharpness during training": probe_figure(readings, _methods(entries)),
    }
    return {heading: figure for heading, figure in figures.items() if figure is not None}
