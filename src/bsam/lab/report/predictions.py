"""Predictions for image files as text, as CSV or JSON, and as pictures."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...common.errors import BsamValueError
from ..data.images.decoding import Box, Crop
from ..data.pose.persons import MARGIN
from ..inference.class_prediction import Prediction
from ..inference.pose_prediction import FoundJoints
from ..training.files import usable, write, write_json
from .panels import COLOURS, DPI, MAX_COLUMNS, figure, panel_title, printable, save
from .skeletons import draw_skeleton, show_picture, side_legend

SIDE = 2.6  # inches, the side of a picture
LEGEND_WIDTH = 3.2  # inches, with letters of 10 points
SHOWN_SIDE = 800  # pixels; in a grid, larger pictures are subsampled to less than twice this, to save memory
LINE = 0.008  # width of a skeleton's lines, relative to the longer side of the person's box
TEXT = 0.03  # height of the letters on a picture, relative to its shorter side
MIN_TEXT = 7  # pixels; smaller letters are not readable
SMALL = 400  # pixels of the shorter side; smaller pictures have the legend below, so that it does not hide the person
LEGEND_BELOW = 120, 30  # pixels, width and height


def class_texts(prediction: Prediction) -> list[str]:
    """Return the classes with their probabilities."""
    return [f"{name} {p:.1%}" for name, p in zip(prediction.classes, prediction.probabilities, strict=True)]


def prediction_lines(predictions: Sequence[Prediction]) -> list[str]:
    """Return a line for each image: its file and its classes."""
    width = max(len(str(prediction.path)) for prediction in predictions)
    return [f"{prediction.path!s:<{width}}  {', '.join(class_texts(prediction))}" for prediction in predictions]


def write_predictions(predictions: Sequence[Prediction], path: Path) -> None:
    """Write the classes of each image: as JSON, or as CSV with a row per image and two columns per class."""
    if path.suffix.lower() == ".json":
        rows = [
            {"file": str(image.path), "classes": list(image.classes), "probabilities": list(image.probabilities)}
            for image in predictions
        ]
        write_json(path, rows)
        return
    count = len(predictions[0].classes)
    numbers = ["", *(f"_{n}" for n in range(2, count + 1))]
    header = ["file", *(f"{name}{n}" for n in numbers for name in ("class", "probability"))]
    classes = [(image.path, zip(image.classes, image.probabilities, strict=True)) for image in predictions]
    _write_csv(path, header, ([file, *(value for pair in pairs for value in pair)] for file, pairs in classes))


def write_joints(poses: Sequence[FoundJoints], path: Path) -> None:
    """Write the joints of each image, in pixels: as JSON with the person's box, or as CSV with a row per joint."""
    if path.suffix.lower() == ".json":
        rows = [
            {
                "file": str(pose.path),
                "box": list(pose.box),
                "joints": dict(zip(pose.skeleton.joints, pose.joints.tolist(), strict=True)),
            }
            for pose in poses
        ]
        write_json(path, rows)
        return
    positions = ((pose.path, zip(pose.skeleton.joints, pose.joints.tolist(), strict=True)) for pose in poses)
    _write_csv(
        path, ("file", "joint", "x", "y"), ((file, joint, *xy) for file, pairs in positions for joint, xy in pairs)
    )


