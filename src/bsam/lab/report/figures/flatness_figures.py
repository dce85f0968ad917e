"""Figures of flatness: eigenvalues of the Hessian, the loss around networks, sharpness during training.

They show the entries of ``flatness.json`` by title, on one scale.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ....flatness.density import smoothed
from ...common.printing import group_by
from ...recipes.plan import measured_on
from .style import named_styles, new_axis, new_figure, panel_layout, plot_text

if TYPE_CHECKING:
    import plotly.graph_objects as go

Entries: TypeAlias = Mapping[str, Mapping[str, Any]]  # of flatness.json, by title

SHARPNESS = {"max_sharpness": "MaxS", "min_sharpness": "MinS", "bilateral": "BilS"}
CHOSEN = {"largest": "the top {}", "magnitude": "the {} of largest magnitude", "both ends": "the {} at both ends"}
POINTS = 1000  # along a density
DECADES = 6  # shown below the peak of a density
LEVELS = 12
STEEPNESS = 2.0  # the height of level n grows with n to this power, to resolve the bottom; colours follow the levels
PANELS_PER_ROW = 4
MAX_SURFACES = 12  # browsers draw at most 16 at a time
SMOOTHED = 40  # approximate number of independent points of a smoothed line
MAX_LINE_POINTS = 200  # of a line
WIDE_RANGE = (
    100.0  # values whose largest and smallest magnitudes differ by more than this factor get a logarithmic axis
)
WIDE_WORDS = "Axes of values that differ widely are logarithmic; with negative values, they are linear around 0."
MAX_TICKS = 3  # powers of ten on each side of 0


def entry_label(entry: Mapping[str, Any]) -> str:
    """Return the loss of an entry and its samples."""
    if "run" in entry:
        return measured_on(entry["run"], entry.get("samples"))
    return f"the loader's loss, {entry['samples']:,} samples" if "samples" in entry else ""


def seeds_list(seeds: Sequence[int]) -> str:
    """Return the numbers of seeds in words.

    Example:
        >>> seeds_list([2, 0, 2]), seeds_list([1])
        ('seeds 0, 2', 'seed 1')
    """
    numbers = sorted(set(seeds))
    return f"{'seeds' if len(numbers) > 1 else 'seed'} {', '.join(map(str, numbers))}"


def _caption(entries: Entries, rest: str = "") -> str:
    """Return which networks are shown, and their loss."""
    runs = [entry["run"] for entry in entries.values() if "run" in entry]
    seeds = [run["seed"] for run in runs if "seed" in run]
    networks = f"Networks of {seeds_list(seeds)}; " if seeds else ""
    labels = " or ".join(dict.fromkeys(filter(None, map(entry_label, entries.values()))))
    training = ", with the labels used in training" if runs else ""
    return (f"{networks}{labels}{training}." if labels else "") + rest


def _styles(entries: Entries) -> dict[str, dict[str, Any]]:
    return named_styles({title: entry.get("run", {}).get("method", "") for title, entry in entries.items()})


def eigenvalue_figure(entries: Entries) -> go.Figure | None:
    """Return the eigenvalues of each network as dots on a line."""
    entries = {title: entry for title, entry in entries.items() if entry.get("eigenvalues")}
    if not entries:
        return None
    data = []
    names: list[str] = []
    styles = _styles(entries)
    for title, entry in entries.items():
        part = entry["eigenvalues"]
        values = np.array(part["values"], dtype=float)
        hover = f"%{{x:.4g}}<extra>mean {part['mean']:.3g}<br>variance {part['variance']:.3g}</extra>"
        dots = {**styles[title], "mode": "markers", "opacity": 0.7, "hovertemplate": hover, "showlegend": False}
        data.append({**dots, "x": values, "y": np.full(len(values), len(names))})
        name = plot_text(title + ("" if part["converged"] else " (not converged)"), 28)
        names.append(f"{name}<br>max {part['maximum']:.3g}")
    chosen = CHOSEN[part.get("which", "largest")].format(len(values))
    ticks = {"tickvals": list(range(len(names))), "ticktext": names, "range": [len(names) - 0.5, -0.5]}
    axes = {
        "xaxis": new_axis(f"eigenvalue, {chosen}"),
        "yaxis": {**ticks, "zeroline": False, "automargin": True},
    }
    height = 40 * (len(names) + 1) + 80
    return new_figure("Eigenvalues of the Hessian", _caption(entries), data, **axes, height=height)


def density_figure(entries: Entries) -> go.Figure | None:
    """Return the densities of all eigenvalues, on a logarithmic axis, since most are near 0.

    They are smoothed with the largest of their widths, so that their peaks are equally broad.
    """
    entries = {title: entry for title, entry in entries.items() if entry.get("density")}
    if not entries:
        return None
    parts = {title: entry["density"] for title, entry in entries.items()}
    sigma = max(part["sigma"] for part in parts.values())
    nodes = np.concatenate([part["nodes"] for part in parts.values()])
    x = np.linspace(nodes.min() - 6 * sigma, nodes.max() + 6 * sigma, POINTS)
    curves = {t: smoothed(x, np.array(p["nodes"]), np.array(p["weights"]), sigma) for t, p in parts.items()}
    top = math.log10(2 * max(float(curve.max()) for curve in curves.values()))
    lowest = 10.0 ** (top - DECADES - 3)  # below the axis; 0 would leave gaps in the line
    styles = _styles(entries)
    data = [{**styles[t], "x": x, "y": np.maximum(curve, lowest), "mode": "lines"} for t, curve in curves.items()]
    axis = {"type": "log", "range": [top - DECADES, top], "exponentformat": "power", "dtick": 1}
    axes = {"xaxis": new_axis("eigenvalue of the Hessian"), "yaxis": new_axis("density", **axis)}
    return new_figure("Density of all eigenvalues", _caption(entries), data, **axes)


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
        value = low + (high - low) * (n / 5) ** STEEPNESS
        before = low + (high - low) * (abs(n - 1) / 5) ** STEEPNESS
        gap = abs(value - before)
        power = 10.0 ** math.floor(math.log10(gap))
        step = max(factor * power for factor in (1, 2, 5) if factor * power <= gap)
        ticks.add(float(f"{step * round(value / step):.6g}"))
    return sorted(tick for tick in ticks if low <= tick <= high)


def _height(loss: Any, low: float, ceiling: float) -> NDArray[Any]:
    """Return the places of losses on the scale of the colours, from 0 to 1."""
    return np.asarray(((np.asarray(loss) - low) / (ceiling - low)) ** (1 / STEEPNESS))


def _landscapes(entries: Entries, heading: str, kind: str, rest: str, axes: Mapping[str, Any]) -> go.Figure | None:
    """Return a panel per network, with one scale of colours."""
    losses = {
        title: np.array(entry["landscape"]["loss"], dtype=float)
        for title, entry in entries.items()
        if entry.get("landscape")
    }
    if not losses:
        return None
    finite = [z[np.isfinite(z)] for z in losses.values() if np.isfinite(z).any()]
    low, ceiling = shared_range([float(z.min()) for z in finite], [float(z.max()) for z in finite])
    hover = "%{x:.3g}, %{y:.3g}: loss %{customdata:.3g}<extra></extra>"
    data: list[dict[str, Any]] = []
    titles = []
    for number, (title, loss) in enumerate(losses.items(), 1):
        middle = len(loss) // 2
        titles.append(f"<b>{plot_text(title, 22)}</b><br>loss {loss[middle, middle]:.3g}")
        z = np.nan_to_num(np.minimum(loss, ceiling), nan=ceiling).T  # rows of z go along y
        axis = np.array(entries[title]["landscape"]["axis"], float)
        colour = _height(z, low, ceiling)
        trace = {"type": kind, "x": axis, "y": axis, "name": plot_text(title), "coloraxis": "coloraxis"}
        trace |= {"customdata": z, "hovertemplate": hover}
        if kind == "surface":
            data.append({**trace, "z": z, "surfacecolor": colour, "scene": f"scene{number}"})
            continue
        place = {"xaxis": f"x{number}", "yaxis": f"y{number}"}
        levels = {"start": 0, "end": 1, "size": 0.9999 / (LEVELS - 1)}  # below 1: the last colour is used, too
        cross = {"symbol": "cross-thin", "size": 11, "line": {"color": "white", "width": 2}}
        centre = {"type": "scatter", "x": [0], "y": [0], "marker": cross, "showlegend": False, "hoverinfo": "skip"}
        data += [{**trace, "z": colour, "contours": levels, **place}, {**centre, **place}]
    if kind == "surface":
        axes["scene"]["zaxis"]["range"] = [low, ceiling]
    cut = f" (cut off at {ceiling:.3g})" if any(z.max() > ceiling for z in finite) else ""
    ticks = round_ticks(low, ceiling)
    top = {
        "orientation": "h",
        "x": 0,
        "xref": "container",
        "xanchor": "left",
        "y": 1,
        "yref": "container",
        "yanchor": "top",
    }
    bar = {"title": {"text": f"loss{cut}", "side": "top"}, "lenmode": "pixels", "len": 320, "thickness": 11, **top}
    bar |= {"tickvals": _height(ticks, low, ceiling).tolist(), "ticktext": [f"{tick:g}" for tick in ticks]}
    colours = {"cmin": 0, "cmax": 1, "colorscale": "Viridis", "colorbar": bar}
    layout = panel_layout(titles, min(len(titles), PANELS_PER_ROW), 272, **axes)
    caption = _caption({title: entries[title] for title in losses}, f" Along two random directions{rest}")
    return new_figure(heading, caption, data, coloraxis=colours, **layout)


def contour_figure(entries: Entries) -> go.Figure | None:
    """Return contours of the loss around each network, with the same levels."""
    axes = {
        "xaxis": new_axis("direction 1", nticks=5, constrain="domain"),
        "yaxis": new_axis("direction 2", nticks=5, constrain="domain"),
    }
    rest = ", on one scale for all methods."
    return _landscapes(entries, "Loss around each network", "contour", rest, axes)


def surface_figure(entries: Entries) -> go.Figure | None:
    """Return the loss around each of the first 12 networks as a surface, with the same vertical scale."""
    titles = {"x": "direction 1", "y": "direction 2", "z": "loss"}
    axes = {f"{name}axis": {"title": {"text": title}, "nticks": 5} for name, title in titles.items()}
    eye = {"x": 2.1, "y": 2.1, "z": 1.4}  # the default cuts labels
    centre = {"x": 0.09, "y": -0.09, "z": -0.1}
    scene = {"aspectmode": "cube", "camera": {"eye": eye, "center": centre}, **axes}
    rest = ", on one scale for all methods. Drag to turn them all."
    first = dict(list(entries.items())[:MAX_SURFACES])
    return _landscapes(first, "Loss around each network, in 3-D", "surface", rest, {"scene": scene})


def window_of(n: int) -> int:
    """Return the odd number of values that a running mean over ``n`` values averages."""
    return 2 * (n // SMOOTHED // 2) + 1


def smooth(values: Any) -> Any:
    """Return a centred running mean of a pandas object, over fewer values at the ends."""
    return values.rolling(window_of(len(values)), center=True, min_periods=1).mean()


def thinned(n: int) -> NDArray[np.intp]:
    """Return at most :data:`MAX_LINE_POINTS` indices below ``n``, evenly spaced, with the first and the last."""
    return np.unique(np.linspace(0, n - 1, min(n, MAX_LINE_POINTS)).round().astype(int))


@dataclass(frozen=True)
class WideScale:
    """The options of a logarithmic axis. If ``linear`` is not 0, it is linear between ``-linear`` and ``linear``."""

    axis: Mapping[str, Any]
    linear: float = 0.0


def places(values: Any, linear: float) -> NDArray[Any]:
    """Return the places of values on an axis that is linear around 0, which plotly does not have."""
    return np.asarray(np.sign(values) * np.log10(1 + np.abs(values) / linear))


def wide_scale(lines: Sequence[NDArray[Any]]) -> WideScale | None:
    """Return the axis for lines whose median magnitudes differ by more than :data:`WIDE_RANGE`; otherwise None.

    Example:
        >>> wide_scale([np.array([1.0]), np.array([50.0])]) is None
        True
        >>> wide_scale([np.array([1.0]), np.array([500.0])]).axis["type"]
        'log'
        >>> wide_scale([np.array([1.0]), np.array([-500.0])]).axis["ticktext"]
        ['-1000', '-100', '-10', '0', '10', '100', '1000']
    """
    medians = [float(np.median(np.abs(line))) for line in lines if len(line) and np.any(line)]
    medians = [median for median in medians if median > 0]
    if not medians or max(medians) <= WIDE_RANGE * min(medians):
        return None
    values = np.concatenate(list(lines))
    if values.min() > 0:
        return WideScale({"type": "log", "exponentformat": "power", "dtick": 1})
    low = math.floor(math.log10(min(medians)))
    high = math.ceil(math.log10(float(np.abs(values).max())))
    step = math.ceil((high - low) / MAX_TICKS)
    powers = [10.0**power for power in range(high, low, -step)][::-1]
    ticks = [*(-power for power in reversed(powers)), 0.0, *powers]
    linear = 10.0**low
    lowest, highest = places([values.min(), values.max()], linear).tolist()
    margin = 0.05 * (highest - lowest)
    texts = {"tickvals": places(ticks, linear).tolist(), "ticktext": [f"{tick:g}" for tick in ticks]}
    return WideScale({**texts, "range": [lowest - margin, highest + margin]}, linear)


def probe_figure(
    readings: Mapping[str, Mapping[str, Sequence[float]]], methods: Mapping[str, str] | None = None, caption: str = ""
) -> go.Figure | None:
    """Return the running means of sharpness, and of the cosine of g and g_min, over the steps of training.

    If the typical sharpness of one title is more than 100 times that of another, as with a radius that is far too
    large, the axis is logarithmic, and linear around 0 if there are values that are not positive.

    Args:
        readings: the columns of a probe by title, each as ``probe_info`` returns them.
        methods: the method of each title, for the colours; by default the one that the title names.
        caption: a sentence below the figure.
    """
    import pandas as pd

    if not readings:
        return None
    panels = SHARPNESS | {"cosine": "cosine of g and g<sub>min</sub>"}
    styles = named_styles({title: (methods or {}).get(title, "") for title in readings})
    layout = panel_layout(list(panels.values()), 2, 384, 230, xaxis=new_axis("step"), yaxis={})
    data = []
    words = ""
    for number, name in enumerate(panels, 1):
        lines = {}
        for title, columns in readings.items():
            values = pd.Series(columns[name], columns["step"], dtype=float)
            means = smooth(values[np.isfinite(values)])
            lines[title] = means.iloc[thinned(len(means))]
        scale = None if name == "cosine" else wide_scale([line.to_numpy() for line in lines.values()])
        if scale is not None:
            layout[f"yaxis{number}"] |= scale.axis
            words = words or WIDE_WORDS
        for title, line in lines.items():
            mode = "lines" if len(line) > 1 else "markers"
            y = line.to_numpy()
            points = {"x": line.index.to_numpy(), "y": y, "mode": mode, "showlegend": number == 1}
            if scale is not None and scale.linear:
                points |= {"y": places(y, scale.linear), "customdata": y, "hovertemplate": "%{customdata:.3g}"}
            data.append({**styles[title], **points, "xaxis": f"x{number}", "yaxis": f"y{number}"})
    caption = " ".join(filter(None, (caption, words)))
    return new_figure("Sharpness during training", caption, data, hovermode="x unified", **layout)


def flatness_figures(entries: Entries) -> list[go.Figure]:
    """Return all figures of the entries, for each architecture."""
    figures = []
    for group in group_by(entries.items(), lambda pair: pair[1].get("architecture", "")).values():
        part = dict(group)
        readings = {title: entry["probe"] for title, entry in part.items() if "probe" in entry}
        methods = {title: entry.get("run", {}).get("method", "") for title, entry in part.items()}
        figures += [draw(part) for draw in (eigenvalue_figure, density_figure, contour_figure, surface_figure)]
        figures.append(probe_figure(readings, methods))
    return [figure for figure in figures if figure is not None]
