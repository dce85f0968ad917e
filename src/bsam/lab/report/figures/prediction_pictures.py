"""Pictures of predictions for image files: classes, and skeletons."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...data.images.decoding import Box, Crop
from ...data.pose.persons import MARGIN
from ...inference.pose_prediction import FoundJoints
from ...inference.prediction import Prediction
from ...training.files import write
from .panels import COLOURS, DPI, MAX_COLUMNS, new_figure, panel_title, printable, save
from .skeleton_figures import draw_skeleton, show_picture, side_legend

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


def draw_grid(predictions: Sequence[Prediction], path: Path) -> None:
    """Draw the images as the network saw them: the most probable class above, the others and the file below."""
    columns = min(len(predictions), MAX_COLUMNS)
    rows = math.ceil(len(predictions) / columns)
    others = max(len(prediction.classes) for prediction in predictions) - 1
    figure = new_figure(SIDE * columns, (SIDE + 0.45 + 0.18 * (others + 1)) * rows)
    for n, prediction in enumerate(predictions):
        ax = figure.add_subplot(rows, columns, n + 1)
        ax.imshow(prediction.pixels)
        ax.set_xticks([])
        ax.set_yticks([])
        first, *rest = class_texts(prediction)
        ax.set_title(printable(panel_title(first)), fontsize=10, color=COLOURS[1], parse_math=False)
        below = "\n".join([*rest, panel_title(prediction.path.name)])
        ax.set_xlabel(printable(below), fontsize=8, parse_math=False)
    save(figure, path)


def draw_joints_grid(poses: Sequence[FoundJoints], path: Path) -> None:
    """Draw the part of each image that the network saw, with its skeleton and file name, into one picture."""
    columns = min(len(poses), MAX_COLUMNS)
    rows = math.ceil(len(poses) / columns)
    figure = new_figure(max(SIDE * columns, LEGEND_WIDTH), (SIDE + 0.3) * rows + 0.3)
    for n, pose in enumerate(poses):
        ax = figure.add_subplot(rows, columns, n + 1)
        show_picture(ax, *_network_input(pose))
        draw_skeleton(ax, pose.joints, pose.skeleton)
        ax.set_xlabel(printable(panel_title(pose.path.name)), fontsize=8, parse_math=False)
    side_legend(figure, 10, loc="outside lower center", ncols=2, frameon=False)
    save(figure, path)


def _network_input(pose: FoundJoints) -> tuple[NDArray[np.uint8], Box]:
    """Return the part of an image around the person's box that the network saw, and its position in the image."""
    pixels = pose.pixels
    height, width, _ = pixels.shape
    left, top, right, bottom = Crop(pose.box, MARGIN, 1).region
    x, y = max(0, math.floor(left + 0.5)), max(0, math.floor(top + 0.5))
    end_x, end_y = min(width, math.ceil(right + 0.5)), min(height, math.ceil(bottom + 0.5))
    step = max(1, max(end_x - x, end_y - y) // SHOWN_SIDE)
    return pixels[y:end_y:step, x:end_x:step].copy(), (x - 0.5, y - 0.5, end_x - 0.5, end_y - 0.5)


def draw_joints(pose: FoundJoints, path: Path) -> None:
    """Draw the skeleton and a legend on the image at full size; the legend of a small image is below it."""
    from PIL import Image

    picture = Image.fromarray(pose.pixels)
    width, height = picture.size
    figure = _transparent_figure(width, height)
    ax = figure.add_axes((0, 0, 1, 1))
    ax.set_axis_off()
    ax.set_xlim(-0.5, width - 0.5)
    ax.set_ylim(height - 0.5, -0.5)
    left, top, right, bottom = pose.box
    thickness = max(1.5, LINE * min(max(right - left, bottom - top), max(width, height)))
    draw_skeleton(ax, pose.joints, pose.skeleton, width=thickness * 72 / DPI)
    small = min(width, height) < SMALL
    if not small:
        side_legend(ax, TEXT * min(width, height) * 72 / DPI, loc="best")
    skeleton = _rasterise(figure)
    picture.paste(skeleton, mask=skeleton)
    if small:
        picture = _with_legend_below(picture)
    content = io.BytesIO()
    picture.save(content, "PNG")
    write(path, content.getvalue())


def _transparent_figure(width: int, height: int) -> Any:
    """Return an empty figure; sizes are in pixels."""
    figure = new_figure((width + 0.01) / DPI, (height + 0.01) / DPI)  # slightly more, as the size is rounded down
    figure.set(dpi=DPI, facecolor="none", layout_engine="none")
    return figure


def _rasterise(figure: Any) -> Any:
    """Return a figure as a PIL image, transparent where nothing is drawn."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from PIL import Image

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return Image.fromarray(np.asarray(canvas.buffer_rgba()))


def _with_legend_below(picture: Any) -> Any:
    """Return a picture with a legend below it, on white."""
    from PIL import Image

    width, height = LEGEND_BELOW
    figure = _transparent_figure(width, height)
    side_legend(figure, MIN_TEXT * 72 / DPI, loc="center", frameon=False)
    legend = _rasterise(figure)
    sheet = Image.new("RGB", (max(picture.width, width), picture.height + height), "white")
    sheet.paste(picture)
    sheet.paste(legend, (0, picture.height), mask=legend)
    return sheet
