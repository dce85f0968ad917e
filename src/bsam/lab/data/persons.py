"""Persons: the joints that data sets label, the files they publish, and persons cut out of their images."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...common.checks import check_count
from ...common.errors import BsamValueError
from .arrays import as_indices
from .downloads import sha256
from .folders import check_files, read_mat, required
from .images import Box, BoxError, Crop, Progress, decode_bytes, decode_files, read_image, rounded
from .pose_augment import apply, crop_map, inverse


@dataclass(frozen=True)
class Skeleton:
    """The joints of a data set.

    Args:
        joints: names of the joints.
        pairs: indices of left and right joints, which a mirrored image exchanges.
        edges: indices of joints that a drawing connects.

    Example:
        >>> Skeleton(("head", "right hand", "left hand"), ((1, 2),), ((0, 1), (0, 2))).mirrored
        (0, 2, 1)
    """

    joints: tuple[str, ...]
    pairs: tuple[tuple[int, int], ...]
    edges: tuple[tuple[int, int], ...]

    @property
    def mirrored(self) -> tuple[int, ...]:
        """For each joint of a mirrored person, the index that it had before."""
        order = list(range(len(self.joints)))
        for left, right in self.pairs:
            order[left] = right
            order[right] = left
        return tuple(order)


def _skeleton(names: str, edges: str) -> Skeleton:
    joints = tuple(name.strip() for name in names.split(","))
    sides = [(name, name.replace("right", "left")) for name in joints if name.startswith("right")]
    lines = [line.split("-") for line in edges.split()]
    return Skeleton(
        joints,
        tuple((joints.index(right), joints.index(left)) for right, left in sides),
        tuple((int(start), int(end)) for start, end in lines),
    )


LSP = _skeleton(
    "right ankle, right knee, right hip, left hip, left knee, left ankle, right wrist, right elbow, right shoulder, "
    "left shoulder, left elbow, left wrist, neck, head top",
    "0-1 1-2 2-3 3-4 4-5 6-7 7-8 8-12 9-12 9-10 10-11 2-8 3-9 12-13",
)
MPII = _skeleton(
    "right ankle, right knee, right hip, left hip, left knee, left ankle, pelvis, thorax, upper neck, head top, "
    "right wrist, right elbow, right shoulder, left shoulder, left elbow, left wrist",
    "0-1 1-2 2-6 6-3 3-4 4-5 6-7 7-8 8-9 10-11 11-12 12-7 7-13 13-14 14-15",
)


SPLIT_SEED = 0
LSPET_MARGIN = 0.05  # of the longer side: hands and feet reach beyond the joints
HEAD_SHARE = 0.6  # head size of PCKh, relative to the diagonal of the head's rectangle, as in MPII's evaluation

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class PersonFiles:
    """Persons in image files, which :func:`bsam.lab.data.persons.load_persons` cuts out.

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

    def checked(self) -> PersonFiles:
        """Return a copy in plain types, after checking what a function of the user may have got wrong."""
        n = len(self.images)
        joints = len(self.skeleton.joints)
        shapes: dict[str, tuple[int, ...]] = {"boxes": (n, 4), "joints": (n, joints, 3), "head_sizes": (n,)}
        arrays: dict[str, Any] = {}
        for name, shape in shapes.items():
            if (values := getattr(self, name)) is not None:
                arrays[name] = np.asarray(values, np.float64)
                if arrays[name].shape != shape:
                    raise BsamValueError(f"{name} must have the shape {shape}, got {arrays[name].shape}")
        labelled = arrays["joints"][..., 2] > 0
        if not (np.isfinite(arrays["boxes"]).all() and np.isfinite(arrays["joints"][labelled]).all()):
            raise BsamValueError("boxes and labelled joints must be finite numbers")
        for name in ("train", "test"):
            arrays[name] = np.array(as_indices(name, getattr(self, name), n), np.int64)
        folder = Path(self.folder)
        check_files(folder, self.images)
        return replace(self, folder=folder, images=tuple(self.images), **arrays)


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
    rows = []
    left_out = []
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
            centre = _items(person, "objpos")
            scale = _items(person, "scale")
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
            head_sizes.append(HEAD_SHARE * math.hypot(right - left, bottom - top))
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
    positions = joints[:, :, :2]
    labelled = joints[:, :, 2:] > 0
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


