"""Decode an image file into an RGB array of a fixed size, as the evaluation transforms of torchvision and timm do."""

from __future__ import annotations

import contextlib
import io
import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ....common.checks import is_number
from ....common.errors import BsamRuntimeError, BsamValueError
from ....common.extras import require_package
from ...common.printing import printable
from ...common.stored_files import WrongContent, read_bytes

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")  # not EPS, for which Pillow starts another program
Box: TypeAlias = tuple[float, float, float, float]  # left, top, right and bottom


def check_box(box: Sequence[float]) -> Box:
    """Return left, top, right and bottom of a box; raise if it has no area or is smaller than a pixel."""
    if len(box) != 4 or not all(map(is_number, box)):
        raise BsamValueError(f"box must be left, top, right and bottom, got {box!r}")
    left, top, right, bottom = map(float, box)
    if not (left < right and top < bottom and max(right - left, bottom - top) >= 1):
        raise BsamValueError(
            "the right of a box must exceed its left, its bottom must exceed its top, and its longer side must be at "
            f"least 1 pixel; got {box!r}"
        )
    return left, top, right, bottom


def rounded(numbers: Iterable[float]) -> str:
    """Format a box, or other numbers, with six significant digits.

    Example:
        >>> rounded((-0.5, 10.123456789, 1e9, 40))
        '(-0.5, 10.1235, 1e+09, 40)'
    """
    return f"({', '.join(f'{edge:.6g}' for edge in numbers)})"


class BoxError(BsamValueError):
    """A box that cannot be cut out of its image."""


class DecodeError(BsamValueError):
    """A file that cannot be decoded as an image."""


@dataclass(frozen=True)
class Resize:
    """Resize the shorter side to ``floor(size / crop)`` pixels and cut out ``size`` x ``size`` pixels at the centre.

    Args:
        size: side of the result, in pixels.
        crop: share of the shorter side that is kept, timm's ``crop_pct``.
        interpolation: Pillow's filter: ``"nearest"``, ``"bilinear"``, ``"bicubic"`` or ``"lanczos"``.

    Example:
        >>> Resize(224, crop=0.875).shorter_side
        256
    """

    size: int
    crop: float = 1.0
    interpolation: str = "bilinear"

    @property
    def shorter_side(self) -> int:
        """Shorter side of the resized image, before it is cropped."""
        return math.floor(self.size / self.crop)

    @property
    def for_random_crops(self) -> Resize:
        """How to decode images that random crops of this size are cut from: uncropped squares, larger by at least 1/7.

        Example:
            >>> Resize(224, crop=0.875).for_random_crops
            Resize(size=256, crop=1.0, interpolation='bilinear')
        """
        return Resize(max(self.shorter_side, math.ceil(self.size * 8 / 7)), 1.0, self.interpolation)


@dataclass(frozen=True)
class Crop:
    """Cut out a square around a box and resize it to ``size`` x ``size`` pixels; it is black beyond the image.

    The square is that of ``bsam.lab.data.pose.affine.crop_map``. It is resized with bilinear interpolation, with a
    wider filter if it becomes smaller, so that fine patterns do not alias.

    Args:
        box: left, top, right and bottom, in pixels of the upright image; the centre of its first pixel is (0, 0).
        margin: extent of the square, relative to the longer side of the box.
        size: side of the result, in pixels.

    Example:
        >>> Crop((10, 10, 30, 50), margin=1.25, size=64).region
        (-5.0, 5.0, 45.0, 55.0)
    """

    box: Box
    margin: float
    size: int

    @property
    def region(self) -> Box:
        """Left, top, right and bottom of the square, in the coordinates of the box."""
        left, top, right, bottom = self.box
        x, y = (left + right) / 2, (top + bottom) / 2
        half = self.margin * max(right - left, bottom - top) / 2
        return x - half, y - half, x + half, y + half


Decoding: TypeAlias = Resize | Crop  # how an image file becomes an array of a fixed size


def decode(path: str | Path, decoding: Decoding | None = None) -> NDArray[np.uint8]:
    """Read an image file as RGB.

    The orientation in EXIF data is applied, transparency is ignored, 16-bit grey values keep their upper 8 bits, and
    only the first frame is read.

    Args:
        path: a file in one of ``FORMATS``, with any suffix.
        decoding: which part to return, and at which size; None returns the whole image in its original size.

    Returns:
        An array (size, size, 3), or (height, width, 3) for the whole image.

    Example:
        >>> decode("nowhere/cat.jpg", Resize(224))
        Traceback (most recent call last):
        ...
        bsam.common.errors.BsamRuntimeError: nowhere/cat.jpg cannot be read: ...
    """
    return decode_bytes(read_image(Path(path)), path, decoding)


