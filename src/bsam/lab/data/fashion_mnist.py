"""Fashion-MNIST, from the four idx files that its authors publish."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from ...common.errors import BsamRuntimeError
from .examples import Dataset, Examples
from .sources import Source, read_exactly

SIDE, CLASSES = 28, 10
TRAIN, TEST = 60_000, 10_000
_SITE = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
_IMAGES, _LABELS = "images-idx3-ubyte", "labels-idx1-ubyte"
_PLACES = (".", "fashion-mnist", "FashionMNIST/raw")  # as given, as Debian has it, as torchvision has it

_SHA256 = (
    (f"train-{_IMAGES}", "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84"),
    (f"train-{_LABELS}", "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845"),
    (f"t10k-{_IMAGES}", "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073"),
    (f"t10k-{_LABELS}", "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5"),
)
SOURCES = tuple(Source(f"{_SITE}{name}.gz", sha256, f"{name}.gz") for name, sha256 in _SHA256)


def read_fashion_mnist(folder: str | Path, train: int = TRAIN, test: int = TEST) -> Dataset:
    """Read Fashion-MNIST: 60,000 training and 10,000 test images of 28 x 28 grey pixels in ten classes.

    Args:
        folder: holds ``train-images-idx3-ubyte``, ``train-labels-idx1-ubyte``, ``t10k-images-idx3-ubyte`` and
            ``t10k-labels-idx1-ubyte``, each with or without ``.gz``.
        train, test: numbers of training and of test images.

    Example:
        >>> read_fashion_mnist("/nowhere")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        bsam.common.errors.BsamRuntimeError: no Fashion-MNIST in /nowhere: train-images-idx3-ubyte or
        train-images-idx3-ubyte.gz is missing; ...
    """
    sets = []
    for part, n in (("train", train), ("t10k", test)):
        images, labels = (_find(Path(folder), f"{part}-{kind}") for kind in (_IMAGES, _LABELS))
        x, y = _read(images, (n, SIDE, SIDE)), _read(labels, (n,))
        sets.append(Examples(torch.from_numpy(x.reshape(n, 1, SIDE, SIDE)), torch.from_numpy(y.astype(np.int64))))
    return Dataset("fashion_mnist", CLASSES, sets[0], None, sets[1], mean=(0.2860,), std=(0.3530,))


def has_fashion_mnist(folder: Path) -> bool:
    """Return whether :func:`read_fashion_mnist` finds all four files, without reading them."""
    return all(_files(folder, name) for name, _ in _SHA256)


def _files(folder: Path, name: str) -> list[Path]:
    paths = (folder / place / (name + suffix) for place in _PLACES for suffix in ("", ".gz"))
    return [path for path in paths if path.is_file()]


def _find(folder: Path, name: str) -> Path:
    for file in _files(folder, name):
        return file
    raise BsamRuntimeError(
        f"no Fashion-MNIST in {folder}: {name} or {name}.gz is missing; --download gets it, or put {_SITE}{name}.gz "
        "there"
    )


def _read(path: Path, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """Return the array in an idx file, which follows a header with the type, the number of axes and their lengths."""
    header, layout = 4 + 4 * len(shape), " x ".join(map(str, shape))
    content = bytearray(read_exactly(path, header + int(np.prod(shape)), f"an idx file of {layout} bytes"))
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape)
