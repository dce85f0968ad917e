"""The interactive figures of the page, as traces of plotly.js.

A figure has panels, each a plot of its own, so that a phone shows them below each other. A trace has the name of its
method and the numbers of its style; the page adds colours, which depend on its theme, dashes, markers and a legend.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..flatness.density import smoothed
from ..recipes.columns import SeedStatistics, seed_statistics
from ..tasks import TASKS
from ..training.config import BASE
from .panels import seeds_text
from .probes import SHARPNESS, smooth
from .records import Record

MAX_POINTS = 200  # of a curve
DIGITS = 5  # significant digits of what is drawn
SKIPPED = 0.2  # part of the epochs that the first view of a curve may cut off
BINS = 25
DECADES = 6  # shown below the peak of a density
LEVELS = 12
STEEPNESS = 2.0  # heights are coloured by this root, to resolve the bottom
MAX_SURFACES = 12  # browsers draw at most 16 at a time
Figure: TypeAlias = dict[str, Any]
Value: TypeAlias = Callable[[Mapping[str, Any]], float | None]


@dataclass(frozen=True)
class Experiment:
    """The runs of an experiment.

    Args:
        title: its title.
        methods: the rows of its table, in order.
        runs: the runs.
        styles: the numbers of colour and dashes of each method of the page.
    """

    title: str
    methods: tuple[str, ...]
    runs: tuple[Record, ...]
    styles: Mapping[str, tuple[int, int]]

    def of(self, method: str) -> list[Record]:
        """Return the runs of a method."""
        return [run for run in self.runs if run.method == method]

    def finished(self, method: str) -> list[Record]:
        """Return the finished runs of a method."""
        return [run for run in self.of(method) if run.state == "finished"]

    def trace(self, method: str, **trace: Any) -> dict[str, Any]:
        """Return a trace in the style of a method."""
        return {"method": method, "style": self.styles[method], **trace}

    @property
    def unit(self) -> str:
        """The unit of the scores."""
        return self.runs[0].unit


def without_settings(method: str) -> str:
    """Return the title of a row without settings: ``"SAM"`` for ``"SAM, rho 0.1"``."""
    return method.partition(", ")[0]


def figures_info(experiment: Experiment) -> dict[str, Figure]:
    """Return the figures that the runs have numbers for, by name."""
    figures = {
        "score": _score_curves(experiment),
        "loss": _curves(experiment, "Training loss", "training loss", _metric("train_loss")),
        "memorised": _memorised_curves(experiment),
        "cost": _cost(experiment),
        "radius": _radius(experiment),
        "probe": _probe(experiment),
        "eigenvalues": _eigenvalues(experiment),
        "density": _density(experiment),
        "contours": _landscape(experiment, "contours"),
        "surfaces": _landscape(experiment, "surfaces"),
    }
    return {name: figure for name, figure in figures.items() if figure is not None}


def _figure(title: str, caption: str, panels: Sequence[Mapping[str, Any]], kind: str = "plotly") -> Figure:
    return {"title": title, "caption": caption, "kind": kind, "panels": list(panels)}


def _panel(data: Sequence[Mapping[str, Any]], x: str, y: str, title: str = "", **layout: Any) -> dict[str, Any]:
    axes = {name: {"title": {"text": text}, **layout.pop(name, {})} for name, text in (("xaxis", x), ("yaxis", y))}
    return {"title": title, "data": list(data), "layout": {**axes, **layout}}


def rounded(values: Sequence[float | None] | NDArray[Any]) -> list[float | None]:
    """Return numbers with :data:`DIGITS` significant digits, and None for those that are not finite."""
    return [None if v is None or not math.isfinite(v) else float(f"{v:.{DIGITS}g}") for v in values]


def thinned(n: int) -> list[int]:
    """Return at most :data:`MAX_POINTS` indices below ``n``, evenly spaced, with the first and the last."""
    return sorted({round(i) for i in np.linspace(0, n - 1, min(n, MAX_POINTS)).tolist()})


# ---- over the epochs


def _metric(name: str, factor: float = 1.0) -> Value:
    def value(metrics: Mapping[str, Any]) -> float | None:
        number = metrics.get(name)
        return None if number is None else factor * number

    return value


def _score_curves(experiment: Experiment) -> Figure | None:
    settings = experiment.runs[0].settings
    task = TASKS.get(settings.get("task", "classification"))
    if task is None:
        return None
    metric = _metric(task.measure.metric(settings.get("eval_split", "test")), task.measure.factor)
    return _curves(experiment, "Score during training", experiment.unit, metric)


def _memorised_curves(experiment: Experiment) -> Figure | None:
    label = "flipped labels memorised in %"
    return _curves(experiment, "Memorised labels", label, _metric("memorised", 100.0))


def _curves(experiment: Experiment, title: str, label: str, value: Value) -> Figure | None:
    """Return mean and band over the seeds. Methods without a finished run show what their runs have reached."""
    traces, counts, ends = [], [], []
    for method in experiment.methods:
        runs = experiment.finished(method) or experiment.of(method)
        rows = [
            [(m["epoch"], v) for m in run.epochs if (v := value(m)) is not None and math.isfinite(v)] for run in runs
        ]
        curves = [dict(row) for row in rows if row]
        if not curves:
            continue
        epochs = sorted(set.intersection(*map(set, curves)) or max(curves, key=len))
        points = [seed_statistics([curve[epoch] for curve in curves if epoch in curve]) for epoch in epochs]
        counts.append(len(curves))
        ends += points[int(SKIPPED * len(points)) :]
        kept = thinned(len(epochs))
        traces += _band(experiment, method, [epochs[i] for i in kept], [points[i] for i in kept])
    if not traces:
        return None
    spread = ", bands of one standard deviation" if max(counts) > 1 else ""
    low, high = (f([p.mean + sign * (p.std or 0) for p in ends]) for f, sign in ((min, -1), (max, 1)))
    margin = 0.06 * (high - low) or 0.5
    axis = {"range": [low - margin, high + margin]}
    caption = f"{seeds_text(counts).capitalize()}{spread}. Double-click to see the whole range."
    return _figure(title, caption, [_panel(traces, "epoch", label, yaxis=axis, hovermode="x unified")])


def _band(
    experiment: Experiment, method: str, x: Sequence[float], points: Sequence[SeedStatistics]
) -> list[dict[str, Any]]:
    """Return the line of the mean, after a band of one standard deviation if there are several seeds."""
    line = experiment.trace(method, type="scatter", mode="lines", x=list(x), y=rounded([p.mean for p in points]))
    if all(point.std is None for point in points):
        return [line]
    edge = [p.mean + (p.std or 0) for p in points] + [p.mean - (p.std or 0) for p in reversed(points)]
    band = {"x": [*x, *reversed(x)], "y": rounded(edge), "fill": "toself", "band": True, "hoverinfo": "skip"}
    return [experiment.trace(method, type="scatter", mode="lines", **band), line]


# ---- last epoch


def _score_points(experiment: Experiment) -> dict[str, SeedStatistics]:
    points = {}
    for method in experiment.methods:
        if scores := [run.score for run in experiment.finished(method) if run.score is not None]:
            points[method] = seed_statistics(scores)
    return points


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
    panel = _panel(traces, "gradient passes per step", experiment.unit, xaxis=ticks)
    return _figure("Score against cost", caption, [panel])


def _radius(experiment: Experiment) -> Figure | None:
    """Return a line per method, through its rows of different radii; base optimizers are horizontal lines."""
    radii = {run.method: run.radius for run in experiment.runs if run.radius}
    points = _score_points(experiment)
    lines: dict[str, list[tuple[float, str]]] = {}
    for method in points:
        if method in radii:
            lines.setdefault(without_settings(method), []).append((radii[method], method))
    x = sorted({radius for line in lines.values() for radius, _ in line})
    if all(len(line) == 1 for line in lines.values()):
        return None
    traces = []
    for line in map(sorted, lines.values()):
        first = line[0][1]
        style = {"method": first if len(line) == 1 else without_settings(first), "style": experiment.styles[first]}
        marks = {"mode": "lines+markers", "hovertemplate": "total radius %{x}, %{y:.2f}"}
        traces.append({**style, **marks, "x": [r for r, _ in line], **_markers([points[m] for _, m in line])})
    bases = {run.method for run in experiment.runs if run.settings.get("method") == BASE} & points.keys()
    for base in sorted(bases):
        flat = {"x": [x[0], x[-1]], "y": rounded([points[base].mean] * 2)}
        traces.append(experiment.trace(base, type="scatter", mode="lines", **flat))
    axis = {"type": "log", "tickvals": x, "ticktext": [f"{radius:g}" for radius in x]}
    label = "total radius: ρ, or ρ_max + ρ_min"
    caption = f"After the last epoch, {seeds_text(p.n for p in points.values())}."
    return _figure("Score against total radius", caption, [_panel(traces, label, experiment.unit, xaxis=axis)])


# ---- flatness


def _probe(experiment: Experiment) -> Figure | None:
    columns: dict[str, dict[str, dict[int, float]]] = {}
    counts = []
    for method in experiment.methods:
        runs = [run for run in experiment.finished(method) or experiment.of(method) if run.probe]
        for name in (*SHARPNESS, "cosine"):
            values: dict[int, list[float]] = {}
            for row in (row for run in runs for row in run.probe):
                if row.get(name) is not None:
                    values.setdefault(row["step"], []).append(row[name])
            if values:
                means = {step: sum(numbers) / len(numbers) for step, numbers in sorted(values.items())}
                columns.setdefault(name, {})[method] = means
        if runs:
            counts.append(len(runs))
    if not columns:
        return None
    panels = []
    for name, label in (SHARPNESS | {"cosine": "cosine of g and g_min"}).items():
        traces = []
        for method, means in columns.get(name, {}).items():
            steps, values_ = list(means), smooth(list(means.values()))
            kept = thinned(len(steps))
            points = {"x": [steps[i] for i in kept], "y": rounded([values_[i] for i in kept])}
            traces.append(experiment.trace(method, type="scatter", mode="lines", **points))
        panels.append(_panel(traces, "step", label, hovermode="x unified"))
    caption = f"MaxS, MinS and BilS at each method's radii, and the cosine: running mean, {seeds_text(counts)}."
    return _figure("Sharpness during training", caption, panels)


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
    if not measured:
        return None
    values = {method: np.array(part["values"], dtype=float) for method, (_, part) in measured.items()}
    ends = np.concatenate([[0.0], *values.values()])
    bins = np.linspace(ends.min(), ends.max() if ends.max() > ends.min() else ends.min() + 1.0, BINS + 1)
    counts = {method: np.histogram(numbers, bins)[0] for method, numbers in values.items()}
    middles, tallest = rounded((bins[1:] + bins[:-1]) / 2), max(int(count.max()) for count in counts.values())
    panels = []
    for method, count in counts.items():
        bars = experiment.trace(method, type="bar", x=middles, y=count.tolist(), width=float(bins[1] - bins[0]))
        n, largest, mean = len(values[method]), values[method].max(), values[method].mean()
        title = f"{method}: max {largest:.3g}, mean {mean:.3g}"
        x, y = (
            {"range": [float(bins[0]), float(bins[-1])]},
            {"range": [0, 1.05 * tallest], "dtick": max(tallest // 4, 1)},
        )
        panels.append(_panel([bars], "eigenvalue", f"of the top {n}", title, xaxis=x, yaxis=y, bargap=0))
    return _figure("Largest eigenvalues of the Hessian", _of_seeds(measured), panels, "panels")


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
    panel = _panel(traces, "eigenvalue of the Hessian", "density", yaxis=axis)
    return _figure("Density of all eigenvalues", _of_seeds(measured), [panel])


def _of_seeds(measured: Mapping[str, tuple[Record, Any]]) -> str:
    runs = [run for run, _ in measured.values()]
    samples = sorted({run.flatness["samples"] for run in runs if run.flatness is not None and "samples" in run.flatness})
    on = f", measured on {' or '.join(f'{n:,}' for n in samples)} samples" if samples else ""
    return f"Networks of {seed_numbers(runs)}{on}."


def seed_numbers(runs: Sequence[Record]) -> str:
    """Return the seeds of runs in words."""
    seeds = sorted({run.seed for run in runs})
    return f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"


def _landscapes(experiment: Experiment) -> dict[str, tuple[Record, tuple[NDArray[Any], NDArray[Any]]]]:
    """Return the first run of each method with a loss surface, its axis and the losses."""
    found = {}
    for run in reversed(experiment.runs):
        land = (run.flatness or {}).get("landscape")
        if land:
            found[run.method] = run, (land["axis"], land["loss"])
        elif run.surface is not None:
            found[run.method] = run, (run.surface.axis, run.surface.loss)
    return {
        method: (found[method][0], tuple(np.array(part, dtype=float) for part in found[method][1]))  # type: ignore[misc]
        for method in experiment.methods
        if method in found
    }


def _landscape(experiment: Experiment, kind: str) -> Figure | None:
    """Return contours or surfaces on one scale, from the lowest loss to twice the height of the flattest network.

    A steep network would leave few levels for the others without this end.
    """
    lands = dict(list(_landscapes(experiment).items())[:MAX_SURFACES])
    finite = [loss[np.isfinite(loss)] for _, (_, loss) in lands.values()]
    finite = [loss for loss in finite if loss.size]
    if not finite:
        return None
    low, highest = min(float(loss.min()) for loss in finite), [float(loss.max()) for loss in finite]
    ceiling = min(max(highest), low + 2 * (min(highest) - low))
    ceiling = ceiling if ceiling > low else low + 1.0
    panels = []
    for method, (_, (axis, loss)) in lands.items():
        clipped = np.nan_to_num(np.minimum(loss, ceiling), nan=ceiling).T  # rows of z go along y
        height = ((clipped - low) / (ceiling - low)) ** (1 / STEEPNESS)
        z, colour = [rounded(row) for row in clipped], [[round(v, 3) for v in row] for row in height.tolist()]
        x = {"x": rounded(axis), "y": rounded(axis), "method": method, "style": experiment.styles[method]}
        centre = loss[len(axis) // 2, len(axis) // 2]
        title = f"{method}: loss {centre:.3g}"
        if kind == "contours":
            panels.append(_panel([{**x, "type": "contour", "z": colour, "text": z}], "", "", title))
        else:
            scene = {"zaxis": {"range": [low, ceiling]}}
            panels.append(
                {
                    "title": title,
                    "data": [{**x, "type": "surface", "z": z, "surfacecolor": colour}],
                    "layout": {"scene": scene},
                }
            )
    levels = [low + (ceiling - low) * (i / (LEVELS - 1)) ** STEEPNESS for i in range(LEVELS)]
    runs = {method: (run, None) for method, (run, _) in lands.items()}
    title = "Loss around each network" + (", in 3-D" if kind == "surfaces" else "")
    turn = " Drag to turn them all." if kind == "surfaces" else ""
    cut = f" Losses above {ceiling:.3g} are cut off." if max(highest) > ceiling else ""
    figure = _figure(
        title, f"{_of_seeds(runs)} Along two random directions, on one scale for all methods.{cut}{turn}", panels, kind
    )
    return figure | {"levels": rounded(levels)}