def _write_csv(path: Path, header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    text = io.StringIO(newline="")
    csv.writer(text).writerows([header, *rows])
    write(path, text.getvalue().encode("utf-8", "surrogateescape"))  # a file name may have bytes that are not UTF-8


def draw_grid(predictions: Sequence[Prediction], path: Path) -> None:
    """Draw the images as the network saw them: the most probable class above, the others and the file below."""
    columns = min(len(predictions), MAX_COLUMNS)
    rows = math.ceil(len(predictions) / columns)
    others = max(len(prediction.classes) for prediction in predictions) - 1
    drawn = figure(SIDE * columns, (SIDE + 0.45 + 0.18 * (others + 1)) * rows)
    for n, prediction in enumerate(predictions):
        ax = drawn.add_subplot(rows, columns, n + 1)
        ax.imshow(prediction.pixels)
        ax.set_xticks([])
        ax.set_yticks([])
        first, *rest = class_texts(prediction)
        ax.set_title(printable(panel_title(first)), fontsize=10, color=COLOURS[1], parse_math=False)
        below = "\n".join([*rest, panel_title(prediction.path.name)])
        ax.set_xlabel(printable(below), fontsize=8, parse_math=False)
    save(drawn, path)


def joint_lines(poses: Sequence[FoundJoints]) -> list[str]:
    """Return lines for each image: its file, then x and y of each joint."""
    width = max(len(joint) for pose in poses for joint in pose.skeleton.joints)
    lines = []
    for pose in poses:
        positions = zip(pose.skeleton.joints, pose.joints.tolist(), strict=True)
        lines += [str(pose.path), *(f"  {joint:<{width}} {x:8.1f} {y:8.1f}" for joint, (x, y) in positions)]
    return lines


def draw_joints_grid(poses: Sequence[FoundJoints], path: Path) -> None:
    """Draw the part of each image that the network saw, with its skeleton and file name, into one picture."""
    columns = min(len(poses), MAX_COLUMNS)
    rows = math.ceil(len(poses) / columns)
    drawn = figure(max(SIDE * columns, LEGEND_WIDTH), (SIDE + 0.3) * rows + 0.3)
    for n, pose in enumerate(poses):
        ax, (pixels, region) = drawn.add_subplot(rows, columns, n + 1), _seen(pose)
        show_picture(ax, pixels, region)
        draw_skeleton(ax, pose.joints, pose.skeleton)
        ax.set_xlabel(printable(panel_title(pose.path.name)), fontsize=8, parse_math=False)
    side_legend(drawn, 10, loc="outside lower center", ncols=2, frameon=False)
    save(drawn, path)


def _seen(pose: FoundJoints) -> tuple[NDArray[np.uint8], Box]:
    """Return the part of an image around the person's box that the network saw, and its position in the image."""
    pixels = pose.pixels
    height, width, _ = pixels.shape
    left, top, right, bottom = Crop(pose.box, MARGIN, 1).region
    x, y = max(0, math.floor(left + 0.5)), max(0, math.floor(top + 0.5))
    end_x, end_y = min(width, math.ceil(right + 0.5)), min(height, math.ceil(bottom + 0.5))
    step = max(1, max(end_x - x, end_y - y) // SHOWN_SIDE)
    return pixels[y:end_y:step, x:end_x:step].copy(), (x - 0.5, y - 0.5, end_x - 0.5, end_y - 0.5)


def picture_paths(images: Sequence[Path], folder: Path) -> list[Path]:
    """Return a path in the folder for each image: its name with ``.png``, numbered if names are equal.

    Raise if a file exists already: it may be one of the images.
    """
    paths: list[Path] = []
    for image in images:
        path, n = folder / f"{image.stem}.png", 1
        while path in paths:
            n += 1
            path = folder / f"{image.stem}-{n}.png"
        paths.append(path)
    with usable(folder, "pictures"):
        if folder.exists() and not folder.is_dir():
            raise BsamValueError(f"{folder} is not a folder: choose another one")
        for path in paths:
            if path.exists():
                raise BsamValueError(f"{path} already exists: remove it, or choose another folder")
    return paths


def draw_joints(pose: FoundJoints, path: Path) -> None:
    """Draw the skeleton and a legend on the image at full size; the legend of a small image is below it."""
    from PIL import Image

    picture = Image.fromarray(pose.pixels)
    width, height = picture.size
    drawn = figure((width + 0.01) / DPI, (height + 0.01) / DPI)  # slightly more, as the size in pixels is rounded down
    drawn.set(dpi=DPI, facecolor="none", layout_engine="none")
    ax = drawn.add_axes((0, 0, 1, 1))
    ax.set_axis_off()
    ax.set_xlim(-0.5, width - 0.5)
    ax.set_ylim(height - 0.5, -0.5)
    left, top, right, bottom = pose.box
    thickness = max(1.5, LINE * min(max(right - left, bottom - top), max(width, height)))
    draw_skeleton(ax, pose.joints, pose.skeleton, width=thickness * 72 / DPI)
    small = min(width, height) < SMALL
    if not small:
        side_legend(ax, TEXT * min(width, height) * 72 / DPI, loc="best")
    skeleton = _rasterised(drawn)
    picture.paste(skeleton, mask=skeleton)
    if small:
        picture = _with_legend_below(picture)
    content = io.BytesIO()
    picture.save(content, "PNG")
    write(path, content.getvalue())


def _rasterised(drawn: Any) -> Any:
    """Return a figure as a PIL image, transparent where nothing is drawn."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from PIL import Image

    canvas = FigureCanvasAgg(drawn)
    canvas.draw()
    return Image.fromarray(np.asarray(canvas.buffer_rgba()))


def _with_legend_below(picture: Any) -> Any:
    """Return a picture with a legend below it, on white."""
    from PIL import Image

    width, height = LEGEND_BELOW
    drawn = figure((width + 0.01) / DPI, (height + 0.01) / DPI)
    drawn.set(dpi=DPI, facecolor="none", layout_engine="none")
    side_legend(drawn, MIN_TEXT * 72 / DPI, loc="center", frameon=False)
    legend = _rasterised(drawn)
    sheet = Image.new("RGB", (max(picture.width, width), picture.height + height), "white")
    sheet.paste(picture)
    sheet.paste(legend, (0, picture.height), mask=legend)
    return sheet
