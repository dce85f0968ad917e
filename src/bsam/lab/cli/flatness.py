"""``bsam flatness``: measure how flat the minima of trained networks are."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, get_type_hints

from ...flatness.trace import plus_minus
from ..common.files import locked, write
from ..common.printing import group_by, say, terminal_width
from ..common.termination import resumable
from ..inference.run_flatness import (
    IMAGES,
    FlatnessSettings,
    MeasuredModels,
    find_models,
    measured_entries,
    runs_in_folders,
)
from ..recipes.variants import variant_of
from ..report.figures.flatness_figures import entry_label, flatness_figures
from ..report.page.render import figures_html
from ..report.table import Column, Table
from ..training.machine import environment_info, pick_device
from ..training.run_dir import FLATNESS
from .run_flags import CACHE_HELP, DATA_HELP, DEVICE_HELP, MODEL_HELP, TASK_HELP, flag_kind

DESCRIPTION = """\
Measure trained networks: the top eigenvalues of the Hessian, its trace and spectral density, sharpness (MaxS, MinS,
BilS), and the loss on a plane. Networks are given as run directories of bsam train, as folders with run directories at
any depth (their finished runs are measured, without those that only tuned others), or as files. A run is measured on
its training samples, without augmentation and label smoothing, with the labels used in training. For files, write a
function and name it with --loader; its module may be in the current folder. The function takes the pathlib.Path of a
file and returns (model, loss_fn, data), where loss_fn(model(x), y) is the mean loss of a batch and data is a list or
DataLoader that always yields the same batches (x, y). Writes flatness.json (all numbers) and flatness.html, a page with
all figures: eigenvalues, densities, contours and surfaces of the loss and, of runs trained with --probe, sharpness and
cosine during training. Models with the same architecture are drawn along the same random directions and on the same
scales. If the command is interrupted, running it again continues with the model it was measuring."""
MAX_TITLE = 100  # characters: figures have no room for more
FLATNESS_NEEDS = ("safetensors", "plotly")


def add(command: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    flag = command.add_argument
    files = "directories of finished runs, folders of them, or files"
    flag("files", nargs="+", type=Path, help=files, metavar="RUNS|FILE")
    loader = "function that loads a file: function(path) -> (model, loss_fn, data)"
    flag("--loader", help=loader, metavar="MODULE:FUNCTION")
    images = "measure a run on N training samples, balanced over the classes (for pose, evenly spaced)"
    flag("--images", type=int, help=f"{images} (default: {IMAGES}, or all if there are fewer)", metavar="N")
    flag("--data", action="append", default=[], help=f"{DATA_HELP}; may be repeated", metavar="MODULE:FUNCTION")
    flag("--model", action="append", default=[], help=f"{MODEL_HELP}; may be repeated", metavar="MODULE:FUNCTION")
    flag("--task", action="append", default=[], help=f"{TASK_HELP}; may be repeated", metavar="MODULE:CLASS")
    flag("--data-dir", type=Path, help="folder with the files of the run's data set", metavar="FOLDER")
    flag("--cache-dir", type=Path, help=CACHE_HELP, metavar="FOLDER")
    out = "folder for the results (default: runs/flatness)"
    flag("--out", type=Path, default=Path("runs/flatness"), help=out, metavar="FOLDER")
    hints = get_type_hints(FlatnessSettings)
    for field in fields(FlatnessSettings):
        name = f"--{field.name.replace('_', '-')}"
        default = "" if field.default is None else f" (default: {field.default})"
        about = f"{field.metadata['help']}{default}"
        flag(name, default=field.default, help=about, **flag_kind(hints[field.name]))
    flag("--device", default="auto", help=DEVICE_HELP, metavar="NAME")
    command.set_defaults(run=_flatness, needs=dict.fromkeys(FLATNESS_NEEDS, "demo"))


def _flatness(arguments: argparse.Namespace) -> None:
    settings = FlatnessSettings(**{field.name: getattr(arguments, field.name) for field in fields(FlatnessSettings)})
    models = find_models(
        runs_in_folders(arguments.files, say),
        arguments.loader,
        arguments.images,
        arguments.data_dir,
        arguments.cache_dir,
        title_of=lambda run: variant_of(run).title,
        data=arguments.data,
        models=arguments.model,
        tasks=arguments.task,
    )
    with resumable(arguments.out, FLATNESS, "Finished models"):
        written = flatness_report(models, settings, arguments.out, arguments.device)
    say(f"Written: {', '.join(map(str, written))}")


def page_of(entries: Mapping[str, Mapping[str, Any]]) -> bytes:
    """Return the page with all figures of models by title."""
    return figures_html("Flatness", flatness_figures(entries))


def flatness_report(
    models: MeasuredModels,
    options: FlatnessSettings,
    folder: Path,
    device: str,
    draw: Callable[[Mapping[str, Mapping[str, Any]]], bytes] = page_of,
) -> list[Path]:
    """Measure each model whose numbers are not in ``folder`` yet, print a table and draw the figures.

    The loss of a model that was measured before is computed again: if it differs, the loader or its data has changed,
    and the model is measured again. The readings of a run's probe are recorded and drawn too.

    Args:
        models: the networks.
        options: what to measure, and how.
        folder: the folder for the results.
        device: the name of a device, or ``"auto"``.
        draw: returns the page with the figures of models by title.

    Returns:
        the paths of the files.
    """
    torch_device = pick_device(device)
    versions = {name: environment_info()[name] for name in ("bsam", "torch")}
    settings = {**models.settings, "device": str(torch_device), **asdict(options), **versions}
    titles = [title if len(title) <= MAX_TITLE else f"…{title[1 - MAX_TITLE :]}" for title in models.titles]
    with locked(folder, "measuring"):
        file = folder / FLATNESS
        entries = measured_entries(file, settings, models, torch_device, options)
        by_title = dict(zip(titles, entries, strict=True))
        for label, rows in group_by(by_title.items(), lambda pair: entry_label(pair[1])).items():
            table = flatness_table(f"Loss: {label}", dict(rows))  # numbers in one table have one meaning
            say(table.to_text(terminal_width()))
        page = folder / "flatness.html"
        write(page, draw(by_title))
        return [file, page]


def flatness_table(title: str, entries: Mapping[str, Mapping[str, Any]]) -> Table:
    """Return the numbers of models by title."""
    data = [{"model": model, **_numbers(entry)} for model, entry in entries.items()]
    return Table.of(title, data, [Column(name, name, words=name == "model") for name in data[0]])


def _numbers(entry: Mapping[str, Any]) -> dict[str, str]:
    """Return the numbers of a model as texts, by column."""
    sharpness = entry["sharpness"]
    eigenvalues = entry["eigenvalues"]
    low, high = entry["trace"]["interval"]
    return {
        "loss": f"{sharpness['loss']:.3g}",
        "λmax": f"{eigenvalues['maximum']:.3g}" + ("" if eigenvalues["converged"] else " (not converged)"),
        "trace (95 %)": plus_minus(entry["trace"]["value"], (high - low) / 2),
        "MaxS": f"{sharpness['max_sharpness']:.3g}",
        "MinS": f"{sharpness['min_sharpness']:.3g}",
        "BilS": f"{sharpness['bilateral']:.3g}",
    }
