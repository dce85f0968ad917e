"""Fashion-MNIST, from the four idx files that its authors publish."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from ..core.errors import BsamRuntimeError
from .download import Source
from .examples import Dataset, Examples

SIDE, CLASSES = 28, 10
TRAIN, TEST = 60_000, 10_000
_SITE = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
_IMAGES, _LABELS = "images-idx3-ubyte", "labels-idx1-ubyte"
_PLACES = (".", "fashion-mnist", "FashionMNIST/raw")  # as given, as Debian has it, as torchvision has it

SOURCES = (
    Source(_SITE + f"train-{_IMAGES}.gz", "8d4fb7e6c68d591d4c3dfef9ec88bf0d", 26_421_880, f"train-{_IMAGES}.gz"),
    Source(_SITE + f"train-{_LABELS}.gz", "25c81989df183df01b3e8a0aad5dffbe", 29_515, f"train-{_LABELS}.gz"),
    Source(_SITE + f"t10k-{_IMAGES}.gz", "bef4ecab320f06d8554ea6380940ec79", 4_422_102, f"t10k-{_IMAGES}.gz"),
    Source(_SITE + f"t10k-{_LABELS}.gz", "bb300cfdad3c16e7a12a480ee83cd310", 5_148, f"t10k-{_LABELS}.gz"),
)


def fashion_mnist(folder: str | Path) -> Dataset:
    """Fashion-MNIST: 60,000 grey images of 28 x 28 pixels to train on and 10,000 to test on, in ten classes.

    Args:
        folder: where the four files ``train-images-idx3-ubyte``, ``train-labels-idx1-ubyte``,
            ``t10k-images-idx3-ubyte`` and ``t10k-labels-idx1-ubyte`` are, each as it is or with ``.gz``.

    Example:
        >>> fashion_mnist("/nowhere")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        bsam.core.errors.BsamRuntimeError: no Fashion-MNIST in /nowhere: train-images-idx3-ubyte or
        train-images-idx3-ubyte.gz is missing; ...
    """
    return read_fashion_mnist(folder, TRAIN, TEST)


def read_fashion_mnist(folder: str | Path, train: int, test: int) -> Dataset:
    """The same from files with so many images."""
    sets = []
    for part, n in (("train", train), ("t10k", test)):
        x = _read(_find(Path(folder), f"{part}-{_IMAGES}"), (n, SIDE, SIDE))
        labels = _find(Path(folder), f"{part}-{_LABELS}")
        y = _read(labels, (n,))
        if (y >= CLASSES).any():
            record = int((y >= CLASSES).argmax())
            raise BsamRuntimeError(
                f"{labels}: record {record} has the label {y[record]}, which is out of range: the file is damaged or "
                "of another data set"
            )
        sets.append(Examples(torch.from_numpy(x.reshape(n, 1, SIDE, SIDE)), torch.from_numpy(y.astype(np.int64))))
    return Dataset(
        "fashion_mnist", CLASSES, train=sets[0], validation=None, test=sets[1], mean=(0.2860,), std=(0.3530,)
    )


def has_fashion_mnist(folder: Path) -> bool:
    """Whether all four files are where :func:`fashion_mnist` looks for them; what is in them is not looked at."""
    return all(_files(folder, f"{part}-{kind}") for part in ("train", "t10k") for kind in (_IMAGES, _LABELS))


def _files(folder: Path, name: str) -> list[Path]:
    return [
        file for place in _PLACES for file in (folder / place / name, folder / place / f"{name}.gz") if file.is_file()
    ]


def _find(folder: Path, name: str) -> Path:
    for file in _files(folder, name):
        return file
    raise BsamRuntimeError(
        f"no Fashion-MNIST in {folder}: {name} or {name}.gz is missing; --download gets it, or put {_SITE}{name}.gz "
        "there"
    )


def _read(path: Path, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """The bytes of an idx file, which begins with its type, its number of axes and their lengths."""
    header = np.array([0x0800 + len(shape), *shape], ">u4").tobytes()  # 8: unsigned bytes
    size = len(header) + int(np.prod(shape))
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            content = bytearray(file.read(size + 1))
    except (OSError, EOFError, zlib.error) as problem:
        raise BsamRuntimeError(f"{path} cannot be read: {problem}; get it once more") from problem
    if content[: len(header)] != header:
        raise BsamRuntimeError(
            f"{path} is no idx file of {' x '.join(map(str, shape))} bytes: it begins with "
            f"{content[: len(header)].hex()}, not with {header.hex()}"
        )
    if len(content) != size:
        raise BsamRuntimeError(
            f"{path} must hold {size:,} bytes and holds {'more' if len(content) > size else f'{len(content):,}'}; get "
            "it once more"
        )
    return np.frombuffer(content, np.uint8, offset=len(header)).reshape(shape)
