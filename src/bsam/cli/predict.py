"""``bsam predict``: the classes of image files, or the joints of the persons in them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..core.errors import BsamValueError
from ..core.extras import require_package

PICTURES = (".png", ".jpg", ".jpeg", ".pdf", ".svg")
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
    flag("images", nargs="+", type=Path, help="the files", metavar="IMAGE")
    flag("--grid", type=Path, help=f"draw all images with what was found ({', '.join(PICTURES)})", metavar="FILE")
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
    joints(
        "--out",
        type=Path,
        help="draw the skeleton on each image, the person's right side orange and the left one light blue, to a PNG "
        "file of its name in this folder, of small images with a legend below; a file that exists is not overwritten, "
        "but an error",
        metavar="FOLDER",
    )
    command.set_defaults(run=_predict, needs={"PIL": "images", "safetensors": "train"})


def _predict(arguments: argparse.Namespace) -> None:
    from ..training.files import check_writable, usable
    from ..training.run_dir import RunDir

    if arguments.grid is not None:
        require_package("matplotlib", "plot")
        if arguments.grid.suffix.lower() not in PICTURES:
            raise BsamValueError(f"--grid must end in one of {', '.join(PICTURES)}; got {arguments.grid}")
        if not arguments.grid.parent.is_dir():
            raise BsamValueError(f"there is no folder {arguments.grid.parent} for --grid: create it first")
        with usable(arguments.grid.parent, "--grid"):
            check_writable(arguments.grid.parent)
    run_dir = RunDir(arguments.folder)
    run_dir.finished_run()
    if run_dir.note("pose"):
        _refuse(arguments, ("top",), "finds joints")
        _joints(arguments)
    else:
        _refuse(arguments, ("box", "flip_test", "out"), "does not find joints")
        _classes(arguments)


def _refuse(arguments: argparse.Namespace, names: tuple[str, ...], why: str) -> None:
    for name in names:
        if getattr(arguments, name) is not None:
            flag = f"--{name.replace('_', '-')}"
            raise BsamValueError(f"the run in {arguments.folder} {why}: leave {flag} out, or give another run")


def _classes(arguments: argparse.Namespace) -> None:
    from ..report.predictions import draw_grid, prediction_lines
    from ..training.prediction import predict

    top = TOP if arguments.top is None else arguments.top
    predictions = predict(arguments.folder, arguments.images, top, arguments.device)
    if arguments.grid is not None:
        draw_grid(predictions, arguments.grid)
    _print(prediction_lines(predictions), arguments.grid)


def _joints(arguments: argparse.Namespace) -> None:
    from ..report.predictions import draw_joints, draw_joints_grid, joint_lines, picture_paths
    from ..training.files import usable
    from ..training.pose_prediction import find_joints

    pictures: list[Path] = []
    if arguments.out is not None:
        require_package("matplotlib", "plot")
        pictures = picture_paths(arguments.images, arguments.out)
    found = find_joints(arguments.folder, arguments.images, arguments.box, arguments.flip_test, arguments.device)
    if arguments.grid is not None:
        draw_joints_grid(found, arguments.grid)
    if pictures:
        with usable(arguments.out, "pictures"):
            arguments.out.mkdir(parents=True, exist_ok=True)
    for each, path in zip(found, pictures, strict=False):
        draw_joints(each, path)
    whole = [] if arguments.box else ["The whole image was taken as the person's box; --box names another."]
    _print([*joint_lines(found), *whole], arguments.grid, *pictures)


def _print(lines: Sequence[str], *written: Path | None) -> None:
    """Print the lines, and the files that are written before: if the output is closed, nothing is lost."""
    print("\n".join([*lines, *(f"Written: {path}" for path in written if path is not None)]))
