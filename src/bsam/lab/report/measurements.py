"""The report of ``bsam flatness``: measure networks, save ``flatness.json`` and draw the figures."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ...common.errors import BsamError, BsamRuntimeError
from ...common.extras import install_line
from ...flatness.trace import plus_minus
from ..common.progress import ProgressLine
from ..recipes.columns import measured_on
from ..recipes.measure import FlatnessSettings, Measured, loss_of, measure
from ..recipes.subjects import MeasuredModels
from ..training.config import check_settings
from ..training.environment import environment_info, pick_device
from ..training.files import locked, reading, write_json
from .landscapes import LandscapeInfo, landscape_info, plot_contours, plot_surfaces, write_interactive
from .probes import plot_probe, read_probe
from .spectra import DensityInfo, SpectrumInfo, density_info, plot_density, plot_spectrum, spectrum_info

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

HINT = "remove flatness.json to measure again, or choose another folder"
MAX_TITLE = 100  # characters: figures have no room for more
MIN_TITLE = 14  # characters of a title in one line of a table
LABELS = ("title", "group", "measured_on")  # of a figure, not measured
LOSS_RTOL = 1e-6  # relative difference within which two losses count as equal
DRAWINGS: dict[str, tuple[Any, Any, str]] = {  # by file: the function, the type of its input, its key in an entry
    "spectrum.png": (plot_spectrum, SpectrumInfo, "eigenvalues"),
    "density.png": (plot_density, DensityInfo, "density"),
    "contours.png": (plot_contours, LandscapeInfo, "landscape"),
    "surfaces.png": (plot_surfaces, LandscapeInfo, "landscape"),
    "surfaces.html": (write_interactive, LandscapeInfo, "landscape"),
}


def flatness_report(
    models: MeasuredModels, options: FlatnessSettings, folder: Path, device: str, console: Console
) -> list[Path]:
    """Measure each model whose numbers are not in ``folder`` yet, print a table and draw the figures.

    The loss of a model that was measured before is computed again: if it differs, the loader or its data has changed,
    and the model is measured again. The readings of a run's probe are recorded and drawn too.

    Args:
        models: the networks.
        options: what to measure, and how.
        folder: the folder for the results.
        device: the name of a device, or ``"auto"``.
        console: prints the table.

    Returns:
        the paths of the files.
    """
    torch_device = pick_device(device)
    versions = {name: environment_info()[name] for name in ("bsam", "torch")}
    settings = {**models.settings, "device": str(torch_device), **asdict(options), **versions}
    titles = [title if len(title) <= MAX_TITLE else f"…{title[1 - MAX_TITLE :]}" for title in models.titles]
    with locked(folder, "measuring"):
        file = folder / "flatness.json"
        entries = _measured(file, settings, models, torch_device, options)
        for label in dict.fromkeys(map(_measured_on, entries)):  # numbers in one table have one meaning
            rows = {title: e for title, e in zip(titles, entries, strict=True) if _measured_on(e) == label}
            _print(f"Loss: {label}", rows, console)
        return [file, *_draw(titles, entries, folder, console)]


def _measured(
    file: Path,
    settings: Mapping[str, Any],
    models: MeasuredModels,
    device: torch.device,
    options: FlatnessSettings,
) -> list[dict[str, Any]]:
    """Return the entry of each model, from the file if the model has not changed, otherwise measured now.

    The file is written after each model, so that an interrupted report can continue.
    """
    known, entries = _known(file, settings), []
    with ProgressLine() as line:
        line.reach("models", 0, len(models.paths))
        for path in models.paths:
            sha256 = hashlib.sha256(models.weights(path).read_bytes()).hexdigest()
            loaded = models.load(path, device)
            entry = next((old for old in known if (old["file"], old["sha256"]) == (str(path), sha256)), None)
            try:
                if entry is not None:
                    before, loss = entry["landscape"]["centre"], loss_of(*loaded, options)
                    if not math.isclose(loss, before, rel_tol=LOSS_RTOL):
                        changed = f"its loss was {before:.6g} and is {loss:.6g} now"
                        line.say(f"Measuring {path} again: {changed}. The loader or its data may have changed.")
                        entry = None
                if entry is None:
                    probe = {"probe": read_probe(path)} if (path / "probe.jsonl").exists() else {}
                    about = {**models.about(path), **probe, "architecture": _architecture(loaded[0])}
                    numbers = _numbers(measure(*loaded, options, line.reach), options.which)
                    entry = {"file": str(path), "sha256": sha256, **about, **numbers}
                    known = [*(old for old in known if old["file"] != str(path)), entry]
                    write_json(file, {"settings": settings, "environment": environment_info(), "models": known})
            except BsamError as error:
                raise BsamRuntimeError(f"{path}: {error}") from error
            entries.append(entry)
            line.reach("models", len(entries), len(models.paths))
    return entries


def _known(file: Path, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the entries of the file; raise if they were measured with other settings."""
    if not file.exists():
        return []
    with reading(file, HINT):
        content = json.loads(file.read_bytes())
        theirs, entries = dict(content["settings"]), [_with_nan(entry) for entry in content["models"]]
    check_settings(file.parent, theirs, settings)
    return entries