MARGIN = 1.25  # extent of a network's input, relative to the longer side of the person's box
SURROUND = 1.375  # extent of a stored crop, relative to that of the input: a square turned by 30 degrees needs 1.366


def stored_side(side: int) -> int:
    """Return the side of the crops that are stored for inputs of ``side`` pixels, at the same resolution.

    Inputs rotated by up to 30 degrees stay inside them. The corners of inputs that are also scaled down are black.

    Example:
        >>> stored_side(256)
        352
    """
    return round(SURROUND * check_count("side", side))


def person_crops(boxes: Tensor, side: int) -> tuple[list[Crop], Tensor]:
    """Return how persons are cut out of their images, for inputs of ``side`` pixels.

    Args:
        boxes: (n, 4), float64: left, top, right and bottom of each person, in pixels of the image.
        side: side of the network's inputs, in pixels.

    Returns:
        The crops of :func:`stored_side` pixels, and the maps (n, 2, 3) from pixels of the images to pixels of the
        crops.

    Example:
        >>> crops, maps = person_crops(torch.tensor([[0.0, 0.0, 64.0, 64.0]]), side=80)
        >>> crops[0].size, apply(maps, torch.tensor([[[32.0, 32.0]]]))  # the centre
        (110, tensor([[[54.5000, 54.5000]]]))
    """
    size = stored_side(side)
    margin = SURROUND * MARGIN
    crops = [Crop((left, top, right, bottom), margin, size) for left, top, right, bottom in boxes.tolist()]
    return crops, crop_map(boxes, margin, size)


@dataclass(frozen=True, eq=False)
class Persons:
    """Images with one person each.

    Args:
        x: (n, 3, side, side), bytes in the channels_last format.
        y: (n, J, 3), float32: x and y in pixels of the crop, and 1 if the joint is labelled, else 0.
        to_image: (n, 2, 3), float64: the maps from pixels of the crop to pixels of the image; see
            ``bsam.lab.data.pose_augment``.
        head_sizes: (n,), float32, in pixels of the image; None if not known.
        images: names of the image files, if there are any.
    """

    x: Tensor
    y: Tensor
    to_image: Tensor
    head_sizes: Tensor | None = None
    images: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.y)

    def part(self, rows: slice | list[int]) -> Persons:
        """Return the persons at these rows; a slice, or consecutive rows, does not copy the images."""
        if isinstance(rows, list) and len(rows) == rows[-1] + 1 - rows[0]:
            rows = slice(rows[0], rows[-1] + 1)
        heads = None if self.head_sizes is None else self.head_sizes[rows]
        chosen = range(len(self))[rows] if isinstance(rows, slice) else rows
        images = tuple(self.images[row] for row in chosen) if self.images else ()
        return Persons(self.x[rows], self.y[rows], self.to_image[rows], heads, images)

    def to(self, host: torch.device, device: torch.device) -> Persons:
        """Return the persons with their images on the host, and their joints and maps on the device."""
        return replace(self, x=self.x.to(host), y=self.y.to(device), to_image=self.to_image.to(device))

    def some(self, n: int) -> Persons:
        """Return ``n`` evenly spaced persons, without copying their images."""
        step = len(self) // n
        return self.part(slice(0, n * step, step))


@dataclass(frozen=True, eq=False)
class PoseData:
    """Persons to train and test on.

    Args:
        name: name of the data set.
        side: side of the network's inputs, which ``PoseAugment`` cuts out of the stored crops.
        train, test: training and test set.
        skeleton: names of the joints.
        split: description of which persons are in which set.
        digest: SHA-256 of the pixels, the joints, the head sizes and their order.
    """

    name: str
    side: int
    train: Persons
    test: Persons
    skeleton: Skeleton
    split: str
    digest: str


