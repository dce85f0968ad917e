"""Image files as a data set: decoded once, as the evaluation transforms of torchvision and timm do, into a file that is
mapped into memory.

In this order: decoding, digests of the files, duplicates, and the cache of decoded images.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import math
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from filelock import FileLock
from numpy.typing import NDArray
from torch import Tensor

from ...common.checks import is_number
from ...common.errors import BsamRuntimeError, BsamValueError
from ...common.extras import require_package
from ..common.files import DAMAGE_ERRORS, DRAFT, MAX_TEXT, WrongContent, draft_of, read_bytes, size_of
from ..common.printing import printable
from .arrays import Dataset, Examples, find_duplicates
from .downloads import sha256
from .folders import ImageFiles

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

    The square is that of ``bsam.lab.data.pose_augment.crop_map``. It is resized with bilinear interpolation, with a
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
        x = (left + right) / 2
        y = (top + bottom) / 2
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
    short = min(width, height)
    size = resize.size
    width, height = (int(resize.shorter_side * side / short) for side in (width, height))  # as torchvision rounds
    limit = Pillow.MAX_IMAGE_PIXELS or math.inf
    if width * height > limit:
        raise BsamValueError(
            f"it has {image.width} x {image.height} pixels, and would have more than {limit:,} with a shorter side of "
            f"{resize.shorter_side}; crop it"
        )
    image = image.resize((width, height), Pillow.Resampling[resize.interpolation.upper()])
    left = round((width - size) / 2)
    top = round((height - size) / 2)
    return image.crop((left, top, left + size, top + size))


def _cut(image: Image, crop: Crop, name: object) -> Image:
    from PIL import Image as Pillow

    box_name = f"the box {rounded(crop.box)} of {name}"
    size = f"the image ({image.width} x {image.height} pixels)"
    left, top, right, bottom = (edge + 0.5 for edge in crop.region)  # Pillow counts from the corner of a pixel
    if min(right, bottom) <= 0 or left >= image.width or top >= image.height:
        raise BoxError(f"{box_name} lies outside {size}")
    border = math.ceil((right - left) / crop.size) + 1  # pixels beyond the square that the filter reaches
    x = math.floor(left) - border
    y = math.floor(top) - border
    end = math.ceil(right) + border, math.ceil(bottom) + border
    width = end[0] - x
    height = end[1] - y
    if width * height > 4 * (Pillow.MAX_IMAGE_PIXELS or math.inf):  # so that the largest image may have a margin
        raise BoxError(f"{box_name} is too large for {size}")
    window = Pillow.new("RGB", (width, height))  # zeros beyond the image; Image.crop raises for large margins
    window.paste(image, (-x, -y))
    box = (left - x, top - y, right - x, bottom - y)
    return window.resize((crop.size, crop.size), Pillow.Resampling.BILINEAR, box=box)


# Two changes within the resolution of a file system's clock have the same time. The coarsest, FAT's, is two seconds.
SETTLED = 2 * 10**9  # nanoseconds after a change from which the digest is stored
_Known = dict[str, list[int | str]]  # size, times of the last changes of content and of the file, SHA-256; by name


def file_digests(folder: Path, names: Iterable[str], cache_folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each file by name.

    Digests are stored in the cache folder, and valid while size, time of modification and time of change are the same.

    Args:
        folder: all names are relative to it.
        names: file names, which may repeat.
        cache_folder: if it cannot be written, nothing is stored.
    """
    index = cache_folder / f"files-{sha256(str(folder.resolve()).encode())[:16]}.index"
    known = _read_index(index)

    def entry(name: str) -> list[int | str]:
        path = folder / name
        now = time.time_ns()
        try:
            status = path.stat()
        except OSError:
            return [0, 0, 0, sha256(read_image(path))]  # raises an error that names the file
        state = [status.st_size, status.st_mtime_ns, status.st_ctime_ns]
        before = known.get(name)
        if before is not None and before[:3] == state:
            return before
        digest = sha256(read_image(path))
        has_settled = max(state[1:]) + SETTLED <= now
        return [*(state if has_settled else [0, 0, 0]), digest]

    unique = list(dict.fromkeys(names))
    with ThreadPoolExecutor() as threads:
        entries = dict(zip(unique, threads.map(entry, unique), strict=True))
    settled = {name: values for name, values in entries.items() if values[1]}
    if any(known.get(name) != values for name, values in settled.items()):
        with contextlib.suppress(OSError):  # the cache may be in a read-only folder
            cache_folder.mkdir(parents=True, exist_ok=True)
            _write_index(index, {**known, **settled})
    return {name: str(values[3]) for name, values in entries.items()}


