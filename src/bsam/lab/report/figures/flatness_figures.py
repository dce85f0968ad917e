"""The figures of ``bsam flatness``. Models of a group are drawn on the same scale."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from ....common.extras import install_line
from ....flatness.density import smoothed
from ...inference.flatness_numbers import DensityInfo, LandscapeInfo, SpectrumInfo
from ...recipes.columns import measured_on
from .landscape_figures import plot_contours, plot_surfaces, write_interactive
from .panels import COLOURS, group_heading, grouped, line_style, new_figure, panel_title, panels, save, tidy, typeset
from .probe_figures import plot_probe

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
            ax.set(ylim=(0, 1.05 * tallest), xlabel=_axis_label([info]))
            ax.locator_params(axis="x", nbins=5)
            title = info.title + ("" if info.converged else " (not converged)")
            ax.set_title(typeset(panel_title(title)), pad=TITLE_PAD, fontsize=10)
            numbers = f"max {info.maximum:.3g}, mean {info.mean:.3g}, variance {info.variance:.3g}"
            ax.text(0.5, 1.02, numbers, transform=ax.transAxes, ha="center", va="bottom", fontsize="small")
            tidy(ax)
        first, ax = group[0]
        count = f"how many of {CHOSEN[first.which].format(len(first.values))}"
        ax.set_ylabel(group_heading(first, groups) + count)
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
        ax.set(yscale="log", ylim=(10.0**-DECADES * peak, 2 * peak))
        ax.set(xlabel=_axis_label(group), ylabel=f"{group_heading(group[0], groups)}density")
        ax.legend(frameon=False)
        tidy(ax)
    save(figure, path)


def _axis_label(infos: Sequence[SpectrumInfo | DensityInfo]) -> str:
    measured = " or ".join(dict.fromkeys(info.measured_on for info in infos if info.measured_on))
    return "eigenvalue of the Hessian" + (f"\n({measured})" if measured else "")


DRAWINGS: dict[str, tuple[Any, Any, str]] = {  # by file: the function, the type of its input, its key in an entry
    "spectrum.png": (plot_spectrum, SpectrumInfo, "eigenvalues"),
    "density.png": (plot_density, DensityInfo, "density"),
    "contours.png": (plot_contours, LandscapeInfo, "landscape"),
    "surfaces.png": (plot_surfaces, LandscapeInfo, "landscape"),
    "surfaces.html": (write_interactive, LandscapeInfo, "landscape"),
}


def draw_entries(
    titles: Sequence[str], entries: Sequence[Mapping[str, Any]], folder: Path, on_message: Callable[[str], None]
) -> Iterator[Path]:
    """Draw all figures of the entries into a folder, and yield their paths."""
    pairs = list(zip(titles, entries, strict=True))
    for file, (draw, info_class, name) in DRAWINGS.items():
        if file.endswith("html") and find_spec("plotly") is None:
            on_message(f"{file} is not written: it needs plotly ({install_line('plot')} in a clone of bsam).")
            continue
        infos = [info_class(title, entry["architecture"], **entry[name]) for title, entry in pairs]
        if name != "landscape":
            labels = map(entry_label, entries)
            infos = [replace(info, measured_on=label) for info, label in zip(infos, labels, strict=True)]
        draw(infos, folder / file)
        yield folder / file
    for title, entry in pairs:
        if "probe" in entry:
            name = re.sub(r"[^\w.-]+", "_", title)[-50:]  # the title may be a path
            path = folder / f"probe_{name}.png"
            plot_probe(entry["probe"], path)
            yield path


def entry_label(entry: Mapping[str, Any]) -> str:
    """Return the loss of an entry and its samples."""
    if "run" in entry:
        return measured_on(entry["run"], entry["samples"])
    return f"the loader's loss, {entry['samples']:,} samples"