def load_persons(
    files: PersonFiles,
    side: int = 256,
    *,
    cache_dir: str | Path | None = None,
    progress: Progress | None = None,
    skip_corrupt: bool = False,
) -> tuple[PoseData, list[str]]:
    """Cut the persons of a data set out of their images; the crops are kept in the cache of decoded images.

    Args:
        files: for example from :func:`~bsam.lab.data.persons.read_lspet`.
        side: side of the network's inputs, in pixels; crops of 1.375 times this side are stored.
        cache_dir, progress: see :func:`bsam.lab.data.images.load_images`.
        skip_corrupt: leave out persons whose image cannot be decoded, or whose box is outside it, instead of raising an
            error.

    Returns:
        The data set, with memory-mapped crops (or a copy in memory, if ``skip_corrupt`` left out persons), and a
        sentence for each person left out: ``files.left_out``, then those that ``skip_corrupt`` left out.
    """
    order = np.concatenate([files.train, files.test])  # each set is then a slice of the cache, without a copy
    names = [files.images[person] for person in order]
    crops, maps = person_crops(torch.from_numpy(files.boxes[order]), side)
    decoded = decode_files(
        files.folder, names, crops, cache_dir=cache_dir, progress=progress, skip_corrupt=skip_corrupt
    )
    joints = torch.from_numpy(files.joints[order])
    y = torch.cat([apply(maps, joints[:, :, :2]), joints[:, :, 2:]], dim=2)
    y = torch.where(joints[:, :, 2:] > 0, y, 0).float()  # coordinates of joints that are not labelled may be NaN
    heads = None if files.head_sizes is None else torch.from_numpy(files.head_sizes[order]).float()
    persons = Persons(decoded.images, y, inverse(maps), heads, tuple(names))
    usable = [row for row in range(len(order)) if row not in decoded.corrupt]
    train_rows = [row for row in usable if row < len(files.train)]
    test_rows = [row for row in usable if row >= len(files.train)]
    for title, rows in (("train", train_rows), ("test", test_rows)):
        if not rows:
            raise BsamValueError(
                f"no person of the {title} set of {files.folder} is left: it needs at least one whose image can be "
                "decoded, with a box in the image"
            )
    train = persons.part(train_rows)
    test = persons.part(test_rows)
    labels = [_digest(part.y, part.to_image, part.head_sizes) for part in (train, test)]
    digest = sha256(json.dumps([*decoded.identity, [train_rows, test_rows], labels]).encode())
    data = PoseData(files.name, side, train, test, files.skeleton, files.split, digest)
    return data, [*files.left_out, *decoded.corrupt.values()]


def cut_out(path: Path, box: Box | None, side: int) -> tuple[Box, NDArray[np.uint8], Tensor]:
    """Return the box of a person, the crop, and the map (1, 2, 3) from pixels of the image to pixels of the crop."""
    content = read_image(path)
    height, width, _ = decode_bytes(content, path).shape
    person_box = box or (-0.5, -0.5, width - 0.5, height - 0.5)
    left, top, right, bottom = person_box
    if min(right, bottom) <= -0.5 or left >= width - 0.5 or top >= height - 0.5:
        raise BsamValueError(f"the box {rounded(person_box)} lies outside of the {width} x {height} pixels of {path}")
    (crop,), to_crop = person_crops(torch.tensor([person_box], dtype=torch.float64), side)
    try:
        return person_box, decode_bytes(content, path, crop), to_crop
    except BoxError as error:
        raise BsamValueError(f"{error}: give another box (--box)") from error


def _digest(*tensors: Tensor | None) -> str:
    return sha256(b"".join(tensor.numpy().tobytes() for tensor in tensors if tensor is not None))
