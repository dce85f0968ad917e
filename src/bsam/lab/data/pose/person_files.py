"""Persons in image files with the positions of their joints, before any image is decoded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ....common.errors import BsamValueError
from ..images.published import check_files, read_mat, required
from .joints import LSP, MPII, Skeleton

SPLIT_SEED = 0
LSPET_MARGIN = 0.05  # of the longer side: hands and feet reach beyond the joints
HEAD = 0.6  # head size of PCKh, relative to the diagonal of the head's rectangle, as in MPII's evaluation

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class PersonFiles:
    """Persons in image files, which :func:`bsam.lab.data.pose.persons.load_persons` cuts out.

    Coordinates are pixels of the upright image, and the centre of its first pixel is (0, 0).

    Args:
        name: name of the data set.
        folder: all image names are relative to it.
        images: file names, one for each of n persons, with ``/`` as the separator; several persons may share an image.
        boxes: (n, 4): left, top, right and bottom of each person.
        joints: (n, J, 3): x, y and 1 if the joint is labelled, else 0. The coordinates of joints that are not labelled
            are ignored.
        head_sizes: (n,), the unit of distance for PCKh; None if not known.
        skeleton: names of the joints.
        train, test: indices of the persons to train on and to test on.
        split: description of where the split comes from, for result tables.
        left_out: a sentence for each person who is left out, with the reason, such as no labelled joint.
    """

    name: str
    folder: Path
    images: tuple[str, ...]
    boxes: Floats
    joints: Floats
    head_sizes: Floats | None
    skeleton: Skeleton
    train: NDArray[np.int64]
    test: NDArray[np.int64]
    split: str
    left_out: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not len(self.train) or not len(self.test):
            why = f" ({len(self.left_out)} are left out: {self.left_out[0]})" if self.left_out else ""
            raise BsamValueError(
                f"{self.folder} has {len(self.train)} persons to train on and {len(self.test)} to test on{why}: at "
                "least one of each is needed"
            )

    def __len__(self) -> int:
        return len(self.images)


def read_lspet(folder: str | Path) -> PersonFiles:
    """List the persons of LSP Extended (Johnson and Everingham, 2011): one in each of 10,000 images, 14 joints.

    The data set has no test set: here, a tenth of the images, drawn with a fixed seed, is the test set. The file's
    third column, "visible", says whether a joint is labelled: wherever it is 0, neither coordinate is positive. A box
    encloses the labelled joints, plus 5 % of its longer side on each of its four sides; the boxes of the test set, too,
    come from the labels. Images without labelled joints, or with all of them in one place, are left out.

    Args:
        folder: holds ``joints.mat`` and ``images/im00001.jpg`` and so on.
    """
    folder = Path(folder)
    joints = np.asarray(read_mat(required(folder, "joints.mat"), "joints"), np.float64).transpose(2, 0, 1)
    names = [f"images/im{number:05d}.jpg" for number in range(1, len(joints) + 1)]
    check_files(folder, names)
    rows, left_out = [], []
    for person, name in enumerate(names):
        labelled = joints[person, joints[person, :, 2] > 0, :2]
        if not len(labelled):
            left_out.append(f"{name} has no labelled joint")
        elif np.ptp(labelled, axis=0).max() < 1:
            left_out.append(f"{name} has all its labelled joints in one place")
        else:
            rows.append(person)
    images = tuple(names[person] for person in rows)
    boxes = joint_boxes(joints[rows], LSPET_MARGIN)
    train, test, split = _split_by_image(images)
    return PersonFiles("lspet", folder, images, boxes, joints[rows], None, LSP, train, test, split, tuple(left_out))


def read_mpii(folder: str | Path) -> PersonFiles:
    """List the persons of MPII Human Pose (Andriluka et al., 2014), in its authors' layout: 16 joints.

    The labels of the official test set are not published: here, a tenth of the official training images, drawn with a
    fixed seed, is the test set; all persons of an image are in the same set. A box is the square of ``200 * scale``
    pixels whose centre lies ``15 * scale`` pixels below the annotated centre, as is usual, since the annotated centre
    is nearer to the head than to the feet. Coordinates count from 0, not from 1. A joint that is hidden but labelled
    counts as labelled, as in the official evaluation. A head size is 0.6 times the diagonal of the head's rectangle.

    Args:
        folder: holds ``mpii_human_pose_v1_u12_1.mat`` and ``images/``.
    """
    folder = Path(folder)
    path = required(folder, "mpii_human_pose_v1_u12_1.mat")
    release = read_mat(path, "RELEASE", struct_as_record=False)
    images: list[str] = []
    boxes: list[tuple[float, ...]] = []
    joints: list[Floats] = []
    head_sizes: list[float] = []
    left_out: list[str] = []
    for image, train in zip(_items(release.annolist), np.ravel(release.img_train), strict=True):
        for person in _items(image.annorect) if train else ():
            points = [point for holder in _items(person, "annopoints") for point in _items(holder, "point")]
            centre, scale = _items(person, "objpos"), _items(person, "scale")
            rectangle = [side for name in ("x1", "y1", "x2", "y2") for side in _items(person, name)]
            parts = {"joint": points, "centre": centre, "scale": scale, "head": len(rectangle) == 4}
            if lacking := [part for part, content in parts.items() if not content]:
                left_out.append(f"images/{image.image.name} has a person with no labelled {', '.join(lacking)}")
                continue
            table = np.zeros((len(MPII.joints), 3))
            for point in points:
                table[int(point.id)] = float(point.x) - 1, float(point.y) - 1, 1
            half = 100 * float(scale[0])
            x = float(centre[0].x) - 1
            y = float(centre[0].y) - 1 + 0.15 * half
            images.append(f"images/{image.image.name}")
            boxes.append((x - half, y - half, x + half, y + half))
            joints.append(table)
            left, top, right, bottom = map(float, rectangle)
            head_sizes.append(HEAD * math.hypot(right - left, bottom - top))
    check_files(folder, images)
    train, test, split = _split_by_image(images)
    areas = np.array(boxes).reshape(-1, 4)
    tables = np.array(joints).reshape(-1, len(MPII.joints), 3)
    sizes = np.array(head_sizes)
    return PersonFiles("mpii", folder, tuple(images), areas, tables, sizes, MPII, train, test, split, tuple(left_out))


def joint_boxes(joints: Floats, margin: float) -> Floats:
    """Return the boxes (n, 4) of the labelled joints, with a border of ``margin`` times the longer side all around.

    Example:
        >>> joint_boxes(
        ...     np.array([[[10.0, 20.0, 1.0], [30.0, 60.0, 1.0], [0.0, 0.0, 0.0]]]),
        ...     margin=0.25,
        ... )
        array([[ 0., 10., 40., 70.]])
    """
    positions, labelled = joints[:, :, :2], joints[:, :, 2:] > 0
    low = np.where(labelled, positions, np.inf).min(axis=1)
    high = np.where(labelled, positions, -np.inf).max(axis=1)
    extra = margin * (high - low).max(axis=1, keepdims=True)
    return np.concatenate([low - extra, high + extra], axis=1)


def _items(holder: Any, field: str | None = None) -> list[Any]:
    """Return the structures in a field of a MATLAB file; the field may be missing, empty, a structure or an array."""
    value = holder if field is None else getattr(holder, field, ())
    return list(np.atleast_1d(np.asarray(value, dtype=object)).ravel()) if np.size(value) else []


def _split_by_image(images: Sequence[str]) -> tuple[NDArray[np.int64], NDArray[np.int64], str]:
    """Return the indices of the persons in nine tenths of the images, and of those in the rest."""
    names = sorted(set(images))
    chosen = np.random.default_rng(SPLIT_SEED).permutation(len(names))[: max(1, len(names) // 10)]
    tested = {names[index] for index in chosen}
    is_test = np.array([name in tested for name in images], dtype=bool)
    return np.flatnonzero(~is_test), np.flatnonzero(is_test), f"90/10 of the images, seed {SPLIT_SEED}"