def _read_index(index: Path) -> _Known:
    """Return the stored digests; none if the file is missing or damaged."""
    try:
        digest, _, content = read_bytes(index, MAX_TEXT).partition(b"\n")
        if digest.decode() != sha256(content):
            return {}
        known: _Known = {}
        for name, (*state, last) in json.loads(content):
            known[name] = [*map(int, state), str(last)]
    except DAMAGE_ERRORS:
        return {}
    return known


def _write_index(index: Path, known: _Known) -> None:
    content = json.dumps(list(known.items())).encode()
    with draft_of(index) as draft:
        draft.write_bytes(sha256(content).encode() + b"\n" + content)


DECODER = 1  # increase it with every change of the decoding that changes pixels
BLOCK = 64  # images per digest and per progress report
NAMED = 5  # corrupt images that an error message lists
Progress = Callable[[int, int], None]
_Pixels = np.memmap[tuple[int, ...], np.dtype[np.uint8]]
_Cached = tuple[_Pixels, dict[int, str], list[str]]  # images, why some cannot be decoded, digests of the blocks


def load_images(
    files: ImageFiles,
    resize: Resize,
    *,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    train: Resize | None = None,
    cache_dir: str | Path | None = None,
    progress: Progress | None = None,
    skip_corrupt: bool = False,
) -> tuple[Dataset, list[str]]:
    """Return a data set of decoded images. They are decoded once, into cache files, and then read from them.

    A cache file is valid for the content and the order of the image files, ``resize`` and the version of Pillow; if one
    of these changes, a new file is written. Image files are read only if they have changed since the last call. Each
    call reads the cache file from beginning to end, to compare its digests; if anything is wrong with it, the images
    are decoded again. Old files may be removed at any time. If two processes need the same file, one decodes and the
    other waits.

    Args:
        files: from a function of ``bsam.lab.data.folders``, such as ``read_folder``.
        resize: size of the images.
        mean, std: for normalisation; see :class:`~bsam.lab.data.arrays.Dataset`.
        train: another size for the training images, which are then in a file of their own.
        cache_dir: folder of the cache files; by default ``.bsam-cache`` in the folder of the images.
        progress: called with the numbers of decoded images and of all images in a file.
        skip_corrupt: leave out files that cannot be decoded instead of raising an error.

    Returns:
        The data set, whose images are mapped into memory in the channels_last format (a set from which images were left
        out is a copy in memory), and one sentence for each file that was left out.
    """
    together = [list(files.sets)] if train in (None, resize) else [["train"], [*files.sets][1:]]
    sets: dict[str, Examples] = {}
    used: dict[str, list[tuple[str, int]]] = {}  # digest and label of each image of a set
    left_out: list[str] = []
    rows_and_labels: list[tuple[list[int], list[int]]] = []
    identities: list[int | list[str]] = []
    for titles in together:
        parts = [files.sets[title] for title in titles]
        names = [name for part in parts for name in part.names]
        decoded = decode_files(
            files.folder,
            names,
            resize if train is None or "train" not in titles else train,
            cache_dir=cache_dir,
            progress=progress,
            skip_corrupt=skip_corrupt,
        )
        left_out += decoded.corrupt.values()
        identities += decoded.identity
        begin = 0
        for title, part in zip(titles, parts, strict=True):
            end = begin + len(part.names)
            rows = [row for row in range(begin, end) if row not in decoded.corrupt]
            labels = [part.labels[row - begin] for row in rows]
            _check_classes(files, title, labels)
            x = decoded.images[begin:end] if len(rows) == end - begin else decoded.images[rows]
            sets[title] = Examples(x, torch.tensor(labels, dtype=torch.int64))
            used[title] = [(decoded.digests[names[row]], label) for row, label in zip(rows, labels, strict=True)]
            rows_and_labels.append((rows, labels))
            begin = end
    data = Dataset(
        files.name,
        len(files.class_names),
        sets["train"],
        sets.get("validation"),
        sets["test"],
        mean,
        std,
        files.class_names,
        files.split,
        digest=sha256(json.dumps([*identities, rows_and_labels]).encode()),
        duplicates=find_duplicates(used),
    )
    return data, left_out


