"""Drawn figures with known joints, for tests of pose estimation that need no files."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray

from ...common.checks import check_count
from .downloads import sha256
from .persons import LSP, Persons, PoseData, joint_boxes, person_crops
from .pose_augment import apply, inverse

_FIGURE_STREAM = 0x571C  # makes these random numbers independent of others that are drawn from a seed
_RIGHT = (2, 1, 0, 6, 7, 8)  # hip, knee, ankle, wrist, elbow, shoulder of LSP
_LEFT = (3, 4, 5, 11, 10, 9)
_HEAD = 13
SIDE_COLOURS = {"right": (220, 60, 40), "left": (50, 90, 230)}
GREY = (190, 190, 190)


def stick_figures(n: int, seed: int = 0, side: int = 64) -> PoseData:
    """Draw ``n`` figures to train on and ``n // 4`` to test on, with the joints of LSP.

    Pose, position, line width, colours and background vary. The figures face the viewer: their right arm and leg, which
    start on the left of the image, are red, the left ones blue. (Mirroring an image exchanges its left and right joints
    but not their colours, so with mirrored images, colours no longer tell left from right.)

    Args:
        n: number of training figures.
        seed: seed of the random numbers.
        side: side of the network's inputs, in pixels; crops of ``stored_side(side)`` pixels are drawn.

    Example:
        >>> data = stick_figures(8)
        >>> data.train.x.shape, data.test.y.shape
        (torch.Size([8, 3, 88, 88]), torch.Size([2, 14, 3]))
    """
    check_count("n", n, 4)
    total = n + n // 4
    random = np.random.default_rng((seed, _FIGURE_STREAM))
    joints = np.stack([_pose(random) for _ in range(total)])
    boxes = joint_boxes(joints, margin=0.05)
    extent = (boxes[:, 2:] - boxes[:, :2]).max(axis=1, keepdims=True)
    boxes += np.tile(extent * random.uniform(-0.05, 0.05, (total, 2)), 2)
    crops, maps = person_crops(torch.from_numpy(boxes), side)
    y = torch.from_numpy(joints)
    y[:, :, :2] = apply(maps, y[:, :, :2])
    drawings = np.stack([_drawing(places[:, :2], crops[0].size, random) for places in y.numpy()])
    x = torch.from_numpy(drawings).permute(0, 3, 1, 2)
    digest = sha256(x.numpy().tobytes() + y.numpy().tobytes())
    persons = Persons(x, y.float(), inverse(maps))
    train = persons.part(slice(n))
    test = persons.part(slice(n, total))
    return PoseData("stick_figures", side, train, test, LSP, f"{n} and {n // 4} drawings, seed {seed}", digest)


def _pose(random: np.random.Generator) -> NDArray[np.float64]:
    """Return the joints (14, 3) of a figure, in pixels of an imaginary image; all of them are labelled."""

    def step(angle: float, length: float) -> NDArray[np.float64]:  # 0: down; above 0: to the right of the image
        return length * np.array([math.sin(angle), math.cos(angle)])

    lean = random.normal(0, 0.25)
    joints = np.zeros((14, 3))
    joints[:, 2] = 1
    joints[_HEAD, :2] = step(math.pi + lean + random.normal(0, 0.2), 0.35)
    for sign, (hip, knee, ankle, wrist, elbow, shoulder) in ((-1, _RIGHT), (1, _LEFT)):
        outwards = sign * step(lean + math.pi / 2, 1)
        joints[shoulder, :2] = 0.22 * outwards + step(lean, 0.08)
        joints[hip, :2] = 0.14 * outwards + step(lean, 0.75)
        arm = lean + sign * random.uniform(0.1, 2.6)
        leg = lean + sign * random.uniform(0, 0.8)
        joints[elbow, :2] = joints[shoulder, :2] + step(arm, 0.38)
        joints[wrist, :2] = joints[elbow, :2] + step(arm + sign * random.uniform(-0.3, 1.2), 0.34)
        joints[knee, :2] = joints[hip, :2] + step(leg, 0.48)
        joints[ankle, :2] = joints[knee, :2] + step(leg - sign * random.uniform(0, 0.9), 0.46)
    joints[:, :2] = random.uniform(40, 160) * joints[:, :2] + random.uniform(50, 250, 2)
    return joints


def _drawing(places: NDArray[np.float64], size: int, random: np.random.Generator) -> NDArray[np.uint8]:
    """Return the image (size, size, 3) of a figure."""
    rows, columns = np.mgrid[:size, :size].astype(np.float32)
    image = random.uniform(0, 90, 3).astype(np.float32) + random.normal(0, 12, (size, size, 3)).astype(np.float32)
    width = size * random.uniform(0.02, 0.035)
    for start, end in LSP.edges:
        sides = {LSP.joints[joint].partition(" ")[0] for joint in (start, end)}
        colour = SIDE_COLOURS.get(sides.pop(), GREY) if len(sides) == 1 else GREY
        shade = np.clip(np.array(colour) + random.normal(0, 15, 3), 0, 255).astype(np.float32)
        (x, y) = places[start]
        (dx, dy) = places[end] - places[start]
        low = np.floor(np.minimum(places[start], places[end]) - width).astype(int).clip(0)
        high = np.ceil(np.maximum(places[start], places[end]) + width).astype(int)
        near = slice(low[1], high[1]), slice(low[0], high[0])  # the rest of the image has no ink
        right = columns[near] - x
        down = rows[near] - y
        along = np.clip((right * dx + down * dy) / (dx * dx + dy * dy), 0, 1)
        ink = np.clip(width / 2 + 0.5 - np.hypot(right - along * dx, down - along * dy), 0, 1)[:, :, None]
        image[near] += ink * (shade - image[near])
    return np.clip(image, 0, 255).astype(np.uint8)
