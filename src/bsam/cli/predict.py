"""``bsam predict``: the classes of image files, or the joints of the persons in them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..core.errors import BsamValueError
from ..core.extras import require_package

PICTURES = (".png", ".jpg", ".jpeg", ".pdf", ".svg")
TABLES = (".csv", ".json")
TOP = 3


def add(commands: Any) -> None:
    """Add the command."""
    command = commands.add_parser(
        "predict",
        help="classes of images, or joints of the persons in them, by the network of a run",
        description="Print the most probable classes of each image; or, by a run of the task pose, x and y of each "
        "joint of the person in the image, in pixels. The data that the network was trained on is not needed.",
    )
    flag = command.add_argument
    flag("folder", type=Path, help="the directory of a finished run on image files or persons", metavar="RUN_DIR")
    flag("images", nargs="+", type=Path, help="files, or folders with image files", metavar="IMAGE|FOLDER")
    flag("--grid", type=Path, help=f"draw all images with what was found ({', '.join(PICTURES)})", metavar="FILE")
    out = (
        "write what was found to a file: predictions.csv or predictions.json. By a run of pose, any other name is a "
        "folder: draw the skeleton on each image, the person's right side orange and the left one light blue, to a PNG "
        "file of its name and its size there; a file that exists there is not overwritten, but an error"
    )
    flag("--out", type=Path, help=out, metavar="FILE|FOLDER")
    device = "cpu, cuda, cuda:1 ...; auto takes a GPU if there is one (default: auto)"
    flag("--device", default="auto", help=device, metavar="NAME")
    classes = command.add_argument_group("classes").add_argument
    classes("--top", type=int, help=f"how many classes (default: {TOP})", metavar="N")
    joints = command.add_argument_group("joints").add_argument
    joints(
        "--box",
        nargs=4,
        type=float,
        help="where the person is in the image, in pixels, if there is one image; the centre of the first pixel is "
        "(0, 0). Without it the whole image counts as the person's box",
        metavar=("LEFT", "TOP", "RIGHT", "BOTTOM"),
    )
    joints(
        "--flip-test",
        action=argparse.BooleanOptionalAction,
        help="take the mean of the probabilities of an image and of its mirror image, or do not; without it as the "
        "run was evaluated",
    )
    command.set_defaults(run=_predict, needs={"PIL": "images", "safetensors": "train"})


def _predict(arguments: argparse.Namespace) -> None:
    from ..training.files import check_writable, usable
    from ..training.run_dir import RunDir

    if arguments.grid is not None:
        require_package("matplotlib", "plot")
        if arguments.grid.suffix.lower() not in PICTURES:
            raise BsamValueError(f"--grid must end in one of {', '.join(PICTURES)}; got {arguments.grid}")
    for flag, file in (("--grid", arguments.grid), ("--out", _table(arguments))):
        if file is not None:
            if not file.parent.is_dir():
                raise BsamValueError(f"there is no folder {file.parent} for {flag}: create it first")
            with usable(file.parent, flag):
                check_writable(file.parent)
    run_dir = RunDir(arguments.folder)
    run_dir.finished_run()
    if run_dir.note("pose"):
        _refuse(arguments, ("top",), "finds joints")
        _joints(arguments)
    else:
        _refuse(arguments, ("box", "flip_test"), "does not find joints")
        if arguments.out is not None and _table(arguments) is None:
            raise BsamValueError(f"--out must end in {' or '.join(TABLES)} for classes; got {arguments.out}")
        _classes(arguments)


def _table(arguments: argparse.Namespace) -> Path | None:
    """Return the file of numbers that ``--out`` names; None if it names a folder of pictures."""
    out: Path | None = arguments.out
    return out if out is not None and out.suffix.lower() in TABLES else None


def _refuse(arguments: argparse.Namespace, names: tuple[str, ...], why: str) -> None:
    for name in names:
        if getattr(arguments, name) is not None:
            flag = f"--{name.replace('_', '-')}"
            raise BsamValueError(f"the run in {arguments.folder} {why}: leave {flag} out, or give another run")


def _classes(arguments: argparse.Namespace) -> None:
    from ..report.predictions import draw_grid, prediction_lines, write_predictions
    from ..training.prediction import predict

    top = TOP if arguments.top is None else arguments.top
    predictions = predict(arguments.folder, arguments.images, top, arguments.device)
    if arguments.grid is not None:
        draw_grid(predictions, arguments.grid)
    if arguments.out is not None:
        write_predictions(predictions, arguments.out)
    _print(prediction_lines(predictions), arguments.grid, arguments.out)


def _joints(arguments: argparse.Namespace) -> None:
    from ..report.predictions import draw_joints, draw_joints_grid, joint_lines, picture_paths, write_joints
    from ..training.files import usable
    from ..training.pose_prediction import find_joints
    from ..training.prediction import image_paths

    pictures: list[Path] = []
    images, table = image_paths(arguments.images), _table(arguments)
    if arguments.out is not None and table is None:
        require_package("matplotlib", "plot")
        pictures = picture_paths(images, arguments.out)
    found = find_joints(arguments.folder, images, arguments.box, arguments.flip_test, arguments.device)
    if arguments.grid is not None:
        draw_joints_grid(found, arguments.grid)
    if table is not None:
        write_joints(found, table)
    if pictures:
        with usable(arguments.out, "pictures"):
            arguments.out.mkdir(parents=True, exist_ok=True)
    for each, path in zip(found, pictures, strict=False):
        draw_joints(each, path)
    whole = [] if arguments.box else ["The whole image was taken as the person's box; --box names another."]
    _print([*joint_lines(found), *whole], arguments.grid, table, *pictures)


def _print(lines: Sequence[str], *written: Path | None) -> None:
    """Print the lines, and the files that are written before: if the output is closed, nothing is lost."""
    print("\n".join([*lines, *(f"Written: {path}" for path in written if path is not None)]))
