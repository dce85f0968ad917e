"""Figures of the spectrum of the Hessian. Models of a group are drawn on the same scale."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ....flatness.density import smoothed
from ...inference.flatness_numbers import DensityInfo, SpectrumInfo
from .panels import COLOURS, grouped, line_style, new_figure, panel_title, panels, save, tidy, typeset

BINS = 25
POINTS = 2000  # along a density
DECADES = 6  # shown below the peak of a density
CHOSEN = {"largest": "the top {}", "magnitude": "the {} of largest magnitude", "both ends": "the {} at both ends"}
TITLE_PAD = 20  # points between axes and title, with a line of small print between them


def plot_spectrum(infos: Sequence[SpectrumInfo], path: Path) -> None:
    """Draw a histogram of the top eigenvalues of each model, with their statistics; a group shares its scale."""
    figure, groups = panels(infos, 3.6, 3.2)
    for group in groups:
        low = min(0.0, *(min(info.values) for info, _ in group))
        high = max(0.0, *(info.maximum for info, _ in group))
        bins = np.linspace(low, high if high > low else low + 1.0, BINS + 1)
        tallest = max(int(np.histogram(info.values, bins)[0].max()) for info, _ in group)
        for info, ax in group:
            ax.hist(info.values, bins=list(bins), color=COLOURS[infos.index(info) % len(COLOURS)])
            ax.yaxis.get_major_locator().set_params(integer=True)
            ax.set_ylim(0, 1.05 * tallest)
            ax.set_xlabel(_axis_label([info]))
            ax.locator_params(axis="x", nbins=5)
            title = info.title + ("" if info.converged else " (not converged)")
            ax.set_title(typeset(panel_title(title)), pad=TITLE_PAD, fontsize=10)
            numbers = f"max {info.maximum:.3g}, mean {info.mean:.3g}, variance {info.variance:.3g}"
            ax.text(0.5, 1.02, numbers, transform=ax.transAxes, ha="center", va="bottom", fontsize="small")
            tidy(ax)
        first, ax = group[0]
        count = f"how many of {CHOSEN[first.which].format(len(first.values))}"
        ax.set_ylabel(f"{first.group}\n" * (len(groups) > 1) + count)
    save(figure, path)


def plot_density(infos: Sequence[DensityInfo], path: Path) -> None:
    """Draw the density of the eigenvalues, a panel per group. The density axis is logarithmic: most are near 0.

    Models of a group are smoothed with the largest of their widths, so that their peaks are equally broad.
    """
    groups = grouped(infos)
    figure = new_figure(6.4, 3.8 * len(groups))
    for group, ax in zip(groups, figure.subplots(len(groups), 1, squeeze=False)[:, 0], strict=True):
        sigma = max(info.sigma for info in group)
        ends = [np.array([min(info.nodes) - 6 * sigma, max(info.nodes) + 6 * sigma]) for info in group]
        grid = np.linspace(np.min(ends), np.max(ends), POINTS)
        curves = [smoothed(grid, np.array(info.nodes), np.array(info.weights), sigma) for info in group]
        peak = np.max(curves)
        for info, curve in zip(group, curves, strict=True):
            shown = np.maximum(curve, 1e-300)  # otherwise the line has gaps on the logarithmic axis
            ax.plot(grid, shown, label=typeset(info.title), **line_style(infos.index(info)))
        ax.set_yscale("log")
        ax.set_ylim(10.0**-DECADES * peak, 2 * peak)
        ax.set_xlabel(_axis_label(group))
        ax.set_ylabel(f"{group[0].group}\n" * (len(groups) > 1) + "density")
        ax.legend(frameon=False)
        tidy(ax)
    save(figure, path)


def _axis_label(infos: Sequence[SpectrumInfo | DensityInfo]) -> str:
    measured = " or ".join(dict.fromkeys(info.measured_on for info in infos if info.measured_on))
    return "eigenvalue of the Hessian" + (f"\n({measured})" if measured else "")
