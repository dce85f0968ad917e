"""The page's figures of flatness: sharpness during training, eigenvalues of the Hessian, the loss around networks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ....flatness.density import smoothed
from ...analysis.run_record import Record
from ...common.grouping import group_by
from ...recipes.columns import measured_on
from ..figures.landscape_figures import LEVELS, STEEPNESS, shared_range
from ..figures.panels import seeds_text
from ..figures.probe_figures import SHARPNESS, smooth
from .plot_parts import (
    MAX_POINTS,
    Draw,
    Experiment,
    Figure,
    figure_info,
    line_mode,
    panel_info,
    rounded,
    seed_numbers,
    thinned,
)

BINS = 25
DECADES = 6  # shown below the peak of a density
MAX_SURFACES = 12  # browsers draw at most 16 at a time


def _probe(experiment: Experiment) -> Figure | None:
    probed = {}
    for method in experiment.methods:
        probed[method] = [run for run in experiment.finished(method) or experiment.of(method) if run.probe]
    panels = []
    for name, label in (SHARPNESS | {"cosine": "cosine of g and g_min"}).items():
        traces = []
        for method, runs in probed.items():
            readings = [row for run in runs for row in run.probe if row.get(name) is not None]
            steps = sorted(group_by(readings, lambda row: row["step"]).items())
            means = smooth([sum(row[name] for row in rows) / len(rows) for _, rows in steps])
            indices = thinned(len(steps))
            points = {"x": [steps[i][0] for i in indices], "y": rounded([means[i] for i in indices])}
            if steps:
                traces.append(experiment.trace(method, type="scatter", mode=line_mode(indices), **points))
        panels.append(panel_info(traces, "step", label, hovermode="x unified"))
    if not any(panel["data"] for panel in panels):
        return None
    counts = [len(runs) for runs in probed.values() if runs]
    caption = f"MaxS, MinS and BilS at each method's radii, and the cosine: running mean, {seeds_text(counts)}."
    return figure_info("Sharpness during training", caption, panels)


def _measured(experiment: Experiment, part: str) -> dict[str, tuple[Record, Mapping[str, Any]]]:
    """Return the first run of each method with this part of a ``flatness.json``, and the part."""
    runs = {
        run.method: (run, run.flatness[part])
        for run in reversed(experiment.runs)
        if run.flatness is not None and run.flatness.get(part)
    }
    return {method: runs[method] for method in experiment.methods if method in runs}


def _eigenvalues(experiment: Experiment) -> Figure | None:
    measured = _measured(experiment, "eigenvalues")
    arrays = {method: np.array(part["values"], dtype=float) for method, (_, part) in measured.items()}
    values = {method: array[np.isfinite(array)] for method, array in arrays.items() if np.isfinite(array).any()}
    if not values:
        return None
    ends = np.concatenate([[0.0], *values.values()])
    bins = np.linspace(ends.min(), ends.max() if ends.max() > ends.min() else ends.min() + 1.0, BINS + 1)
    counts = {method: np.histogram(numbers, bins)[0] for method, numbers in values.items()}
    middles = rounded((bins[1:] + bins[:-1]) / 2)
    tallest = max(int(count.max()) for count in counts.values())
    x = {"range": [float(bins[0]), float(bins[-1])]}
    y = {"range": [0, 1.05 * tallest], "dtick": max(tallest // 4, 1)}
    panels = []
    for method, count in counts.items():
        bars = experiment.trace(method, type="bar", x=middles, y=count.tolist(), width=float(bins[1] - bins[0]))
        extremes = f"max {values[method].max():.3g}, mean {values[method].mean():.3g}"
        title = f"{_panel_title(method, measured)}: {extremes} ({_measured_on([measured[method][0]])})"
        label = f"how many of the top {len(values[method])}"
        panels.append(panel_info([bars], "eigenvalue", label, title, xaxis=x, yaxis=y, bargap=0))
    return figure_info("Largest eigenvalues of the Hessian", _of_seeds(measured), panels, "panels")


def _density(experiment: Experiment) -> Figure | None:
    """Return the densities, smoothed with the largest of their widths, so that their peaks are equally broad."""
    measured = _measured(experiment, "density")
    if not measured:
        return None
    parts = {method: part for method, (_, part) in measured.items()}
    sigma = max(part["sigma"] for part in parts.values())
    low = min(min(part["nodes"]) for part in parts.values()) - 6 * sigma
    high = max(max(part["nodes"]) for part in parts.values()) + 6 * sigma
    grid = np.linspace(low, high, 2 * MAX_POINTS)
    curves = {m: smoothed(grid, np.array(p["nodes"]), np.array(p["weights"]), sigma) for m, p in parts.items()}
    peak = max(float(curve.max()) for curve in curves.values())
    x, traces = rounded(grid), []
    for method, curve in curves.items():
        y = rounded(np.maximum(curve, 1e-3 * 10.0**-DECADES * peak))
        traces.append(experiment.trace(method, type="scatter", mode="lines", x=x, y=y))
    top = math.log10(2 * peak)
    axis = {"type": "log", "range": [top - DECADES, top], "exponentformat": "power"}
    panel = panel_info(traces, "eigenvalue of the Hessian", "density", yaxis=axis)
    return figure_info("Density of all eigenvalues", _of_seeds(measured), [panel])


def _panel_title(method: str, measured: Mapping[str, tuple[Record, Any]]) -> str:
    """Return the title of a method's panel, with the seed if the panels have different ones."""
    seeds = {run.seed for run, _ in measured.values()}
    return f"{method}, seed {measured[method][0].seed}" if len(seeds) > 1 else method


