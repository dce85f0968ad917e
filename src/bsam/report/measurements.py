"""``bsam flatness``: :func:`flatness_report` measures networks, saves ``flatness.json`` and draws the figures."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..common.errors import BsamError, BsamRuntimeError
from ..common.extras import install_line
from ..common.progress import ProgressLine
from ..flatness.intervals import plus_minus
from ..recipes.measure import FlatnessSettings, Measured, loss_and_samples, measure
from ..recipes.subjects import Loaded, MeasuredModels
from ..training.config import check_settings
from ..training.environment import environment_info, pick_device
from ..training.files import locked, read_json, refuse_other_files, usable, write_json
from .landscapes import LandscapeInfo, landscape_info, plot_contours, plot_surfaces, write_interactive
from .probes import plot_probe, read_probe
from .spectra import DensityInfo, SpectrumInfo, density_info, plot_density, plot_spectrum, spectrum_info

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

HINT = "remove flatness.json to measure again, or choose another folder"
MAX_TITLE_LENGTH = 100  # characters: figures have no room for more
MAX_NAME_LENGTH = 50  # characters of it in the name of a file: file systems take 255 bytes, and a character has up to 4
LOSS_RTOL = 1e-6  # relative difference within which two losses count as equal
FIGURES = ("spectrum.png", "density.png", "contours.png", "surfaces.png", "surfaces.html")
_INFOS: dict[str, Any] = {"eigenvalues": SpectrumInfo, "density": DensityInfo, "landscape": LandscapeInfo}
_PARTS = {"architecture", "samples", "parameters", "sharpness", "trace", *_INFOS}  # of an entry in flatness.json


class ResultsFile:
    """The measurements in ``folder/flatness.json``, written after each model, so that interrupted work can continue.

    Args:
        folder: created if it does not exist. One with measurements under other settings is refused and not changed.
        settings: what must be equal for numbers to be comparable, as plain values.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     ResultsFile(Path(folder), {"k": 1}).add({"file": "a.pt", "sha256": "12"})
        ...     again = ResultsFile(Path(folder), {"k": 1})
        >>> again.find("a.pt", "12") is not None, again.find("a.pt", "34") is not None
        (True, False)
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self.path, self.settings, self._models = folder / "flatness.json", dict(settings), list[dict[str, Any]]()
        with usable(folder, "results"):
            folder.mkdir(parents=True, exist_ok=True)
            has_results = self.path.exists()
        if not has_results:  # figures would be overwritten, other files stay
            figures = {*FIGURES, *(path.name for path in folder.glob("probe_*.png"))}
            refuse_other_files(folder, {path.name for path in folder.iterdir()} - figures)
            return
        content = read_json(self.path, dict, HINT)
        saved_settings, models = content.get("settings"), content.get("models")
        if not isinstance(saved_settings, dict) or not isinstance(models, list):
            raise BsamRuntimeError(f"{self.path} was not written by bsam flatness: choose another folder")
        check_settings(folder, saved_settings, self.settings)
        self._models = [_with_nan(entry) for entry in models]
        for number, entry in enumerate(self._models, 1):
            if not isinstance(entry, dict) or not all(isinstance(entry.get(name), str) for name in ("file", "sha256")):
                raise BsamRuntimeError(f"{self.path}: entry {number} has no file name or no SHA-256; {HINT}")

    def find(self, file: str, sha256: str) -> dict[str, Any] | None:
        """Return the entry of a file with this content, if there is one."""
        return next((entry for entry in self._models if (entry["file"], entry["sha256"]) == (file, sha256)), None)

    def add(self, entry: dict[str, Any]) -> None:
        """Write an entry to the disk, in place of an earlier one of its file."""
        self._models = [*(known for known in self._models if known["file"] != entry["file"]), entry]
        write_json(self.path, {"settings": self.settings, "environment": environment_info(), "models": self._models})


def flatness_report(
    models: MeasuredModels, instruments: FlatnessSettings, folder: Path, device: str, console: Console
) -> list[Path]:
    """Measure each model whose numbers are not in ``folder`` yet, print a table and draw the figures.

    A model that was measured before is loaded, and its loss computed: where that differs, the loader or its data has
    changed, and the model is measured again. The readings of a run's probe are recorded and drawn, too.

    Args:
        models: the networks.
        instruments: the settings.
        folder: for the results.
        device: a name, or ``"auto"``.
        console: where the table is printed.

    Returns:
        the files that were written.
    """
    torch_device = pick_device(device)
    versions = {name: environment_info()[name] for name in ("bsam", "torch")}
    settings = {**models.settings, "device": str(torch_device), **instruments.settings(), **versions}
    most = MAX_TITLE_LENGTH
    titles = [f"…{title[1 - most :]}" if len(title) > most else title for title in models.titles]
    with locked(folder, "measuring"):
        results = ResultsFile(folder, settings)
        entries = _measured(results, models, torch_device, instruments, console)
        console.print(_table(titles, entries))
        return [results.path, *_draw(titles, entries, folder, console)]


