"""The figures of ``bsam flatness``, drawn from the entries of ``flatness.json``."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ....common.extras import install_line
from ...inference.flatness_numbers import DensityInfo, LandscapeInfo, SpectrumInfo
from ...recipes.columns import measured_on
from .landscape_figures import plot_contours, plot_surfaces, write_interactive
from .probe_figures import plot_probe
from .spectrum_figures import plot_density, plot_spectrum

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
