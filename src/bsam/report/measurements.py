"""``bsam flatness``: measures networks, keeps the numbers in ``flatness.json``, and draws them."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..core.errors import BsamError, BsamRuntimeError, BsamValueError
from ..core.extras import need
from ..flatness.probe import Reading
from ..flatness.sharpness import Sharpness
from ..flatness.trace import Trace
from ..recipes.measure import STAGES, Instruments, Loaded, Measured, glance, measure
from ..recipes.subjects import Subjects, subjects
from ..training.config import check_settings
from ..training.environment import environment_info
from ..training.files import fits, read_json, read_json_lines, usable, write_json
from ..training.lock import locked
from .flatness import (
    CHOSEN,
    DensityInfo,
    SpectrumInfo,
    density_info,
    plot_density,
    plot_probe,
    plot_spectrum,
    probe_info,
    spectrum_info,
)
from .landscapes import LandscapeInfo, landscape_info, plot_contours, plot_surfaces, write_interactive
from .progress import progress

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

MEND = "remove flatness.json to measure anew, or choose another folder"
LONGEST = 100  # letters of a title: figures have no room for more
LONGEST_NAME = 50  # letters of it in the name of a file: file systems take 255 bytes, and a letter has up to 4
SAME = 1e-6  # relative difference within which two losses count as one
FIGURES = (
    "spectrum.png",
    "density.png",
    "contours.png",
    "surfaces.png",
    "surfaces.html",
)  # and probe_*.png, one for each run that had a probe
_PARTS = {
    "architecture": str,
    "samples": int,
    "parameters": int,
    "sharpness": Sharpness,
    "trace": Trace,
    "eigenvalues": SpectrumInfo,
    "density": DensityInfo,
    "landscape": LandscapeInfo,
}  # of an entry in flatness.json, with their types
_NO_PROBE: dict[str, list[float]] = probe_info([])


class ResultsFile:
    """What was measured, in ``folder/flatness.json``: written anew after each model, so that work that was interrupted
    goes on where it stopped.

    Args:
        folder: made if need be. One that holds measurements under other settings is refused, and nothing in it is
            touched.
        settings: what makes numbers comparable, as plain values.

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
            known = self.path.exists()
        if not known:
            strangers = [name for name in FIGURES if (folder / name).exists()] + sorted(
                path.name for path in folder.glob("probe_*.png")
            )
            if strangers:
                raise BsamRuntimeError(
                    f"{folder} holds files of something else ({', '.join(strangers)}), which would be overwritten: "
                    "choose another folder"
                )
            return
        content = read_json(self.path, dict, MEND)
        theirs, models = content.get("settings"), content.get("models")
        if not isinstance(theirs, dict) or not isinstance(models, list):
            raise BsamRuntimeError(f"{self.path} is no file of bsam flatness: choose another folder")
        check_settings(folder, theirs, self.settings)
        self._models = [_numbers_again(entry) for entry in models]
        for number, entry in enumerate(self._models, 1):
            if not isinstance(entry, dict) or not all(isinstance(entry.get(name), str) for name in ("file", "sha256")):
                raise BsamRuntimeError(f"{self.path} is damaged: model {number} in it has no file; {MEND}")

    def find(self, file: str, sha256: str) -> dict[str, Any] | None:
        """What is known of a file with this content."""
        return next((entry for entry in self._models if (entry["file"], entry["sha256"]) == (file, sha256)), None)

    def add(self, entry: dict[str, Any]) -> None:
        """Note a model, on disk before this returns, in place of what the file held before."""
        self._models = [*(known for known in self._models if known["file"] != entry["file"]), entry]
        write_json(self.path, {"settings": self.settings, "environment": environment_info(), "models": self._models})