def _with_nan(value: Any) -> Any:
    """Return values read from JSON with NaN for null, which stands for non-finite numbers."""
    if isinstance(value, dict):
        return {k: _with_nan(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_with_nan(v) for v in value]
    return math.nan if value is None else value


def _architecture(model: nn.Module) -> str:
    """Return a text that is equal for models whose class and whose parameters' names and shapes are equal."""
    shapes = [(name, tuple(p.shape)) for name, p in model.named_parameters() if p.requires_grad]
    return f"{type(model).__name__} {hashlib.sha256(repr(shapes).encode()).hexdigest()[:8]}"


def _numbers(measured: Measured, which: str) -> dict[str, Any]:
    """Return all numbers as plain values, from which the figures are drawn."""
    (top,) = spectrum_info({"": measured.eigenvalues}, which=which)
    (density,), (land,) = density_info({"": measured.density}), landscape_info({"": measured.landscape})
    parts = {"eigenvalues": asdict(top), "density": asdict(density), "landscape": asdict(land)}
    return {
        "parameters": measured.parameters,
        "samples": measured.samples,
        "seconds": dict(measured.seconds),
        "sharpness": asdict(measured.sharpness),
        "trace": asdict(measured.trace),
        **{name: {k: v for k, v in part.items() if k not in LABELS} for name, part in parts.items()},
    }


def _draw(
    titles: Sequence[str], entries: Sequence[Mapping[str, Any]], folder: Path, console: Console
) -> Iterator[Path]:
    pairs = list(zip(titles, entries, strict=True))
    for file, (draw, info, name) in DRAWINGS.items():
        if file.endswith("html") and find_spec("plotly") is None:
            sentence = f"{file} is not written: it needs plotly ({install_line('plot')} in a clone of bsam)."
            console.print(sentence, soft_wrap=True, markup=False)
            continue
        infos = [info(title, entry["architecture"], **entry[name]) for title, entry in pairs]
        if name != "landscape":
            infos = [replace(info, measured_on=_measured_on(entry)) for info, entry in zip(infos, entries, strict=True)]
        draw(infos, folder / file)
        yield folder / file
    for title, entry in pairs:
        if "probe" in entry:
            name = re.sub(r"[^\w.-]+", "_", title)[-50:]  # the title may be a path
            path = folder / f"probe_{name}.png"
            plot_probe(entry["probe"], path)
            yield path


def _measured_on(entry: Mapping[str, Any]) -> str:
    """Return the loss of an entry and its samples."""
    if "run" in entry:
        return measured_on(entry["run"], entry["samples"])
    return f"the loader's loss, {entry['samples']:,} samples"


def _print(label: str, rows: Mapping[str, Mapping[str, Any]], console: Console) -> None:
    """Print a table or, if it is wider than the console, a list."""
    cells = {title: _cells(entry) for title, entry in rows.items()}
    names = next(iter(cells.values()))
    widths = [max(len(name), *(len(numbers[name]) for numbers in cells.values())) for name in names]
    title_width = min(max(map(len, cells)), MIN_TITLE)
    if title_width + 2 + sum(width + 3 for width in widths) <= console.width:  # two spaces and a border between columns
        console.print(_table(label, cells, console.width))
        return
    console.print(label, markup=False)
    for title, numbers in cells.items():
        console.print(f" {title}", markup=False)
        for name, text in numbers.items():
            console.print(f"   {name:<12}  {text}", markup=False)


def _cells(entry: Mapping[str, Any]) -> dict[str, str]:
    """Return the numbers of a model as texts, by column."""
    sharpness, eigenvalues, (low, high) = entry["sharpness"], entry["eigenvalues"], entry["trace"]["interval"]
    return {
        "loss": f"{sharpness['loss']:.3g}",
        "λmax": f"{eigenvalues['maximum']:.3g}" + ("" if eigenvalues["converged"] else " (not converged)"),
        "trace (95 %)": plus_minus(entry["trace"]["value"], (high - low) / 2),
        "MaxS": f"{sharpness['max_sharpness']:.3g}",
        "MinS": f"{sharpness['min_sharpness']:.3g}",
        "BilS": f"{sharpness['bilateral']:.3g}",
    }


def _table(label: str, cells: Mapping[str, Mapping[str, str]], width: int) -> Table:
    from rich import box
    from rich.table import Table

    style: dict[str, Any] = {"title_style": "", "title_justify": "left", "min_width": min(len(label), width)}
    table = Table(title=label, box=box.SIMPLE_HEAD, show_edge=False, **style)
    table.add_column("model", overflow="fold")
    for name in next(iter(cells.values())):
        table.add_column(name, justify="right", no_wrap=True)
    for title, numbers in cells.items():
        table.add_row(title, *numbers.values())
    return table