def read_image(path: Path) -> bytes:
    """Return the content of a file."""
    try:
        return read_bytes(path)
    except WrongContent as error:
        raise DecodeError(f"{printable(str(path))} cannot be decoded: {error}") from error
    except OSError as error:
        raise BsamRuntimeError(f"{printable(str(path))} cannot be read: {error.strerror or error}") from error


def decode_bytes(content: bytes, name: object, decoding: Decoding | None = None) -> NDArray[np.uint8]:
    """Decode the content of an image file as :func:`decode` does; ``name`` is for the error message."""
    with warnings.catch_warnings(action="ignore"):  # such as Pillow's about damaged metadata and transparency
        return decode_pixels(content, name, decoding)


def decode_pixels(content: bytes, name: object, decoding: Decoding | None) -> NDArray[np.uint8]:
    """Decode without ignoring warnings, for threads that share one block that ignores them."""
    require_package("PIL", "images")
    from PIL import Image, ImageOps, UnidentifiedImageError

    limit = Image.MAX_IMAGE_PIXELS or math.inf
    try:
        with Image.open(io.BytesIO(content), formats=FORMATS) as image:
            if image.width * image.height > limit:
                raise Image.DecompressionBombError
            image.load()
            with contextlib.suppress(Exception):  # damaged metadata around good pixels
                ImageOps.exif_transpose(image, in_place=True)
            pixels = _rgb(image)
        if isinstance(decoding, Resize):
            pixels = _resize(pixels, decoding)
    except MemoryError:
        raise
    except Exception as error:  # Pillow's decoders raise many types of errors for damaged files
        if isinstance(error, UnidentifiedImageError):
            reason = f"it is not an image in one of the formats {', '.join(FORMATS)}"
        elif isinstance(error, Image.DecompressionBombError):
            reason = f"it has more than {limit:,} pixels; make it smaller"
        else:
            reason = str(error) or type(error).__name__
        raise DecodeError(f"{printable(str(name))} cannot be decoded: {reason}") from error
    return np.asarray(_cut(pixels, decoding, name) if isinstance(decoding, Crop) else pixels)


def _rgb(image: Image) -> Image:
    from PIL.Image import fromarray

    if image.mode == "F":
        raise BsamValueError("its pixels are floating-point numbers with an unknown range")
    if image.mode.startswith("I"):  # Pillow's own conversion clips at 255
        grey: NDArray[Any] = np.asarray(image).clip(0, 65535) >> 8
        image = fromarray(grey.astype(np.uint8))
    return image.convert("RGB")


def _resize(image: Image, resize: Resize) -> Image:
    from PIL import Image as Pillow

    width, height = image.size
    short, size = min(width, height), resize.size
    width, height = (int(resize.shorter_side * side / short) for side in (width, height))  # as torchvision rounds
    limit = Pillow.MAX_IMAGE_PIXELS or math.inf
    if width * height > limit:
        raise BsamValueError(
            f"it has {image.width} x {image.height} pixels, and would have more than {limit:,} with a shorter side of "
            f"{resize.shorter_side}; crop it"
        )
    image = image.resize((width, height), Pillow.Resampling[resize.interpolation.upper()])
    left, top = round((width - size) / 2), round((height - size) / 2)
    return image.crop((left, top, left + size, top + size))


def _cut(image: Image, crop: Crop, name: object) -> Image:
    from PIL import Image as Pillow

    box_name, size = f"the box {rounded(crop.box)} of {name}", f"the image ({image.width} x {image.height} pixels)"
    left, top, right, bottom = (edge + 0.5 for edge in crop.region)  # Pillow counts from the corner of a pixel
    if min(right, bottom) <= 0 or left >= image.width or top >= image.height:
        raise BoxError(f"{box_name} lies outside {size}")
    border = math.ceil((right - left) / crop.size) + 1  # pixels beyond the square that the filter reaches
    x, y = math.floor(left) - border, math.floor(top) - border
    end = math.ceil(right) + border, math.ceil(bottom) + border
    width, height = end[0] - x, end[1] - y
    if width * height > 4 * (Pillow.MAX_IMAGE_PIXELS or math.inf):  # so that the largest image may have a margin
        raise BoxError(f"{box_name} is too large for {size}")
    window = Pillow.new("RGB", (width, height))  # zeros beyond the image; Image.crop raises for large margins
    window.paste(image, (-x, -y))
    box = (left - x, top - y, right - x, bottom - y)
    return window.resize((crop.size, crop.size), Pillow.Resampling.BILINEAR, box=box)