def _of_seeds(measured: Mapping[str, tuple[Record, Any]]) -> str:
    runs = [run for run, _ in measured.values()]
    return f"Networks of {seed_numbers(runs)}; {_measured_on(runs)}, with the labels used in training."


def _measured_on(runs: Iterable[Record]) -> str:
    """Return the loss and the samples that ``bsam flatness``, or else training, measured the networks on."""
    labels = [measured_on(run.settings, None if run.flatness is None else run.flatness["samples"]) for run in runs]
    return " or ".join(dict.fromkeys(labels))


def _landscapes(experiment: Experiment) -> dict[str, tuple[Record, tuple[NDArray[Any], NDArray[Any]]]]:
    """Return the first run of each method with a loss surface, its axis and the losses."""
    surfaces = {}
    for run in reversed(experiment.runs):
        if land := (run.flatness or {}).get("landscape"):
            surfaces[run.method] = run, (np.array(land["axis"], float), np.array(land["loss"], float))
        elif run.surface is not None:
            trained = replace(run, flatness=None)  # measured at the end of training
            surfaces[run.method] = trained, (np.array(run.surface.axis, float), np.array(run.surface.loss, float))
    return {method: surfaces[method] for method in experiment.methods if method in surfaces}


def _landscape(experiment: Experiment, kind: str) -> Figure | None:
    """Return contours or surfaces on one scale, up to at most twice the height of the flattest network.

    Without this limit, a steep network would leave few levels for the others.
    """
    lands = dict(list(_landscapes(experiment).items())[:MAX_SURFACES])
    finite = [loss[np.isfinite(loss)] for _, (_, loss) in lands.values() if np.isfinite(loss).any()]
    if not finite:
        return None
    highest = [float(loss.max()) for loss in finite]
    low, ceiling = shared_range([float(loss.min()) for loss in finite], highest)
    panels = []
    for method, (_, (axis, loss)) in lands.items():
        clipped = np.nan_to_num(np.minimum(loss, ceiling), nan=ceiling).T  # rows of z go along y
        height = ((clipped - low) / (ceiling - low)) ** (1 / STEEPNESS)
        z = [rounded(row) for row in clipped]
        colour = [[round(v, 3) for v in row] for row in height.tolist()]
        trace = {"x": rounded(axis), "y": rounded(axis), "method": method, "style": experiment.styles[method]}
        centre = loss[len(axis) // 2, len(axis) // 2]
        title = f"{_panel_title(method, lands)}: loss {centre:.3g}"
        if kind == "contours":
            panels.append(panel_info([{**trace, "type": "contour", "z": colour, "text": z}], "", "", title))
        else:
            surface = {**trace, "type": "surface", "z": z, "surfacecolor": colour}
            layout = {"scene": {"zaxis": {"range": [low, ceiling]}}}
            panels.append({"title": title, "data": [surface], "layout": layout})
    levels = [low + (ceiling - low) * (i / (LEVELS - 1)) ** STEEPNESS for i in range(LEVELS)]
    title = "Loss around each network" + (", in 3-D" if kind == "surfaces" else "")
    turn = " Drag to turn them all." if kind == "surfaces" else ""
    cut = f" Losses above {ceiling:.3g} are cut off." if max(highest) > ceiling else ""
    caption = f"{_of_seeds(lands)} Along two random directions, on one scale for all methods.{cut}{turn}"
    return figure_info(title, caption, panels, kind) | {"levels": rounded(levels)}


FLATNESS_PLOTS: dict[str, Draw] = {
    "probe": _probe,
    "eigenvalues": _eigenvalues,
    "density": _density,
    "contours": partial(_landscape, kind="contours"),
    "surfaces": partial(_landscape, kind="surfaces"),
}