def _measured(
    results: ResultsFile, models: MeasuredModels, device: torch.device, instruments: FlatnessSettings, console: Console
) -> list[dict[str, Any]]:
    """Return the entry of each model: from the file where it is there and has not changed, else measured now."""
    entries: list[dict[str, Any]] = []
    with ProgressLine() as line:
        line.reach("models", 0, len(models.paths))
        for path in models.paths:
            sha256 = hashlib.sha256(models.weights(path).read_bytes()).hexdigest()
            loaded = models.load(path, device)
            entry = results.find(str(path), sha256)
            if entry is not None and not entry.keys() >= _PARTS:
                raise BsamRuntimeError(f"{results.path} is damaged: it lacks numbers of {path}; {HINT}")
            try:
                if entry is not None and (changed := _change(entry, loaded, instruments)):
                    sentence = f"Measuring {path} again: {changed}. The loader or its data may have changed."
                    line.say(sentence)
                    entry = None
                if entry is None:
                    probe = {"probe": read_probe(path)} if (path / "probe.jsonl").exists() else {}
                    about = {**models.about(path), **probe, "architecture": _architecture(loaded[0])}
                    numbers = _numbers(measure(*loaded, instruments, line.reach), instruments.which)
                    entry = {"file": str(path), "sha256": sha256, **about, **numbers}
                    results.add(entry)
            except BsamError as error:
                raise BsamRuntimeError(f"{path}: {error}") from error
            entries.append(entry)
            line.reach("models", len(entries), len(models.paths))
    return entries


def _change(entry: Mapping[str, Any], loaded: Loaded, instruments: FlatnessSettings) -> str | None:
    """Return the difference between a model and its entry in words; None if there is none."""
    loss, samples = loss_and_samples(*loaded, instruments)
    before, samples_before = entry["landscape"]["centre"], entry["samples"]
    if samples != samples_before:
        return f"the number of samples changed from {samples_before} to {samples}"
    if not math.isclose(loss, before, rel_tol=LOSS_RTOL):
        return f"the loss changed from {before:.6g} to {loss:.6g}"
    return None if _architecture(loaded[0]) == entry["architecture"] else "the architecture changed"


def _with_nan(value: Any) -> Any:
    """Return what was read from strict JSON, with NaN where null stands for a number that is not finite."""
    if isinstance(value, dict):
        return {k: _with_nan(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_with_nan(v) for v in value]
    return math.nan if value is None else value


def _architecture(model: nn.Module) -> str:
    """Return a text that is equal for models whose trainable parameters have the same names and shapes."""
    shapes = [(name, tuple(p.shape)) for name, p in model.named_parameters() if p.requires_grad]
    return f"{type(model).__name__} {hashlib.sha256(repr(shapes).encode()).hexdigest()[:8]}"


def _numbers(measured: Measured, which: str) -> dict[str, Any]:
    """Return all numbers as plain values, from which the figures can be drawn again."""
    (top,) = spectrum_info({"": measured.eigenvalues}, which=which)
    (density,), (land,) = density_info({"": measured.density}), landscape_info({"": measured.landscape})
    parts = {"eigenvalues": asdict(top), "density": asdict(density), "landscape": asdict(land)}
    return {
        "parameters": measured.parameters,
        "samples": measured.samples,
        "seconds": dict(measured.seconds),
        "sharpness": asdict(measured.sharpness),
        "trace": asdict(measured.trace),
        **{name: {k: v for k, v in part.items() if k not in ("title", "group")} for name, part in parts.items()},
    }


def _draw(
    titles: Sequence[str], entries: Sequence[Mapping[str, Any]], folder: Path, console: Console
) -> Iterator[Path]:
    def infos(name: str) -> list[Any]:
        pairs = zip(titles, entries, strict=True)
        return [_INFOS[name](title, entry["architecture"], **entry[name]) for title, entry in pairs]

    drawings: dict[str, tuple[Any, str]] = {
        "spectrum.png": (plot_spectrum, "eigenvalues"),
        "density.png": (plot_density, "density"),
        "contours.png": (plot_contours, "landscape"),
        "surfaces.png": (plot_surfaces, "landscape"),
        "surfaces.html": (write_interactive, "landscape"),
    }
    for file, (draw, name) in drawings.items():
        if draw is write_interactive and find_spec("plotly") is None:
            sentence = f"{file} is not written: it needs plotly ({install_line('plot')} in a clone of bsam)."
            console.print(sentence, soft_wrap=True, markup=False)
            continue
        draw(infos(name), folder / file)
        yield folder / file
    used: set[str] = set()
    for title, entry in zip(titles, entries, strict=True):
        if "probe" in entry:
            name = "probe_" + re.sub(r"[^\w.-]+", "_", title)[-MAX_NAME_LENGTH:]  # the title may be a path
            names = (name, *(f"{name}_{n}" for n in range(2, len(titles) + 1)))
            used.add(own := next(each for each in names if each not in used))
            plot_probe(entry["probe"], folder / f"{own}.png")
            yield folder / f"{own}.png"


def _table(titles: Sequence[str], entries: Sequence[Mapping[str, Any]]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False)
    table.add_column("model")
    for name in ("loss", "λmax", "trace (95 %)", "MaxS", "MinS", "BilS"):
        table.add_column(name, justify="right", no_wrap=True)
    for title, entry in zip(titles, entries, strict=True):
        near, top, total = entry["sharpness"], entry["eigenvalues"], entry["trace"]
        low, high = total["interval"]
        table.add_row(
            title,
            f"{near['loss']:.3g}",
            f"{top['maximum']:.3g}" + ("" if top["converged"] else " (not converged)"),
            plus_minus(total["value"], (high - low) / 2),
            *(f"{near[name]:.3g}" for name in ("max_sharpness", "min_sharpness", "bilateral")),
        )
    return table