def flatness_report(
    files: Sequence[Path],
    loader_name: str | None,
    instruments: Instruments,
    folder: Path,
    device: str,
    console: Console,
    images: int | None = None,
    data_dir: Path | None = None,
) -> list[Path]:
    """Measure each model that ``folder`` does not know yet, print a table and draw the figures; returns what was
    written.

    What the probe of a run saw during the training is noted and drawn, too.
    A model that it knows is loaded, and its loss taken: where that is another one than before, the loader or its data
    has changed, and it is measured anew.

    Args:
        files: the saved models, or the folders of finished runs.
        loader_name: for files: ``module:function``; ``function(path)`` returns ``(model, loss_fn, data)``. None for
            folders.
        instruments: their settings.
        folder: for the results.
        device: ``"auto"`` takes a GPU if there is one.
        console: where the bars go.
        images: for folders: how many training samples to measure on.
        data_dir: for folders: where the data is, if it is read from files.
    """
    models, place = subjects(files, loader_name, images, data_dir), _device(device)
    files = models.paths
    versions = {name: environment_info()[name] for name in ("bsam", "torch")}
    settings = {**models.settings, "device": str(place), **instruments.settings(), **versions}
    titles = [_short(models.title(file)) for file in files]
    with locked(folder, "measuring"):
        book = ResultsFile(folder, settings)
        entries = _measured(book, models, place, instruments, console)
        console.print(_table(titles, entries))
        return [book.path, *_draw(titles, entries, folder)]


def _measured(
    book: ResultsFile,
    models: Subjects,
    place: torch.device,
    instruments: Instruments,
    console: Console,
) -> list[dict[str, Any]]:
    """What is known of each model: from the notebook where it is there and has not changed, else measured now."""
    entries, files = list[dict[str, Any]](), models.paths
    with progress(console, {"models": len(files), **dict.fromkeys(STAGES, 1)}) as bars:
        bars.advance("models", 0)
        for file in files:
            sha256 = hashlib.sha256(models.weights(file).read_bytes()).hexdigest()
            loaded = models.load(file, place)
            entry = book.find(str(file), sha256)
            if entry is not None and not _is_whole(entry):
                raise BsamRuntimeError(f"{book.path} is damaged: it lacks numbers of {file}; {MEND}")
            try:
                if entry is not None and (changed := _change(entry, loaded, instruments)):
                    console.print(
                        f"{file} is measured anew: {changed}. Has the loader changed, or its data?", soft_wrap=True
                    )
                    entry = None
                if entry is None:
                    known = {
                        "file": str(file),
                        "sha256": sha256,
                        **models.about(file),
                        **_probed(file),
                        "architecture": _architecture(loaded[0]),
                    }
                    entry = {**known, **_numbers(measure(*loaded, instruments, bars.reach), instruments.which)}
                    book.add(entry)
            except BsamError as error:
                raise BsamRuntimeError(f"{file}: {error}") from error
            entries.append(entry)
            bars.advance("models", 1)
    return entries


def _change(entry: Mapping[str, Any], loaded: Loaded, instruments: Instruments) -> str | None:
    """What differs between a model and what is known of it, in words, if anything does."""
    loss, samples = glance(*loaded, instruments)
    before, samples_before = entry["landscape"]["centre"], entry["samples"]
    if samples != samples_before:
        return f"it has {samples} samples now, and had {samples_before}"
    if not math.isclose(loss, before, rel_tol=SAME):
        return f"its loss is {loss:.6g} now, and was {before:.6g}"
    return None if _architecture(loaded[0]) == entry["architecture"] else "it is another network now"


def _short(title: str) -> str:
    """The end of a long title, which tells runs apart."""
    return title if len(title) <= LONGEST else f"…{title[1 - LONGEST :]}"


def _is_whole(entry: Mapping[str, Any]) -> bool:
    """Whether an entry of the file has all that tables and figures are made from, each of its type."""
    blank, names = {"title": "", "group": ""}, ("eigenvalues", "density", "landscape")
    drawn = {name: {**blank, **found} for name in names if isinstance(found := entry.get(name), dict)}
    if not fits({name: entry.get(name) for name in _PARTS} | drawn, _PARTS):
        return False
    top, density, land = (entry[name] for name in drawn)
    columns = entry.get("probe", _NO_PROBE)
    return (
        top.get("which", "largest") in CHOSEN
        and fits(columns, dict.fromkeys(_NO_PROBE, list[float]))
        and len({*map(len, columns.values())}) == 1
        and 0 < len(top["values"]) == len(top["residuals"])
        and len(density["grid"]) == len(density["density"])
        and 0 < len(density["nodes"]) == len(density["weights"])
        and 0 < len(land["axis"]) == len(land["loss"])
        and all(len(row) == len(land["axis"]) for row in land["loss"])
    )


