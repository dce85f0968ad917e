"""Parts of the page's figures: traces of plotly.js with the style of their method, panels, rounding.

A figure has panels, each a plot of its own, so that a phone shows them below each other. A trace has the name of its
method and the numbers of its style; the page adds dashes, markers, a legend, and colours that suit its theme.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ...analysis.run_record import Record

MAX_POINTS = 200  # of a curve
DIGITS = 5  # significant digits of what is drawn
Figure: TypeAlias = dict[str, Any]
Draw: TypeAlias = Callable[["Experiment"], Figure | None]


@dataclass(frozen=True)
class Experiment:
    """The runs of an experiment.

    Args:
        title: its title.
        methods: the rows of its table, in order.
        runs: the runs.
        styles: for each method on the page, the index of its colour, and the index of its dashes and marker.
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


def seed_numbers(runs: Sequence[Record]) -> str:
    """Return the seeds of runs in words."""
    seeds = sorted({run.seed for run in runs})
    return f"{'seeds' if len(seeds) > 1 else 'seed'} {', '.join(map(str, seeds))}"


def draw_all(experiment: Experiment, functions: Mapping[str, Draw]) -> tuple[dict[str, Figure], list[str]]:
    """Return the figures that the functions draw, and a sentence about each that fails on damaged numbers."""
    figures, problems = {}, []
    for name, draw in functions.items():
        figure, error = _try_to_draw(draw, experiment)
        if error:
            alone = ((run, _try_to_draw(draw, replace(experiment, runs=(run,)))[1]) for run in experiment.runs)
            damaged = ", ".join(f"{run.name} in {run.folder}" for run, problem in alone if problem) or "its runs"
            problems.append(f"{experiment.title}: the figure {name!r} is left out ({error}): check {damaged}.")
        elif figure is not None:
            figures[name] = figure
    return figures, problems


def _try_to_draw(draw: Draw, experiment: Experiment) -> tuple[Figure | None, str]:
    """Return a figure, and the error if there is one."""
    try:
        return draw(experiment), ""
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        return None, f"{type(error).__name__}: {error}"


def figure_info(title: str, caption: str, panels: Sequence[Mapping[str, Any]], kind: str = "plotly") -> Figure:
    """Return a figure of plots."""
    return {"title": title, "caption": caption, "kind": kind, "panels": list(panels)}


def panel_info(data: Sequence[Mapping[str, Any]], x: str, y: str, title: str = "", **layout: Any) -> dict[str, Any]:
    """Return a plot with labelled axes."""
    axes = {name: {"title": {"text": text}, **layout.pop(name, {})} for name, text in (("xaxis", x), ("yaxis", y))}
    return {"title": title, "data": list(data), "layout": {**axes, **layout}}


def rounded(values: Sequence[float | None] | NDArray[Any]) -> list[float | None]:
    """Return numbers with :data:`DIGITS` significant digits, and None for those that are not finite."""
    return [None if v is None or not math.isfinite(v) else float(f"{v:.{DIGITS}g}") for v in values]


def line_mode(points: Sequence[Any]) -> str:
    """Return the mode of a line: a single point needs a marker."""
    return "lines" if len(points) > 1 else "markers"


def thinned(n: int) -> list[int]:
    """Return at most :data:`MAX_POINTS` indices below ``n``, evenly spaced, with the first and the last."""
    return sorted({round(i) for i in np.linspace(0, n - 1, min(n, MAX_POINTS)).tolist()})
