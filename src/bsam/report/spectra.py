"""Figures of the spectrum and of a probe: first the numbers (``*_info``), then the drawing (``plot_*``). Models that
are compared share their scales.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..flatness.density import Density, smoothed
from ..flatness.probe import Reading
from ..flatness.spectrum import Eigenvalues
from .figures import COLOURS, DASHES
from .panels import figure, grouped, panels, save, tidy

BINS = 25
POINTS = 2000  # along a density
DECADES = 6  # below the peak of a density that are shown
CHOSEN = {"largest": "the top {}", "magnitude": "the {} of largest magnitude", "both ends": "the {} at both ends"}
ABOVE = 20  # points between the axes and a title, with a line of small print between them


@dataclass(frozen=True)
class SpectrumInfo:
    """The top eigenvalues of a model, and what the paper prints beside their histogram."""

    title: str
    group: str
    values: list[float]
    residuals: list[float]
    maximum: float
    mean: float
    variance: float
    converged: bool
    products: int
    which: str = "largest"
    note: str = ""  # of the computation, as in Eigenvalues


@dataclass(frozen=True)
class DensityInfo:
    """The density of all eigenvalues of a model, and the first two moments of it."""

    title: str
    group: str
    grid: list[float]
    density: list[float]
    nodes: list[float]
    weights: list[float]
    mean: float
    second_moment: float
    sigma: float
    products: int
    note: str = ""  # of the computation, as in Density


def spectrum_info(found: Mapping[str, Eigenvalues], group: str = "", which: str = "largest") -> list[SpectrumInfo]:
    """Maximum, mean and variance of each model's top eigenvalues.

    Args:
        found: by title.
        group: models of one group are drawn on one scale.
        which: of the eigenvalues these are, as :func:`bsam.flatness.top_eigenvalues` was asked.

    Example:
        >>> found = Eigenvalues(np.array([3.0, 1.0]), np.array([0.0, 0.1]), np.bool_(True), products=9)
        >>> info = spectrum_info({"SGD": found})[0]
        >>> info.maximum, info.mean, info.variance
        (3.0, 2.0, 1.0)
    """
    return [
        SpectrumInfo(
            title=title,
            group=group,
            values=e.values.tolist(),
            residuals=e.residuals.tolist(),
            maximum=float(e.values.max()),
            mean=float(e.values.mean()),
            variance=float(e.values.var()),
            converged=bool(e.converged),
            products=e.products,
            which=which,
            note=e.note,
        )
        for title, e in found.items()
    ]


def density_info(found: Mapping[str, Density], group: str = "") -> list[DensityInfo]:
    """Grid and density of each model, with the first two moments of the eigenvalues: the trace and that of the square,
    over the number of parameters.

    Args:
        found: by title.
        group: models of one group are drawn on one scale.

    Example:
        >>> nodes, weights = np.array([0.0, 4.0]), np.array([0.75, 0.25])
        >>> info = density_info({"SGD": Density(np.array([0.0, 4.0]), np.array([0.2, 0.1]), nodes, weights, sigma=0.1, products=2)})[0]
        >>> info.mean, info.second_moment
        (1.0, 4.0)
    """
    return [
        DensityInfo(
            title=title,
            group=group,
            grid=d.grid.tolist(),
            density=d.density.tolist(),
            nodes=d.nodes.tolist(),
            weights=d.weights.tolist(),
            mean=float(d.weights @ d.nodes),
            second_moment=float(d.weights @ d.nodes**2),
            sigma=d.sigma,
            products=d.products,
            note=d.note,
        )
        for title, d in found.items()
    ]


def probe_info(readings: Sequence[Reading]) -> dict[str, list[float]]:
    """Readings as columns, step by step.

    Example:
        >>> probe_info([Reading(0, 2.0, 0.3, 0.1, 0.4, *[1.0] * 6, 0), Reading(10, 1.0, 0.2, 0.1, 0.3, *[1.0] * 6, 0)])["bilateral"]
        [0.4, 0.3]
    """
    rows = [asdict(reading) for reading in readings]
    return {name: [row[name] for row in rows] for name in Reading.__dataclass_fields__}


def plot_spectrum(infos: Sequence[SpectrumInfo], path: Path) -> None:
    """A histogram of the top eigenvalues for each model, those of a group on one scale, with maximum, mean and
    variance.
    """
    drawn, groups = panels(infos, 3.6, 3.2)
    for group in groups:
        low = min(0.0, *(min(info.values) for info, _ in group))
        high = max(0.0, *(info.maximum for info, _ in group))
        bins = np.linspace(low, high if high > low else low + 1.0, BINS + 1)
        tallest = max(int(np.histogram(info.values, bins)[0].max()) for info, _ in group)
        for info, ax in group:
            ax.hist(info.values, bins=list(bins), color=COLOURS[infos.index(info) % len(COLOURS)])
            ax.yaxis.get_major_locator().set_params(integer=True)
            ax.set_ylim(0, 1.05 * tallest)
            ax.set_xlabel("eigenvalue of the Hessian")
            ax.locator_params(axis="x", nbins=5)
            ax.set_title(info.title + ("" if info.converged else " (not converged)"), pad=ABOVE)
            numbers = f"max {info.maximum:.3g}, mean {info.mean:.3g}, variance {info.variance:.3g}"
            ax.text(
                0.5, 1.02, numbers, transform=ax.transAxes, ha="center", va="bottom", fontsize="small"
            )  # above the bars, never on them
            tidy(ax)
        first, ax = group[0]
        ax.set_ylabel(
            f"{first.group}\n" * (len(groups) > 1) + "how many of " + CHOSEN[first.which].format(len(first.values))
        )
    save(drawn, path)


def plot_density(infos: Sequence[DensityInfo], path: Path) -> None:
    """The density of the eigenvalues, a panel per group, with a logarithmic axis: most of them are near 0, and the
    others are what matters.

    Models of a group are smoothed by one width, the widest of theirs, so that a peak is as broad in one as in the
    other.
    """
    groups = grouped(infos)
    drawn = figure(6.4, 3.8 * len(groups))
    for group, ax in zip(groups, drawn.subplots(len(groups), 1, squeeze=False)[:, 0], strict=True):
        sigma = max(info.sigma for info in group)
        ends = [np.array([min(info.nodes) - 6 * sigma, max(info.nodes) + 6 * sigma]) for info in group]
        grid = np.linspace(np.min(ends), np.max(ends), POINTS)
        curves = [smoothed(grid, np.array(info.nodes), np.array(info.weights), sigma) for info in group]
        peak = np.max(curves)
        for info, curve in zip(group, curves, strict=True):
            n = infos.index(info)
            shown = np.maximum(curve, 1e-300)  # a line that falls off the axis, with no gap in it
            ax.plot(grid, shown, color=COLOURS[n % len(COLOURS)], linestyle=DASHES[n % len(DASHES)], label=info.title)
        ax.set_yscale("log")
        ax.set_ylim(10.0**-DECADES * peak, 2 * peak)
        ax.set_xlabel("eigenvalue of the Hessian")
        ax.set_ylabel(f"{group[0].group}\n" * (len(groups) > 1) + "density")
        ax.legend(frameon=False)
        tidy(ax)
    save(drawn, path)


def plot_probe(columns: Mapping[str, Sequence[Any]], path: Path) -> None:
    """Sharpness above the cosine of g and g_min, over the steps of a training."""
    drawn = figure(6.4, 6.0)
    upper, lower = drawn.subplots(2, 1, sharex=True)
    for (name, label), colour in zip(
        (("max_sharpness", "MaxS"), ("min_sharpness", "MinS"), ("bilateral", "BilS")), COLOURS[1:], strict=False
    ):
        upper.plot(columns["step"], columns[name], color=colour, label=label)
    largest = max((abs(value) for value in columns["bilateral"] if math.isfinite(value)), default=0.0)
    if largest > 0:
        upper.set_yscale(
            "symlog", linthresh=largest / 100, linscale=0.5
        )  # the first steps tower above the others, and MinS may fall below 0
        upper.yaxis.set_major_formatter("{x:g}")
    upper.set_ylabel("sharpness of the batch")
    upper.legend(frameon=False)
    lower.plot(columns["step"], columns["cosine"], color=COLOURS[0])
    lowest = min((value for value in columns["cosine"] if math.isfinite(value)), default=0.0)
    lower.set_ylim(lowest - 0.1 * (1.1 - lowest), 1 + 0.1 * (1.1 - lowest))
    lower.set_ylabel("cosine of g and g_min")
    lower.set_xlabel("step")
    for ax in (upper, lower):
        tidy(ax)
    save(drawn, path)