def _numbers_again(value: Any) -> Any:
    """What was read from strict JSON, where null stands for a number that is not finite."""
    if isinstance(value, dict):
        return {k: _numbers_again(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_numbers_again(v) for v in value]
    return math.nan if value is None else value


def _probed(folder: Path) -> dict[str, Any]:
    """What the probe of a run saw, column by column; nothing, if there was none."""
    file = folder / "probe.jsonl"
    if not file.exists():
        return {}
    mend = "the probe's figure is drawn from it: remove the file to do without"
    rows = [_numbers_again(row) for row in read_json_lines(file, mend)]
    if fits(rows, list[Reading]):
        return {"probe": probe_info([Reading(**row) for row in rows])}
    raise BsamRuntimeError(f"{file} is damaged: it does not hold the readings of a probe; {mend}")


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # torch built without CUDA asserts
        raise BsamValueError(
            f"device must be auto, cpu, cuda or the like, and be there; got {name!r}: {str(error).splitlines()[0]}"
        ) from error
    return device


def _architecture(model: nn.Module) -> str:
    """Equal for models whose trainable parameters have the same names and shapes."""
    shapes = [(name, tuple(p.shape)) for name, p in model.named_parameters() if p.requires_grad]
    return f"{type(model).__name__} {hashlib.sha256(repr(shapes).encode()).hexdigest()[:8]}"


def _numbers(found: Measured, which: str) -> dict[str, Any]:
    """All of it, as plain values; what the figures need can be built from it again."""
    infos: dict[str, SpectrumInfo | DensityInfo | LandscapeInfo] = {
        "eigenvalues": spectrum_info({"": found.eigenvalues}, which=which)[0],
        "density": density_info({"": found.density})[0],
        "landscape": landscape_info({"": found.landscape})[0],
    }
    return {
        "parameters": found.parameters,
        "samples": found.samples,
        "seconds": dict(found.seconds),
        "sharpness": asdict(found.sharpness),
        "trace": asdict(found.trace),
        **{
            name: {key: value for key, value in asdict(info).items() if key not in ("title", "group")}
            for name, info in infos.items()
        },
    }


def _draw(titles: Sequence[str], entries: Sequence[Mapping[str, Any]], folder: Path) -> list[Path]:
    def infos(kind: Any, name: str) -> list[Any]:
        return [kind(title, entry["architecture"], **entry[name]) for title, entry in zip(titles, entries, strict=True)]

    paths = [folder / name for name in FIGURES]
    lands = infos(LandscapeInfo, "landscape")
    plot_spectrum(infos(SpectrumInfo, "eigenvalues"), paths[0])
    plot_density(infos(DensityInfo, "density"), paths[1])
    for draw, path in zip((plot_contours, plot_surfaces, write_interactive), paths[2:], strict=True):
        draw(lands, path)
    for title, entry in zip(titles, entries, strict=True):
        if "probe" in entry:
            name = re.sub(r"[^\w.-]+", "_", title)[-LONGEST_NAME:]  # it may be a path
            names = (f"probe_{name}{number}.png" for number in ("", *(f"_{n}" for n in range(2, len(titles) + 1))))
            paths.append(next(path for own in names if (path := folder / own) not in paths))
            plot_probe(entry["probe"], paths[-1])
    return paths


def _table(titles: Sequence[str], entries: Sequence[Mapping[str, Any]]) -> Table:
    need("rich", "train")
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False)
    table.add_column("model")
    for name in ("loss", "λmax", "trace", "MaxS", "MinS", "BilS"):
        table.add_column(name, justify="right", no_wrap=True)
    for title, entry in zip(titles, entries, strict=True):
        near, top, total = entry["sharpness"], entry["eigenvalues"], entry["trace"]
        table.add_row(
            title,
            f"{near['loss']:.3g}",
            f"{top['maximum']:.3g}" + ("" if top["converged"] else " (not converged)"),
            f"{total['value']:.3g} ± {total['standard_error']:.1g}",
            *(f"{near[name]:.3g}" for name in ("max_sharpness", "min_sharpness", "bilateral")),
        )
    return table