def _check_classes(files: ImageFiles, title: str, labels: Sequence[int]) -> None:
    """Raise if no image of a class is left in a set."""
    if lost := sorted({*files.sets[title].labels} - {*labels}):
        raise BsamValueError(
            f"no image of the class {files.class_names[lost[0]]} in the {title} set of {files.folder} can be decoded: "
            "each class needs at least one; replace the files, or remove the class"
        )


@dataclass(frozen=True)
class DecodedFiles:
    """The images of files, from the cache.

    Args:
        images: (n, 3, size, size) in the channels_last format, mapped into memory; zeros for those that cannot be
            decoded.
        corrupt: the row and the error message of each image that cannot be decoded.
        identity: JSON values that identify the pixels.
        digests: the SHA-256 of each file by name.
    """

    images: Tensor
    corrupt: Mapping[int, str]
    identity: tuple[int, list[str]]
    digests: Mapping[str, str]


def decode_files(
    folder: Path,
    names: Sequence[str],
    decoding: Resize | Sequence[Crop],
    *,
    cache_dir: str | Path | None,
    progress: Progress | None,
    skip_corrupt: bool,
) -> DecodedFiles:
    """Decode image files into the cache of :func:`load_images`.

    Args:
        folder: all names are relative to it.
        names: file names, which may repeat; at least one.
        decoding: a ``Resize`` for all files, or a ``Crop`` for each name, all of the same size.
        cache_dir, progress: see :func:`load_images`.
        skip_corrupt: return zeros for files that cannot be decoded instead of raising an error.
    """
    require_package("PIL", "images")
    cache_folder = folder / ".bsam-cache" if cache_dir is None else Path(cache_dir)
    digests = file_digests(folder, names, cache_folder)
    path = cache_folder / f"{_key(names, digests, decoding)}.npy"
    decodings: Sequence[Decoding] = [decoding] * len(names) if isinstance(decoding, Resize) else decoding
    shape = len(names), decodings[0].size, decodings[0].size, 3
    cached = _read_cached(path, shape)
    if cached is None:
        try:
            cache_folder.mkdir(parents=True, exist_ok=True)
            with FileLock(path.with_suffix(".lock")):  # the process that held it may have decoded everything
                cached = _read_cached(path, shape) or _write_cached(path, folder, names, decodings, progress)
        except OSError as error:
            raise BsamRuntimeError(
                f"the decoded images cannot be written to {cache_folder} ({error.strerror}): free some space, or "
                "choose another folder (--cache-dir)"
            ) from error
    pixels, corrupt, blocks = cached
    if corrupt and not skip_corrupt:
        listed = "".join(f"\n  {reason}" for reason in list(corrupt.values())[:NAMED])
        more = f"\n  and {len(corrupt) - NAMED} others" if len(corrupt) > NAMED else ""
        raise BsamValueError(
            f"{len(corrupt)} of {len(names)} files in {folder} cannot be used; correct, replace or remove them, or "
            f"leave them out with --skip-corrupt:{listed}{more}"
        )
    return DecodedFiles(torch.from_numpy(pixels).permute(0, 3, 1, 2), corrupt, (decodings[0].size, blocks), digests)


