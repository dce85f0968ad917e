"""Skeletons, the joints of a person connected by lines, and the figure that compares those of several methods."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ...data.images.decoding import Box
from ...data.pose.joints import Skeleton
from ...recipes.experiments import Recipe
from ...recipes.states import score_of
from ...recipes.variants import variant_of
from ...tasks.pose_inputs import PoseInputs
from ...training.run_dir import RunDir, RunState
from ..experiment_titles import network_and_data
from .panels import new_figure, save

SIDES = {"right": "#e69f00", "left": "#56b4e9"}  # distinguishable by colour-blind readers, visible on dark pictures
MIDDLE, OUTLINE = "#ffffff", "#202020"  # the outline is visible on light pictures
PERSONS = 8  # columns of the recipe's figure
CELL = 1.25  # inches, the side of a picture in it


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
    ax.set_xticks([])
    ax.set_yticks([])
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
