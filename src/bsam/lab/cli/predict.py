"""``bsam predict``: classify images, or find the joints of people in them."""

from __future__ import annotations

import argparse
import csv
import io
from collections.abc import Sequence
from itertools import count
from pathlib import Path

import numpy as np

from ...common.errors import BsamValueError
from ..common.files import usable, write, write_json
from ..common.printing import printable, say
from ..inference.class_prediction import Prediction, image_paths, predict
from ..inference.pose_prediction import FoundJoints, find_joints
from ..inference.prediction_pictures import class_texts, draw_grid, draw_joints, draw_joints_grid
from ..inference.task_prediction import predict_task
from ..training.run_dir import RunDir
from .run_flags import DEVICE_HELP, MODEL_HELP, TASK_HELP

DESCRIPTION = """\
Print the most probable classes of each image or, with a run of the task pose, x and y of each joint of the person in
the image, in pixels. The training data is not needed."""
PICTURES = (".png", ".jpg", ".jpeg", ".pdf")
TABLES = (".csv", ".json")
TOP = 3
MAX_GRID = 100  # images in a grid; more would be too large to look at


def add(command: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    flag = command.add_argument
    flag("folder", type=Path, help="directory of a finished run on image files", metavar="RUN_DIR")
    images = "image files or folders; folders are searched recursively, except hidden ones"
    flag("images", nargs="+", type=Path, help=images, metavar="IMAGE|FOLDER")
    grid = f"draw the first {MAX_GRID} images with their classes or joints in one picture ({', '.join(PICTURES)})"
    flag("--grid", type=Path, help=grid, metavar="FILE")
    out = (
        "write the classes or joints of all images to this file, for example predictions.csv or predictions.json. "
        "With a run of the task pose, any other name is a folder for pictures: one PNG file per image, with the "
        "skeleton drawn on it, the person's right side orange and the left side light blue. Existing pictures are not "
        "overwritten: the command stops with an error"
    )
    flag("--out", type=Path, help=out, metavar="FILE|FOLDER")
    flag("--model", help=MODEL_HELP, metavar="MODULE:FUNCTION")
    flag("--task", help=TASK_HELP, metavar="MODULE:CLASS")
    flag("--device", default="auto", help=DEVICE_HELP, metavar="NAME")
    classes = command.add_argument_group("classes").add_argument
    classes("--top", type=int, help=f"number of classes to print (default: {TOP})", metavar="N")
    joints = command.add_argument_group("joints").add_argument
    pixels = "bounding box of the person in pixels, for a single image; the centre of the first pixel is (0, 0)"
    corners = ("LEFT", "TOP", "RIGHT", "BOTTOM")
    joints("--box", nargs=4, type=float, help=f"{pixels} (default: the whole image)", metavar=corners)
    average = "average the probabilities of an image and its mirror image (default: as the run was evaluated)"
    joints("--flip-test", action=argparse.BooleanOptionalAction, help=average)
    command.set_defaults(run=_predict, needs={"PIL": "images", "safetensors": "train"})


def _predict(arguments: argparse.Namespace) -> None:
    if arguments.grid is not None and arguments.grid.suffix.lower() not in PICTURES:
        raise BsamValueError(f"--grid must end in one of {', '.join(PICTURES)}; got {arguments.grid}")
    for flag, file in (("--grid", arguments.grid), ("--out", _table(arguments))):
        if file is not None and not file.parent.is_dir():
            raise BsamValueError(f"the folder {file.parent} of {flag} does not exist: create it first")
    run_dir = RunDir(arguments.folder)
    run = run_dir.finished_run()
    if run.task.is_own:
        _check_unused(arguments, ("top", "box", "flip_test", "grid"), f"has the task {run.task.name}")
        _values(arguments)
        return
    if arguments.task is not None:
        raise BsamValueError(f"the run in {arguments.folder} has the task {run.task.name}: leave out --task")
    if run_dir.note("pose"):
        _check_unused(arguments, ("top",), "is a pose run")
        _joints(arguments)
    else:
        _check_unused(arguments, ("box", "flip_test"), "is not a pose run")
        if arguments.out is not None and _table(arguments) is None:
            raise BsamValueError(
                f"--out must end in {' or '.join(TABLES)} for a classification run; got {arguments.out}"
            )
        _classes(arguments)


def _values(arguments: argparse.Namespace) -> None:
    """Predict with a task of the user."""
    table = _table(arguments)
    folder = arguments.out if table is None else None
    if folder is not None:
        names = picture_paths([*image_paths(arguments.images)], folder)  # raises now rather than after the last file
    found = predict_task(
        arguments.folder,
        arguments.images,
        arguments.task,
        arguments.device,
        model=arguments.model,
        pictures=folder is not None,
    )
    if table is not None:
        columns = list(dict.fromkeys(name for one in found for name in one.values))
        rows = [[one.path, *(one.values.get(name, "") for name in columns)] for one in found]
        _write_table(table, [{"file": str(one.path), **one.values} for one in found], ["file", *columns], rows)
    if folder is not None:
        from PIL import Image

        folder.mkdir(parents=True, exist_ok=True)
        for name, one in zip(names, found, strict=True):
            Image.fromarray(np.asarray(one.picture)).save(name)
    lines = [
        f"{one.path}  {', '.join(f'{name} {_text(value)}' for name, value in one.values.items())}" for one in found
    ]
    _print(lines, arguments.out)


def _text(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _table(arguments: argparse.Namespace) -> Path | None:
    """Return ``--out`` if it is a file for numbers; None if it is a folder for pictures."""
    out: Path | None = arguments.out
    return out if out is not None and out.suffix.lower() in TABLES else None


def _check_unused(arguments: argparse.Namespace, names: tuple[str, ...], reason: str) -> None:
    for name in names:
        if getattr(arguments, name) is not None:
            flag = f"--{name.replace('_', '-')}"
            raise BsamValueError(f"the run in {arguments.folder} {reason}: leave out {flag}, or choose another run")


def _classes(arguments: argparse.Namespace) -> None:
    top = TOP if arguments.top is None else arguments.top
    predictions = predict(arguments.folder, arguments.images, top, arguments.device, _warn, model=arguments.model)
    if arguments.out is not None:
        write_predictions(predictions, arguments.out)
    if arguments.grid is not None:
        draw_grid(predictions[:MAX_GRID], arguments.grid)
    _print([*prediction_lines(predictions), *_grid_lines(arguments, predictions)], arguments.out, arguments.grid)


def _joints(arguments: argparse.Namespace) -> None:
    table = _table(arguments)
    draws_pictures = arguments.out is not None and table is None
    if draws_pictures:
        picture_paths([*image_paths(arguments.images)], arguments.out)  # raises now rather than after the last image
    poses = find_joints(arguments.folder, arguments.images, arguments.box, arguments.flip_test, arguments.device, _warn)
    pictures = picture_paths([pose.path for pose in poses], arguments.out) if draws_pictures else []
    if table is not None:
        write_joints(poses, table)
    if arguments.grid is not None:
        draw_joints_grid(poses[:MAX_GRID], arguments.grid)
    if pictures:
        with usable(arguments.out, "pictures"):
            arguments.out.mkdir(parents=True, exist_ok=True)
    for pose, path in zip(poses, pictures, strict=False):
        draw_joints(pose, path)
    box_note = [] if arguments.box else ["The whole image was used as the person's box; set --box to change it."]
    _print([*joint_lines(poses), *box_note, *_grid_lines(arguments, poses)], table, arguments.grid, *pictures)


def _grid_lines(arguments: argparse.Namespace, images: Sequence[object]) -> list[str]:
    if arguments.grid is None or len(images) <= MAX_GRID:
        return []
    return [f"{arguments.grid} shows the first {MAX_GRID} of {len(images)} images."]


def _warn(sentence: str) -> None:
    say(f"bsam: {sentence}", to_stderr=True)


def _print(lines: Sequence[str], *written: Path | None) -> None:
    """Print the lines and the paths of the written files. Call it last: the output pipe may be closed."""
    files = [f"Written: {path}" for path in written if path is not None]
    say("\n".join(map(printable, [*lines, *files])))


def prediction_lines(predictions: Sequence[Prediction]) -> list[str]:
    """Return a line for each image: its file and its classes."""
    width = max(len(str(prediction.path)) for prediction in predictions)
    return [f"{prediction.path!s:<{width}}  {', '.join(class_texts(prediction))}" for prediction in predictions]


def write_predictions(predictions: Sequence[Prediction], path: Path) -> None:
    """Write the classes of each image: as JSON, or as CSV with a row per image and two columns per class."""
    entries = [
        {"file": str(image.path), "classes": list(image.classes), "probabilities": list(image.probabilities)}
        for image in predictions
    ]
    numbers = ["", *(f"_{n}" for n in range(2, len(predictions[0].classes) + 1))]
    header = ["file", *(f"{name}{n}" for n in numbers for name in ("class", "probability"))]
    classes = [(image.path, zip(image.classes, image.probabilities, strict=True)) for image in predictions]
    _write_table(path, entries, header, [[file, *(v for pair in pairs for v in pair)] for file, pairs in classes])


def write_joints(poses: Sequence[FoundJoints], path: Path) -> None:
    """Write the joints of each image, in pixels: as JSON with the person's box, or as CSV with a row per joint."""
    entries = [{"file": str(pose.path), "box": list(pose.box), "joints": _positions(pose)} for pose in poses]
    rows = [(pose.path, joint, *xy) for pose in poses for joint, xy in _positions(pose).items()]
    _write_table(path, entries, ("file", "joint", "x", "y"), rows)


def _write_table(path: Path, entries: object, header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    if path.suffix.lower() == ".json":
        write_json(path, entries)
        return
    text = io.StringIO(newline="")
    csv.writer(text).writerows([header, *rows])
    write(path, text.getvalue().encode("utf-8", "surrogateescape"))  # a file name may have bytes that are not UTF-8


def _positions(pose: FoundJoints) -> dict[str, list[float]]:
    """Return x and y of each joint."""
    return dict(zip(pose.skeleton.joints, pose.joints.tolist(), strict=True))


def joint_lines(poses: Sequence[FoundJoints]) -> list[str]:
    """Return lines for each image: its file, then x and y of each joint."""
    width = max(len(joint) for pose in poses for joint in pose.skeleton.joints)
    lines = []
    for pose in poses:
        lines.append(str(pose.path))
        lines += [f"  {joint:<{width}} {x:8.1f} {y:8.1f}" for joint, (x, y) in _positions(pose).items()]
    return lines


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
