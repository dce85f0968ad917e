"""The page's figures of scores and losses: over the epochs, and after the last one."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from functools import partial
from typing import Any

from ...analysis.paper_numbers import all_arguments
from ...analysis.run_record import Record
from ...common.grouping import group_by
from ...recipes.columns import SeedStatistics, seed_statistics
from ...tasks import TASKS
from ...training.config import BASE
from ..figures.panels import seeds_text
from .plot_parts import Draw, Experiment, Figure, figure_info, line_mode, panel_info, rounded, thinned

FEW = 10  # an axis of at most this many epochs has a tick at each of them
SKIPPED = 0.2  # share of the epochs, from the first on, that may be outside the initial vertical range


def _score_curves(experiment: Experiment) -> Figure | None:
    settings = experiment.runs[0].settings
    task = TASKS.get(settings.get("task", "classification"))
    if task is None:
        return None
    metric = task.measure.metric(settings.get("eval_split", "test"))
    return _curves(experiment, "Score during training", experiment.unit, metric, task.measure.factor)


def _curves(experiment: Experiment, title: str, label: str, metric: str, factor: float = 1.0) -> Figure | None:
    """Return mean and band over the finished seeds, and a dotted line for each unfinished one.

    Methods without a finished run also show the runs that diverged.
    """
    traces: list[dict[str, Any]] = []
    counts: list[int] = []
    ends: list[SeedStatistics] = []
    shown: set[int] = set()
    for method in experiment.methods:
        finished = experiment.finished(method)
        others = [run for run in experiment.of(method) if run.state == "unfinished" or not finished]
        for runs, state in [(finished, None), *(([run], run.state) for run in others)]:
            curves = [curve for run in runs if (curve := _curve(run, metric, factor))]
            if not curves:
                continue
            common = set.intersection(*map(set, curves))
            epochs = sorted(common if common else max(curves, key=len))
            points = [seed_statistics([curve[epoch] for curve in curves if epoch in curve]) for epoch in epochs]
            shown |= set(epochs)
            ends += points[int(SKIPPED * len(points)) :]
            indices = thinned(len(epochs))
            lines = _band(experiment, method, [epochs[i] for i in indices], [points[i] for i in indices])
            if state is None:
                counts.append(len(curves))
            else:
                lines = [{**line, "method": f"{method}, {state}", "dotted": True} for line in lines]
            traces += lines
    if not traces:
        return None
    low, high = (f([p.mean + sign * (p.std or 0) for p in ends]) for f, sign in ((min, -1), (max, 1)))
    margin = 0.06 * (high - low) or 0.5
    axes: dict[str, Any] = {"yaxis": {"range": [low - margin, high + margin]}}
    if len(shown) <= FEW:
        axes["xaxis"] = {"tickvals": sorted(shown)}
    shape = "bands" if any("band" in trace for trace in traces) else "bars"
    spread = f", {shape} of one standard deviation" if max(counts, default=1) > 1 else ""
    caption = f"{seeds_text(counts).capitalize()}{spread}. " if counts else ""
    if any("dotted" in trace for trace in traces):
        caption += "Each run that has not finished is a dotted line. "
    caption += "Double-click to see the whole range."
    return figure_info(title, caption, [panel_info(traces, "epoch", label, hovermode="x unified", **axes)])


def _curve(run: Record, metric: str, factor: float) -> dict[int, float]:
    """Return the finite values by epoch; none if only the last of several epochs was kept."""
    if run.state == "finished" and len(run.epochs) == 1 and run.settings.get("epochs", 1) > 1:
        return {}
    known = ((epoch["epoch"], factor * epoch[metric]) for epoch in run.epochs if epoch.get(metric) is not None)
    return {epoch: value for epoch, value in known if math.isfinite(value)}


def _band(
    experiment: Experiment, method: str, x: Sequence[float], points: Sequence[SeedStatistics]
) -> list[dict[str, Any]]:
    """Return the line of the mean, after a band of one standard deviation if there are several seeds."""
    if len(points) == 1:
        return [experiment.trace(method, mode=line_mode(points), x=list(x), **_markers(points))]
    line = experiment.trace(method, type="scatter", mode="lines", x=list(x), y=rounded([p.mean for p in points]))
    if all(point.std is None for point in points):
        return [line]
    edge = [p.mean + (p.std or 0) for p in points] + [p.mean - (p.std or 0) for p in reversed(points)]
    band = {"x": [*x, *reversed(x)], "y": rounded(edge), "fill": "toself", "band": True, "hoverinfo": "skip"}
    return [experiment.trace(method, type="scatter", mode="lines", **band), line]


def _score_points(experiment: Experiment) -> dict[str, SeedStatistics]:
    runs = {method: experiment.finished(method) for method in experiment.methods}
    scores = {method: [run.score for run in group if run.score is not None] for method, group in runs.items()}
    return {method: seed_statistics(values) for method, values in scores.items() if values}


def _markers(points: Sequence[SeedStatistics]) -> dict[str, Any]:
    spread = {"error_y": {"type": "data", "array": rounded([p.std or 0.0 for p in points])}}
    return {"type": "scatter", "y": rounded([p.mean for p in points]), **(spread if any(p.std for p in points) else {})}


def _cost(experiment: Experiment) -> Figure | None:
    passes = {run.method: run.passes for run in experiment.runs if run.passes is not None}
    points = {method: point for method, point in _score_points(experiment).items() if method in passes}
    if len({passes[method] for method in points}) < 2:
        return None
    traces = []
    for method, point in points.items():
        same = [other for other in points if passes[other] == passes[method]]
        shift = 0.07 * (same.index(method) - (len(same) - 1) / 2)  # separates the whiskers
        x = {"x": [passes[method] + shift], "customdata": [passes[method]]}
        hover = "%{customdata} passes, %{y:.2f}"
        traces.append(experiment.trace(method, mode="markers", hovertemplate=hover, **x, **_markers([point])))
    caption = f"After the last epoch, {seeds_text(p.n for p in points.values())}. Points of equal cost are shifted."
    ticks = {"tickvals": sorted({passes[method] for method in points})}
    panel = panel_info(traces, "gradient passes per step", experiment.unit, xaxis=ticks)
    return figure_info("Score against cost", caption, [panel])


def without_radii(row: str) -> str:
    """Return the title of a row without its radii.

    Example:
        >>> without_radii("BSAM (2 passes), rho_max 0.1, rho_min 0.1, every 5")
        'BSAM (2 passes), every 5'
    """
    return re.sub(r", rho\w* [^,]*", "", row)


def _line_key(run: Record) -> str:
    """Return a text that is equal for runs that differ only in their radii; SAM with a floor is another method."""
    if "method" not in run.settings:  # a row of a CSV file
        return without_radii(run.method)
    values = all_arguments(run.settings["method"], run.settings["arguments"])
    others = {name: value for name, value in values.items() if not name.startswith("rho")}
    return json.dumps([run.settings["method"], others, values.get("rho_floor") is not None], sort_keys=True)


def _radius(experiment: Experiment) -> Figure | None:
    """Return a line through the rows that differ only in their radii; base optimizers are horizontal lines."""
    radii = {run.method: run.radius for run in experiment.runs if run.radius}
    keys = {run.method: _line_key(run) for run in experiment.runs if run.radius}
    points = _score_points(experiment)
    lines = group_by((method for method in points if method in radii), keys.__getitem__).values()
    if all(len(line) == 1 for line in lines):
        return None
    x = sorted({radii[method] for line in lines for method in line})
    traces = []
    for methods in lines:
        line = sorted(methods, key=lambda method: (radii[method], method))
        row = min(line, key=lambda method: (len(without_radii(method)), len(method)))
        style = {"method": row if len(line) == 1 else without_radii(row), "style": experiment.styles[row]}
        marks = {"mode": "lines+markers", "hovertemplate": "total radius %{x}, %{y:.2f}"}
        numbers = {"x": [radii[method] for method in line], **_markers([points[method] for method in line])}
        traces.append({**style, **marks, **numbers})
    bases = {run.method for run in experiment.runs if run.settings.get("method") == BASE} & points.keys()
    for base in sorted(bases):
        flat = {"x": [x[0], x[-1]], "y": rounded([points[base].mean] * 2)}
        traces.append(experiment.trace(base, type="scatter", mode="lines", **flat))
    axis = {"type": "log", "tickvals": x, "ticktext": [f"{radius:g}" for radius in x]}
    label = "total radius: rho, or rho_max + rho_min"
    caption = f"After the last epoch, {seeds_text(p.n for p in points.values())}."
    return figure_info("Score against total radius", caption, [panel_info(traces, label, experiment.unit, xaxis=axis)])


SCORE_PLOTS: dict[str, Draw] = {
    "score": _score_curves,
    "loss": partial(_curves, title="Training loss", label="training loss", metric="train_loss"),
    "memorised": partial(
        _curves, title="Memorised labels", label="wrong labels memorised in %", metric="memorised", factor=100.0
    ),
    "cost": _cost,
    "radius": _radius,
}
