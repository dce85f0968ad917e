"""What trained networks find in files: values, lines of text, rows of tables, and pictures."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from ...common.errors import BsamValueError
from ..common.files import WrongContent
from ..data.images import Box, Crop, DecodeError, Decoding, decode
from ..data.persons import MARGIN, Skeleton

T = TypeVar("T")
NoteReader: TypeAlias = Callable[[str, Callable[[dict[str, Any]], Any]], Any]  # returns a note of a run, parsed
ON_PAGE = 6  # pictures on the page
LINE = 0.008  # width of a skeleton's lines, relative to the longer side of the person's box
BOX_NOTE = "The whole image was used as the person's box; set --box to change it."


@dataclass(frozen=True, eq=False)
class Picture:
    """A sample, and what a network found in it.

    Args:
        pixels: bytes (height, width, channels).
        title: a line above it.
        below: lines below it.
        joints: (J, 2), x and y in pixels; the centre of the first pixel is (0, 0). Non-finite ones are not drawn.
        skeleton: the names of the joints, and which to connect.
        line: the width of the skeleton's lines at full size, in pixels.
    """

    pixels: NDArray[np.uint8]
    title: str = ""
    below: tuple[str, ...] = ()
    joints: NDArray[np.floating[Any]] | None = None
    skeleton: Skeleton | None = None
    line: float = 1.5


@dataclass(frozen=True)
class Shown:
    """The pictures of a run on the page.

    Args:
        title: the title of the figure.
        caption: its caption; ``{seeds}`` stands for the seeds of the networks.
        pictures: what the network found.
        labels: the same samples with their labels, which are shown once for all networks.
    """

    title: str
    caption: str
    pictures: Sequence[Picture]
    labels: Sequence[Picture] = ()


def drawn_pictures(arrays: Mapping[str, NDArray[Any]], _: NoteReader) -> Shown | None:
    """Return the pictures that a task of the user drew."""
    if "pictures" not in arrays:
        return None
    pictures = [Picture(pixels) for pixels in arrays["pictures"][:ON_PAGE]]
    for picture in pictures:
        pixels = picture.pixels
        if pixels.ndim != 3 or pixels.shape[-1] != 3 or pixels.dtype != np.uint8:
            raise WrongContent("a picture must have bytes (height, width, 3)")
    return Shown("Pictures", "Evaluation samples, as the task draws them; networks of {seeds}.", pictures)


def skeletons(skeleton: Skeleton, pictures: NDArray[Any], joints: NDArray[Any]) -> list[Picture]:
    """Return persons with their joints (n, J, 2)."""
    persons = zip(pictures[:ON_PAGE], joints[:ON_PAGE], strict=True)
    return [Picture(pixels, joints=places, skeleton=skeleton) for pixels, places in persons]


class Prediction(ABC):
    """What a network found in a file."""

    path: Path  #: the file

    @property
    @abstractmethod
    def values(self) -> dict[str, Any]:
        """Plain values by name, as in JSON."""

    @abstractmethod
    def picture(self) -> Picture:
        """Return the picture of the file."""

    def seen(self) -> Picture:
        """Return the picture of what the network saw of the file."""
        return self.picture()

    @classmethod
    @abstractmethod
    def lines(cls, found: Sequence[Any]) -> list[str]:
        """Return the lines that the console shows for these predictions."""

    @classmethod
    @abstractmethod
    def table(cls, found: Sequence[Any]) -> list[Sequence[object]]:
        """Return the header and the rows of a CSV file."""


@dataclass(frozen=True, eq=False)
class FoundValues(Prediction):
    """The values that a task of yours gives for a file.

    Args:
        path: the file.
        row: the values by name.
        drawn: the picture, bytes (height, width, 3), if it was asked for.
    """

    path: Path
    row: dict[str, Any]
    drawn: NDArray[np.uint8] | None = None

    @property
    def values(self) -> dict[str, Any]:
        """The values by name."""
        return self.row

    def picture(self) -> Picture:
        """Return the picture that the task drew."""
        if self.drawn is None:
            raise BsamValueError(f"{self.path} has no picture: call predict with pictures=True")
        return Picture(self.drawn)

    @classmethod
    def lines(cls, found: Sequence[FoundValues]) -> list[str]:
        """Return a line for each file."""
        lines = []
        for one in found:
            shown = {name: f"{value:.4g}" if isinstance(value, float) else value for name, value in one.row.items()}
            lines.append(f"{one.path}  {', '.join(f'{name} {value}' for name, value in shown.items())}")
        return lines

    @classmethod
    def table(cls, found: Sequence[FoundValues]) -> list[Sequence[object]]:
        """Return a row for each file, and a column for each name."""
        names: dict[str, None] = {}
        for one in found:
            names |= dict.fromkeys(one.row)
        rows: list[Sequence[object]] = [["file", *names]]
        for one in found:
            rows.append([one.path, *(one.row.get(name, "") for name in names)])
        return rows


@dataclass(frozen=True, eq=False)
class FoundClasses(Prediction):
    """The most probable classes of an image.

    Args:
        path: the file.
        decoding: how the network's input is cut out of the image.
        classes: the most probable classes, in descending order.
        probabilities: their probabilities.
    """

    path: Path
    decoding: Decoding
    classes: tuple[str, ...]
    probabilities: tuple[float, ...]

    @property
    def pixels(self) -> NDArray[np.uint8]:
        """Bytes (side, side, 3) of the network's input, read from the file each time."""
        return decode(self.path, self.decoding)

    @property
    def values(self) -> dict[str, Any]:
        """``classes`` and ``probabilities``."""
        return {"classes": list(self.classes), "probabilities": list(self.probabilities)}

    @property
    def texts(self) -> list[str]:
        """The classes with their probabilities in words."""
        return [f"{name} {p:.1%}" for name, p in zip(self.classes, self.probabilities, strict=True)]

    def picture(self) -> Picture:
        """Return the network's input with the classes."""
        first, *others = self.texts
        return Picture(self.pixels, first, tuple(others))

    @classmethod
    def lines(cls, found: Sequence[FoundClasses]) -> list[str]:
        """Return a line for each image."""
        width = max(len(str(one.path)) for one in found)
        return [f"{one.path!s:<{width}}  {', '.join(one.texts)}" for one in found]

    @classmethod
    def table(cls, found: Sequence[FoundClasses]) -> list[Sequence[object]]:
        """Return a row for each image, with two columns for each class."""
        header = ["file", "class", "probability"]
        for number in range(2, len(found[0].classes) + 1):
            header += [f"class_{number}", f"probability_{number}"]
        rows: list[Sequence[object]] = [header]
        for one in found:
            row: list[object] = [one.path]
            for pair in zip(one.classes, one.probabilities, strict=True):
                row += pair
            rows.append(row)
        return rows


