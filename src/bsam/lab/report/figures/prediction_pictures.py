"""Pictures of predictions: the classes of images, and skeletons, the joints of a person connected by lines."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ...analysis.experiment_titles import network_and_data
from ...data.images.decoding import Box, Crop
from ...data.pose.joints import Skeleton
from ...data.pose.persons import MARGIN
from ...inference.class_prediction import Prediction
from ...inference.pose_prediction import FoundJoints
from ...recipes.columns import score_of
from ...recipes.experiments import Recipe
from ...recipes.variants import variant_of
from ...tasks.pose_inputs import PoseInputs
from ...training.files import write
from ...training.run_dir import RunDir, RunState
from .panels import COLOURS, DPI, new_figure, panel_title, picture_grid, printable, save

SIDES = {"right": "#e69f00", "left": "#56b4e9"}  # distinguishable by colour-blind readers, visible on dark pictures
MIDDLE, OUTLINE = "#ffffff", "#202020"  # the outline is visible on light pictures
PERSONS = 8  # columns of the recipe's figure
CELL = 1.25  # inches, the side of a picture in it
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
    lines = max(len(prediction.classes) for prediction in predictions)
    figure, axes = picture_grid(len(predictions), SIDE, SIDE + 0.45 + 0.18 * lines)
    for prediction, ax in zip(predictions, axes, strict=True):
        ax.imshow(prediction.pixels)
        first, *rest = class_texts(prediction)
        ax.set_title(printable(panel_title(first)), fontsize=10, color=COLOURS[1], parse_math=False)
        below = "\n".join([*rest, panel_title(prediction.path.name)])
        ax.set_xlabel(printable(below), fontsize=8, parse_math=False)
    save(figure, path)


def draw_joints_grid(poses: Sequence[FoundJoints], path: Path) -> None:
    """Draw the part of each image that the network saw, with its skeleton and file name, into one picture."""
    figure, axes = picture_grid(len(poses), SIDE, SIDE + 0.3, margin=0.3, least=LEGEND_WIDTH)
    for pose, ax in zip(poses, axes, strict=True):
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
    ax.set(xlim=(-0.5, width - 0.5), ylim=(height - 0.5, -0.5))
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


def draw_skeleton(
    ax: Any,
    joints: NDArray[np.floating[Any]],
    skeleton: Skeleton,
    labelled: NDArray[np.bool_] | None = None,
    width: float = 1.5,
) -> None:
    """Draw joints as dots and the lines between them, over the picture in matplotlib axes.

    The person's right side is orange, the left side light blue and the middle white, all with a dark outline. The
    limits of the axes do not change.

    Args:
        ax: the axes; x and y are pixels of its picture.
        joints: (J, 2).
        skeleton: the names of the joints, and which to connect.
        labelled: (J,), the joints to draw; None draws all. Non-finite joints are never drawn.
        width: the width of the lines, in points.
    """
    from matplotlib.collections import LineCollection

    shown = np.isfinite(joints).all(axis=1) & (True if labelled is None else labelled)
    edges = [edge for edge in skeleton.edges if shown[list(edge)].all()]
    lines, colours = [joints[list(edge)] for edge in edges], [side_colour(skeleton, edge) for edge in edges]
    for colour, thickness in ((OUTLINE, 2.2 * width), (colours, width)):  # outlines first, so that none covers a line
        ax.add_collection(
            LineCollection(lines, colors=colour, linewidths=thickness, capstyle="round", snap=False), autolim=False
        )
    dots = np.flatnonzero(shown).tolist()
    ax.scatter(
        *joints[dots].T,
        s=(2.4 * width) ** 2,
        c=[side_colour(skeleton, (dot,)) for dot in dots],
        edgecolors=OUTLINE,
        linewidths=0.5 * width,
        zorder=3,
    )


def side_colour(skeleton: Skeleton, joints: Sequence[int]) -> str:
    """Return the colour of the side of the body that these joints belong to; middle joints belong to any side."""
    sides = {skeleton.joints[joint].partition(" ")[0] for joint in joints} & SIDES.keys()
    return SIDES[sides.pop()] if len(sides) == 1 else MIDDLE


def side_legend(figure: Any, size: float, **options: Any) -> None:
    """Draw a legend of the colours of the sides into a figure or axes, with letters of ``size`` points."""
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color=colour, linewidth=0.3 * size, label=f"person's {side}") for side, colour in SIDES.items()
    ]
    figure.legend(handles=handles, fontsize=size, **options)


def show_picture(ax: Any, pixels: NDArray[np.uint8], region: Box | None = None) -> None:
    """Show a picture without ticks, and fix the limits of the axes to it.

    Args:
        ax: matplotlib axes.
        pixels: (height, width, 3).
        region: left, top, right and bottom in the coordinates of the axes; None takes the pixels.
    """
    left, top, right, bottom = region or (-0.5, -0.5, pixels.shape[1] - 0.5, pixels.shape[0] - 0.5)
    ax.imshow(pixels, extent=(left, right, bottom, top))
    ax.set(xticks=[], yticks=[])
    ax.autoscale(False)


Row: TypeAlias = tuple[str, Skeleton, dict[str, NDArray[Any]]]  # title, skeleton, the predictions of the run


def skeletons_info(states: Sequence[RunState]) -> dict[str, list[Row]]:
    """Return the predictions of finished runs of the first seed, by network and data set, if they were saved."""
    groups: dict[str, list[Row]] = {}
    for state in states:
        run = state.run
        if state.finished and run.seed == states[0].run.seed and (arrays := RunDir(state.path).predictions()):
            skeleton = PoseInputs.from_json(RunDir(state.path).note("pose")).skeleton
            title = f"{variant_of(run).title}\nPCK {score_of(state):.1f} %"
            groups.setdefault(f"{network_and_data(run)}, seed {run.seed}", []).append((title, skeleton, arrays))
    return groups


def draw_skeletons(recipe: Recipe, states: Sequence[RunState], path: Path) -> None:
    """Draw a column per person: the labels, and below them the joints that each method found.

    Does nothing if there are no predictions.
    """
    groups = skeletons_info(states)
    if not groups:
        return
    heights = [CELL * (len(group) + 1) + 0.3 for group in groups.values()]
    columns = min(PERSONS, max(len(arrays["pixels"]) for group in groups.values() for _, _, arrays in group))
    figure = new_figure(CELL * columns + 1.6, sum(heights) + 0.3)
    parts = figure.subfigures(len(groups), 1, height_ratios=heights, squeeze=False)[:, 0]
    for part, (where, group) in zip(parts, groups.items(), strict=True):
        axes = part.subplots(len(group) + 1, columns, squeeze=False)
        part.suptitle(recipe.titled(where), fontsize=11)
        _draw_rows(axes, group)
    side_legend(parts[-1], 10, loc="outside lower center", ncols=2, frameon=False)
    save(figure, path)


def _draw_rows(axes: NDArray[Any], group: Sequence[Row]) -> None:
    """Draw the labels into the first row of axes, and the joints that each run found into the others."""
    for row, (title, skeleton, arrays) in zip(axes, [("label", *group[0][1:]), *group], strict=True):
        is_label = title == "label"
        for person, ax in enumerate(row):
            if person >= len(arrays["pixels"]):
                ax.set_visible(False)
                continue
            show_picture(ax, arrays["pixels"][person])
            joints = arrays["truth" if is_label else "found"][person]
            draw_skeleton(ax, joints[:, :2], skeleton, joints[:, 2] > 0 if is_label else None)
        row[0].set_ylabel(title, rotation=0, ha="right", va="center", fontsize=9)
