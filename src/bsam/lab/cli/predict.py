"""``bsam predict``: classify images, find the joints of people in them, or apply a task of your own to files."""

from __future__ import annotations

import argparse
import csv
import io
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

from ...common.errors import BsamValueError
from ..common.files import usable, write, write_json
from ..common.printing import printable, say
from ..inference.pictures import full_size, predictions_grid, save
from ..inference.predictions import file_paths, predict
from ..tasks import TASKS
from ..tasks.found import Prediction
from .run_flags import DEVICE_HELP, MODEL_HELP, TASK_HELP

DESCRIPTION = """\
Print what the trained network of a run finds in each file: the most probable classes of an image, x and y of each
joint of a person in pixels, or the values of a task of your own. The training data is not needed."""
PICTURES = (".png", ".jpg", ".jpeg", ".pdf")
TABLES = (".csv", ".json")
MAX_GRID = 100  # images in a grid; more would be too large to look at


def add(command: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    flag = command.add_argument
    flag("folder", type=Path, help="directory of a finished run that reads files", metavar="RUN_DIR")
    images = "files or folders; folders are searched recursively, except hidden ones"
    flag("images", nargs="+", type=Path, help=images, metavar="IMAGE|FOLDER")
    grid = f"draw the first {MAX_GRID} images with their classes or joints in one picture ({', '.join(PICTURES)})"
    flag("--grid", type=Path, help=grid, metavar="FILE")
    out = (
        "write the values of all files to this file, for example predictions.csv or predictions.json. Any "
        "other name is a folder for pictures: one PNG file per image, with its classes or with the skeleton drawn on "
        "it, the person's right side orange and the left side light blue. Existing pictures are not overwritten: the "
        "command stops with an error"
    )
    flag("--out", type=Path, help=out, metavar="FILE|FOLDER")
    flag("--model", help=MODEL_HELP, metavar="MODULE:FUNCTION")
    flag("--task", help=TASK_HELP, metavar="MODULE:CLASS")
    flag("--device", default="auto", help=DEVICE_HELP, metavar="NAME")
    for task in TASKS.values():
        of_task = command.add_argument_group(task.predict_heading).add_argument
        for name, about in task.predict_flags.items():
            of_task(f"--{name.replace('_', '-')}", **about)
    command.set_defaults(run=_predict, needs={"PIL": "images", "safetensors": "train"})


def _predict(arguments: argparse.Namespace) -> None:
    table: Path | None = arguments.out
    folder: Path | None = None
    if table is not None and table.suffix.lower() not in TABLES:
        folder = table
        table = None
    grid: Path | None = arguments.grid
    if grid is not None and grid.suffix.lower() not in PICTURES:
        raise BsamValueError(f"--grid must end in one of {', '.join(PICTURES)}; got {grid}")
    for flag, file in (("--grid", grid), ("--out", table)):
        if file is not None and not file.parent.is_dir():
            raise BsamValueError(f"the folder {file.parent} of {flag} does not exist: create it first")
    if folder is not None:
        picture_paths([*file_paths(arguments.images)], folder)  # raises now rather than after the last image
    options: dict[str, Any] = {}
    for task in TASKS.values():
        given = {name: getattr(arguments, name) for name in task.predict_flags}
        options |= {name: value for name, value in given.items() if value is not None}
    found = predict(
        arguments.folder,
        arguments.images,
        task=arguments.task,
        model=arguments.model,
        device=arguments.device,
        pictures=folder is not None or grid is not None,
        on_message=lambda sentence: say(f"bsam: {sentence}", to_stderr=True),
        **options,
    )
    lines = type(found[0]).lines(found)
    written: list[Path] = []
    if table is not None:
        write_table(found, table)
        written.append(table)
    if grid is not None:
        lines += draw_grid(found, grid)
        written.append(grid)
    if folder is not None:
        written += draw_pictures(found, folder)
    lines += [f"Written: {path}" for path in written]
    say("\n".join(map(printable, lines)))  # last: the output pipe may be closed


def write_table(found: Sequence[Prediction], path: Path) -> None:
    """Write the values of all files as JSON or CSV."""
    if path.suffix.lower() == ".json":
        write_json(path, [{"file": str(one.path), **one.values} for one in found])
        return
    text = io.StringIO(newline="")
    csv.writer(text).writerows(type(found[0]).table(found))
    write(path, text.getvalue().encode("utf-8", "surrogateescape"))  # a file name may have bytes that are not UTF-8


def draw_grid(found: Sequence[Prediction], path: Path, limit: int = MAX_GRID) -> list[str]:
    """Draw the first files in one picture; return a sentence if others are left out."""
    save(predictions_grid(found[:limit]), path)
    return [f"{path} shows the first {limit} of {len(found)} images."] if len(found) > limit else []


def draw_pictures(found: Sequence[Prediction], folder: Path) -> list[Path]:
    """Draw a picture of each file; return their paths."""
    paths = picture_paths([one.path for one in found], folder)
    with usable(folder, "pictures"):
        folder.mkdir(parents=True, exist_ok=True)
    for one, path in zip(found, paths, strict=True):
        save(full_size(one.picture()), path)
    return paths


def picture_paths(images: Sequence[Path], folder: Path) -> list[Path]:
    """Return a path in the folder for each image: its name with ``.png``, numbered if names are equal.

    Raise if a file exists already: it may be one of the images.
    """
    paths: list[Path] = []
    for image in images:
        names = (f"{image.stem}{f'-{n}' if n > 1 else ''}.png" for n in count(1))
        paths.append(next(folder / name for name in names if folder / name not in paths))
    with usable(folder, "pictures"):
        if folder.exists() and not folder.is_dir():
            raise BsamValueError(f"{folder} is not a folder: choose another one")
        for path in paths:
            if path.exists():
                raise BsamValueError(f"{path} already exists: remove it, or choose another folder")
    return paths