@dataclass(frozen=True, eq=False)
class FoundJoints(Prediction):
    """The joints of the person in an image.

    Coordinates are pixels of the upright image, and the centre of its first pixel is (0, 0).

    Args:
        path: the file.
        joints: (J, 2), x and y of each joint; they may lie outside the image, if the crop extends beyond it.
        box: left, top, right and bottom of the person.
        skeleton: names of the joints.
        is_whole: whether the box is the whole image because no other was given.
    """

    path: Path
    joints: NDArray[np.float64]
    box: Box
    skeleton: Skeleton
    is_whole: bool = False

    @property
    def pixels(self) -> NDArray[np.uint8]:
        """Bytes (height, width, 3) of the upright image, read from the file each time, since photographs are large."""
        return decode(self.path)

    @property
    def positions(self) -> dict[str, list[float]]:
        """``[x, y]`` of each joint by name."""
        return dict(zip(self.skeleton.joints, self.joints.tolist(), strict=True))

    @property
    def values(self) -> dict[str, Any]:
        """``box``, and ``joints`` by name."""
        return {"box": list(self.box), "joints": self.positions}

    def picture(self) -> Picture:
        """Return the image with the skeleton."""
        pixels = self.pixels
        left, top, right, bottom = self.box
        extent = min(max(right - left, bottom - top), max(pixels.shape[:2]))
        return Picture(pixels, joints=self.joints, skeleton=self.skeleton, line=max(1.5, LINE * extent))

    def seen(self) -> Picture:
        """Return the part of the image that the network saw, with the skeleton."""
        left, top, right, bottom = Crop(self.box, MARGIN, 1).region
        x = max(0, math.floor(left + 0.5))
        y = max(0, math.floor(top + 0.5))
        part = self.pixels[y : math.ceil(bottom + 0.5), x : math.ceil(right + 0.5)]
        return Picture(part, joints=self.joints - (x, y), skeleton=self.skeleton)

    @classmethod
    def lines(cls, found: Sequence[FoundJoints]) -> list[str]:
        """Return lines for each image: its file, then x and y of each joint."""
        width = max(map(len, found[0].skeleton.joints))
        lines = []
        for one in found:
            lines.append(str(one.path))
            lines += [f"  {joint:<{width}} {x:8.1f} {y:8.1f}" for joint, (x, y) in one.positions.items()]
        return [*lines, BOX_NOTE] if any(one.is_whole for one in found) else lines

    @classmethod
    def table(cls, found: Sequence[FoundJoints]) -> list[Sequence[object]]:
        """Return a row for each joint."""
        rows: list[Sequence[object]] = [("file", "joint", "x", "y")]
        for one in found:
            rows += [(one.path, joint, x, y) for joint, (x, y) in one.positions.items()]
        return rows


def read_batches(
    paths: Mapping[Path, bool],
    read: Callable[[Path], T],
    size: int,
    on_message: Callable[[str], None],
    reading: str = "decoded as images",
) -> Iterator[list[tuple[Path, T]]]:
    """Yield batches of paths and the results of ``read``; only one batch is in memory at a time.

    Files in folders for which ``read`` raises a DecodeError are left out, with a message at the end; for other files,
    the error is raised.

    Args:
        paths: files, with True for those that the caller named directly.
        read: reads a file.
        size: size of a batch.
        on_message: called with the message.
        reading: what cannot be done with these files, in the message.
    """
    batch: list[tuple[Path, T]] = []
    left_out = []
    for path, is_named in paths.items():
        try:
            batch.append((path, read(path)))
        except DecodeError as error:
            if is_named:
                raise
            left_out.append(path)
            if len(left_out) == len(paths):
                raise BsamValueError(f"no file in these folders can be {reading}: {error}") from error
        if len(batch) == size:
            yield batch
            batch = []
    if left_out:
        names = ", ".join([*map(str, left_out[:3]), *(["..."] if len(left_out) > 3 else [])])
        on_message(f"left out {len(left_out)} of {len(paths)} files (cannot be {reading}): {names}")
    if batch:
        yield batch