def _key(names: Sequence[str], digests: Mapping[str, str], decoding: Resize | Sequence[Crop]) -> str:
    """Return a digest of everything that the pixels depend on."""
    from PIL import __version__

    settings = asdict(decoding) if isinstance(decoding, Resize) else [asdict(crop) for crop in decoding]
    pairs = [(name, digests[name]) for name in names]
    return sha256(json.dumps([DECODER, __version__, settings, pairs]).encode())


def _header(shape: tuple[int, ...]) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": "|u1", "fortran_order": False, "shape": shape})
    return file.getvalue()


def _digest(pixels: bytes, reasons: Sequence[tuple[int, str]]) -> str:
    """Return the digest of a block of images, and of the reasons why some of them cannot be decoded."""
    digest = hashlib.sha256(pixels)
    digest.update(json.dumps(reasons).encode())
    return digest.hexdigest()


def _open(path: Path, shape: tuple[int, ...]) -> _Pixels:
    # not "r": torch warns about read-only arrays
    return np.memmap(path, np.uint8, mode="c", offset=len(_header(shape)), shape=shape)


def _read_cached(path: Path, shape: tuple[int, ...]) -> _Cached | None:
    """Return the images, why some cannot be decoded, and the digests; None unless the files are complete and right."""
    header = _header(shape)
    size = int(np.prod(shape[1:]))
    try:
        record = json.loads(read_bytes(path.with_suffix(".json"), MAX_TEXT))
        corrupt = {int(row): str(reason) for row, reason in record["corrupt"]}
        blocks: list[str] = []
        listed = 0
        if size_of(path) != len(header) + shape[0] * size:
            return None
        with path.open("rb") as file:
            if file.read(len(header)) != header:
                return None
            for begin in range(0, shape[0], BLOCK):
                count = min(BLOCK, shape[0] - begin)
                reasons = [(row, corrupt[begin + row]) for row in range(count) if begin + row in corrupt]
                listed += len(reasons)
                blocks.append(_digest(file.read(count * size), reasons))
        is_right = blocks == record["sha256"] and listed == len(record["corrupt"])
        return (_open(path, shape), corrupt, blocks) if is_right else None
    except DAMAGE_ERRORS:
        return None


def _write_cached(
    path: Path, folder: Path, names: Sequence[str], decodings: Sequence[Decoding], progress: Progress | None
) -> _Cached:
    """Decode the images into a file in the format of ``numpy.save``, and record those that cannot be decoded."""
    size = decodings[0].size
    shape = len(names), size, size, 3
    corrupt: dict[int, str] = {}
    blocks: list[str] = []

    def read(name: str, decoding: Decoding) -> tuple[NDArray[np.uint8], str | None]:
        try:
            return decode_pixels(read_image(folder / name), name, decoding), None
        except BsamValueError as error:
            hint = ": correct the person's joints or box" if isinstance(error, BoxError) else ""
            return np.zeros((size, size, 3), np.uint8), f"{error}{hint}"

    for left in path.parent.glob(f"{path.stem}.*{DRAFT}"):  # by a killed process; the lock is ours
        left.unlink(missing_ok=True)
    for file_path in (path, path.with_suffix(".json")):
        with contextlib.suppress(OSError):
            file_path.rmdir()  # an empty folder in the place of the file
    threads = ThreadPoolExecutor()
    try:
        with warnings.catch_warnings(action="ignore"), draft_of(path) as draft, draft.open("wb") as file:
            file.write(_header(shape))
            images = threads.map(read, names, decodings)
            for begin in range(0, len(names), BLOCK):
                block = [next(images) for _ in names[begin : begin + BLOCK]]
                pixels = b"".join(image.tobytes() for image, _ in block)
                reasons = [(row, reason) for row, (_, reason) in enumerate(block) if reason is not None]
                blocks.append(_digest(pixels, reasons))
                corrupt |= {begin + row: reason for row, reason in reasons}
                file.write(pixels)
                if progress is not None:
                    progress(begin + len(block), len(names))
    finally:
        threads.shutdown(cancel_futures=True)
    with draft_of(path.with_suffix(".json")) as draft:
        draft.write_text(json.dumps({"corrupt": list(corrupt.items()), "sha256": blocks}))
    return _open(path, shape), corrupt, blocks
