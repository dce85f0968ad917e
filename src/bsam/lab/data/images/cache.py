"""Image files as a data set: decoded once, into a file that is mapped into memory."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from filelock import FileLock
from numpy.typing import NDArray
from torch import Tensor

from ....common.errors import BsamRuntimeError, BsamValueError
from ....common.extras import require_package
from ...common.stored_files import DAMAGE, DRAFT, MAX_TEXT, draft_of, read_bytes, size_of
from ..examples import Dataset, Examples
from ..sources import sha256
from .decoding import BoxError, Crop, Decoding, Resize, decode_pixels, read_image
from .duplicates import find_duplicates
from .file_digests import file_digests
from .folders import ImageFiles

DECODER = 1  # increase it with every change of decoding.py that changes pixels
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
        files: from :func:`bsam.lab.data.images.folders.read_folder` or ``bsam.lab.data.images.published``.
        resize: size of the images.
        mean, std: for normalisation; see :class:`~bsam.lab.data.examples.Dataset`.
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
    cached = _read(path, shape)
    if cached is None:
        try:
            cache_folder.mkdir(parents=True, exist_ok=True)
            with FileLock(path.with_suffix(".lock")):  # the process that held it may have decoded everything
                cached = _read(path, shape) or _write(path, folder, names, decodings, progress)
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
    """Return the first bytes of a file of ``numpy.save``."""
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


def _read(path: Path, shape: tuple[int, ...]) -> _Cached | None:
    """Return the images, why some cannot be decoded, and the digests; None unless the files are complete and right."""
    header, size = _header(shape), int(np.prod(shape[1:]))
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
    except DAMAGE:
        return None


def _write(
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
