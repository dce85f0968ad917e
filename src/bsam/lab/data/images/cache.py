"""Image files as a data set: decoded once, into one file that is mapped into memory."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from numpy.typing import NDArray
from torch import Tensor

from ....common.errors import BsamRuntimeError, BsamValueError
from ....common.extras import require_package
from ..examples import Dataset, Examples
from ..sources import sha256
from .decoding import BoxError, Crop, Decoding, Resize, decode_pixels, read_image
from .folders import ImageFiles

DECODER = 1  # increase it with every change of decoding.py that changes pixels
BLOCK = 64  # images per digest and per progress report
NAMED = 5  # corrupt images that an error message lists
Progress = Callable[[int, int], None]
_Pixels = np.memmap[tuple[int, ...], np.dtype[np.uint8]]


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
    of these changes, a new file is written. Old files may be removed at any time. If two processes need the same file,
    one decodes and the other waits.

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
    left_out: list[str] = []
    rows_and_labels: list[tuple[list[int], list[int]]] = []
    digests: list[int | list[str]] = []
    for titles in together:
        parts = [files.sets[title] for title in titles]
        images, corrupt, digest = decode_files(
            files.folder,
            [name for part in parts for name in part.names],
            resize if train is None or "train" not in titles else train,
            cache_dir=cache_dir,
            progress=progress,
            skip_corrupt=skip_corrupt,
        )
        left_out += corrupt.values()
        digests += digest
        begin = 0
        for title, part in zip(titles, parts, strict=True):
            end = begin + len(part.names)
            rows = [row for row in range(begin, end) if row not in corrupt]
            labels = [part.labels[row - begin] for row in rows]
            x = images[begin:end] if len(rows) == end - begin else images[rows]
            sets[title] = Examples(x, torch.tensor(labels, dtype=torch.int64))
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
        digest=sha256(json.dumps([*digests, rows_and_labels]).encode()),
    )
    return data, left_out


def decode_files(
    folder: Path,
    names: Sequence[str],
    decoding: Resize | Sequence[Crop],
    *,
    cache_dir: str | Path | None,
    progress: Progress | None,
    skip_corrupt: bool,
) -> tuple[Tensor, dict[int, str], tuple[int, list[str]]]:
    """Decode image files into the cache of :func:`load_images`.

    Args:
        folder: all names are relative to it.
        names: file names, which may repeat.
        decoding: a ``Resize`` for all files, or a ``Crop`` for each name, all of the same size.
        cache_dir, progress: see :func:`load_images`.
        skip_corrupt: return zeros for files that cannot be decoded instead of raising an error.

    Returns:
        The images (n, 3, size, size) in the channels_last format, mapped into memory; the row and the error message of
        each image that cannot be decoded; and JSON values that identify the pixels.
    """
    require_package("PIL", "images")
    cache_folder = folder / ".bsam-cache" if cache_dir is None else Path(cache_dir)
    path = cache_folder / f"{_key(folder, names, decoding)}.npy"
    decodings: Sequence[Decoding] = [decoding] * len(names) if isinstance(decoding, Resize) else decoding
    cached = _read(path)
    if cached is None:
        try:
            cache_folder.mkdir(parents=True, exist_ok=True)
            with FileLock(path.with_suffix(".lock")):  # the process that held it may have decoded everything
                cached = _read(path) or _write(path, folder, names, decodings, progress)
        except OSError as error:
            raise BsamRuntimeError(
                f"the decoded images cannot be written to {cache_folder} ({error.strerror}): free some space, or "
                "choose another folder (--cache-dir)"
            ) from error
    pixels, record = cached
    corrupt: dict[int, str] = dict(record["corrupt"])
    if corrupt and not skip_corrupt:
        listed = "".join(f"\n  {reason}" for reason in list(corrupt.values())[:NAMED])
        more = f"\n  and {len(corrupt) - NAMED} others" if len(corrupt) > NAMED else ""
        raise BsamValueError(
            f"{len(corrupt)} of {len(names)} files in {folder} cannot be used; correct, replace or remove them, or "
            f"leave them out with --skip-corrupt:{listed}{more}"
        )
    return torch.from_numpy(pixels).permute(0, 3, 1, 2), corrupt, (decodings[0].size, record["sha256"])


def _key(folder: Path, names: Sequence[str], decoding: Resize | Sequence[Crop]) -> str:
    """Return a digest of everything that the pixels depend on."""
    from PIL import __version__

    with ThreadPoolExecutor() as threads:
        digests = list(threads.map(lambda name: sha256(read_image(folder / name)), names))
    settings = asdict(decoding) if isinstance(decoding, Resize) else [asdict(crop) for crop in decoding]
    return sha256(json.dumps([DECODER, __version__, settings, list(zip(names, digests, strict=True))]).encode())


def _read(path: Path) -> tuple[_Pixels, dict[str, Any]] | None:
    """Return the pixels and the record about them; None unless both files are complete."""
    try:
        record = json.loads(path.with_suffix(".json").read_text())
        return np.load(path, mmap_mode="c"), record  # not "r": torch warns about read-only arrays
    except (OSError, ValueError):
        return None


def _write(
    path: Path, folder: Path, names: Sequence[str], decodings: Sequence[Decoding], progress: Progress | None
) -> tuple[_Pixels, dict[str, Any]]:
    """Decode the images into a file in the format of ``numpy.save``, and record those that cannot be decoded."""
    size = decodings[0].size
    corrupt: list[tuple[int, str]] = []
    digests: list[str] = []

    def read(name: str, decoding: Decoding) -> tuple[NDArray[np.uint8], str | None]:
        try:
            return decode_pixels(read_image(folder / name), name, decoding), None
        except BsamValueError as error:
            hint = ": correct the person's joints or box" if isinstance(error, BoxError) else ""
            return np.zeros((size, size, 3), np.uint8), f"{error}{hint}"

    draft, threads = path.with_suffix(".draft"), ThreadPoolExecutor()
    try:
        with warnings.catch_warnings(action="ignore"), draft.open("wb") as file:
            shape = (len(names), size, size, 3)
            np.lib.format.write_array_header_1_0(file, {"descr": "|u1", "fortran_order": False, "shape": shape})
            images = threads.map(read, names, decodings)
            for begin in range(0, len(names), BLOCK):
                block = [next(images) for _ in names[begin : begin + BLOCK]]
                pixels = b"".join(image.tobytes() for image, _ in block)
                reasons = [(row, reason) for row, (_, reason) in enumerate(block) if reason is not None]
                digests.append(sha256(pixels + json.dumps(reasons).encode()))
                corrupt += [(begin + row, reason) for row, reason in reasons]
                file.write(pixels)
                if progress is not None:
                    progress(begin + len(block), len(names))
        draft.replace(path)
        record = {"corrupt": corrupt, "sha256": digests}
        draft.write_text(json.dumps(record))
        draft.replace(path.with_suffix(".json"))
    finally:
        threads.shutdown(cancel_futures=True)
        draft.unlink(missing_ok=True)
    return np.load(path, mmap_mode="c"), record
