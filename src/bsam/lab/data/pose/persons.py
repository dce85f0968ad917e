"""Persons cut out of their images, with the positions of their joints."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ....common.checks import check_count
from ....common.errors import BsamValueError
from ..images.cache import Progress, decode_files
from ..images.decoding import Box, BoxError, Crop, decode_bytes, read_image, rounded
from ..sources import sha256
from .affine import apply, crop_map, inverse
from .joints import Skeleton
from .person_files import PersonFiles

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
    size, margin = stored_side(side), SURROUND * MARGIN
    crops = [Crop((left, top, right, bottom), margin, size) for left, top, right, bottom in boxes.tolist()]
    return crops, crop_map(boxes, margin, size)


@dataclass(frozen=True, eq=False)
class Persons:
    """Images with one person each.

    Args:
        x: (n, 3, side, side), bytes in the channels_last format.
        y: (n, J, 3), float32: x and y in pixels of the crop, and 1 if the joint is labelled, else 0.
        to_image: (n, 2, 3), float64: the maps from pixels of the crop to pixels of the image; see
            ``bsam.lab.data.pose.affine``.
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
        files: for example from :func:`~bsam.lab.data.pose.person_files.read_lspet`.
        side: side of the network's inputs, in pixels; crops of 1.375 times this side are stored.
        cache_dir, progress: see :func:`bsam.lab.data.images.cache.load_images`.
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
    ends = len(files.train), len(order)
    rows = [[row for row in range(*part) if row not in decoded.corrupt] for part in ((0, ends[0]), ends)]
    for title, left in zip(("train", "test"), rows, strict=True):
        if not left:
            raise BsamValueError(
                f"no person of the {title} set of {files.folder} is left: it needs at least one whose image can be "
                "decoded, with a box in the image"
            )
    train, test = map(persons.part, rows)
    labels = [_digest(part.y, part.to_image, part.head_sizes) for part in (train, test)]
    digest = sha256(json.dumps([*decoded.identity, rows, labels]).encode())
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
