"""CIFAR-10 and CIFAR-100, from the files that their authors publish."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from ..core.errors import BsamError, BsamRuntimeError
from .examples import Dataset, Examples
from .pickled import read_pickle
from .raw_files import check_labels, read_exactly, read_file
from .sources import Source

SIDE, PIXELS = 32, 3 * 32 * 32
_UNKNOWN = 255  # the coarse label of a file that was written without coarse labels
_PICKLE_OVERHEAD = 256  # bytes of a pickle per record for labels, file names and the rest


@dataclass(frozen=True)
class CifarFile:
    """One of the files of CIFAR.

    Args:
        name: without ``.bin``.
        records: number of images.
        sha256: of its records, each the class and the pixels, which are the binary file of CIFAR-10; None: not checked.
        md5: of the published pickle; None: not checked.
        unordered_sha256: SHA-256 of the sorted SHA-256 of its records; None: not checked.
    """

    name: str
    records: int
    sha256: str | None = None
    md5: str | None = None
    unordered_sha256: str | None = None


@dataclass(frozen=True)
class Cifar:
    """Layout and checksums of CIFAR-10 or CIFAR-100.

    Args:
        name: of the data set.
        title: its name in messages.
        classes: number of classes.
        num_coarse_classes: number of coarse classes, whose label precedes the class in a binary record; 0: none.
        label_key: of the labels in a pickle.
        binary: directory of the binary files.
        python: directory of the pickles.
        train: the training files.
        test: the test file.
        mean: of the training pixels per channel.
        std: standard deviation of the training pixels per channel.
        source: where the binary files come from.
    """

    name: str
    title: str
    classes: int
    num_coarse_classes: int
    label_key: str
    binary: str
    python: str
    train: tuple[CifarFile, ...]
    test: CifarFile
    mean: tuple[float, ...]
    std: tuple[float, ...]
    source: Source


_SITE = "https://www.cs.toronto.edu/~kriz/"

CIFAR10 = Cifar(
    "cifar10",
    "CIFAR-10",
    classes=10,
    num_coarse_classes=0,
    label_key="labels",
    binary="cifar-10-batches-bin",
    python="cifar-10-batches-py",
    train=(
        CifarFile("data_batch_1", 10_000, sha256="cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5"),
        CifarFile("data_batch_2", 10_000, sha256="a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed"),
        CifarFile("data_batch_3", 10_000, sha256="bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67"),
        CifarFile("data_batch_4", 10_000, sha256="014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48"),
        CifarFile("data_batch_5", 10_000, sha256="755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add"),
    ),
    test=CifarFile("test_batch", 10_000, sha256="8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b"),
    mean=(0.4914, 0.4822, 0.4465),
    std=(0.2470, 0.2435, 0.2616),
    source=Source(
        _SITE + "cifar-10-binary.tar.gz",
        "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
        "cifar-10-batches-bin",
    ),
)
CIFAR100 = Cifar(
    "cifar100",
    "CIFAR-100",
    classes=100,
    num_coarse_classes=20,
    label_key="fine_labels",
    binary="cifar-100-binary",
    python="cifar-100-python",
    train=(
        CifarFile(
            "train",
            50_000,
            md5="16019d7e3df5f24257cddd939b257f8d",
            unordered_sha256="6d2a03c47c105e4c34d3a2ff16c2803e8df0e5d6fa0c631e46663a327aeac573",
        ),
    ),
    test=CifarFile(
        "test",
        10_000,
        md5="f0ef6b0ae62326f3e7ffdfab6717acfc",
        unordered_sha256="381b7d98ce1e9b98232a8df0db0a22992654c39ff2433270656ab8ace5a45e65",
    ),
    mean=(0.5071, 0.4865, 0.4409),
    std=(0.2673, 0.2564, 0.2762),
    source=Source(
        _SITE + "cifar-100-binary.tar.gz",
        "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
        "cifar-100-binary",
    ),
)


def cifar10(folder: str | Path) -> Dataset:
    """Read CIFAR-10: 50,000 training and 10,000 test images in ten classes.

    Pixels and labels must have the SHA-256 of the published binary files, in either layout.

    Args:
        folder: the one that holds ``cifar-10-batches-bin`` or ``cifar-10-batches-py``, or one of the two itself.

    Example:
        >>> cifar10("/nowhere")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        bsam.core.errors.BsamRuntimeError: no CIFAR-10 in /nowhere: it should hold cifar-10-batches-bin/data_batch_1.bin
        ... or cifar-10-batches-py/data_batch_1 ...
    """
    return read_cifar(CIFAR10, folder)


def cifar100(folder: str | Path) -> Dataset:
    """Read CIFAR-100: 50,000 training and 10,000 test images in a hundred classes (the fine labels).

    Pixels and labels must have the SHA-256 of the published ones, in either layout, and pickles their published MD5 as
    well. Binary files may have been written from other sources, in another order and without coarse labels (255).

    Args:
        folder: the one that holds ``cifar-100-binary`` or ``cifar-100-python``, or one of the two itself.
    """
    return read_cifar(CIFAR100, folder)


def read_cifar(layout: Cifar, folder: str | Path) -> Dataset:
    """Read CIFAR-10, CIFAR-100 or a data set in their layout; binary files are preferred to pickles."""
    directory, is_binary = _find(layout, Path(folder))
    sets = []
    for files in (layout.train, (layout.test,)):
        records = np.concatenate([_read(layout, file, directory, is_binary) for file in files])
        y, x = records[:, 0].astype(np.int64), np.ascontiguousarray(records[:, 1:])
        counts, per_class = np.bincount(y, minlength=layout.classes), len(y) // layout.classes
        if (counts != per_class).any():
            odd = int((counts != per_class).argmax())
            raise BsamRuntimeError(
                f"{directory}: class {odd} has {counts[odd]} images in {', '.join(file.name for file in files)}; in "
                f"{layout.title} it has {per_class}"
            )
        sets.append(Examples(torch.from_numpy(x.reshape(-1, 3, SIDE, SIDE)), torch.from_numpy(y)))
    return Dataset(
        layout.name, layout.classes, train=sets[0], validation=None, test=sets[1], mean=layout.mean, std=layout.std
    )


def has_cifar(layout: Cifar, folder: Path) -> bool:
    """Return whether all files of one layout are where :func:`read_cifar` looks for them; they are not read."""
    return any(not missing for _, _, missing in _candidates(layout, folder))


def _candidates(layout: Cifar, folder: Path) -> Iterator[tuple[Path, bool, list[str]]]:
    """Yield the directories where files may be, whether these would be binary, and which of them are missing."""
    for name, suffix in ((layout.binary, ".bin"), (layout.python, "")):
        files = [file.name + suffix for file in (*layout.train, layout.test)]
        for directory in (folder / name, folder):
            yield directory, bool(suffix), [file for file in files if not (directory / file).is_file()]


def _find(layout: Cifar, folder: Path) -> tuple[Path, bool]:
    """Return the directory of the files and whether they are binary."""
    candidates = list(_candidates(layout, folder))
    for directory, is_binary, missing in candidates:
        if not missing:
            return directory, is_binary
    for directory, _, missing in candidates:
        if len(missing) <= len(layout.train):
            raise BsamRuntimeError(
                f"{layout.title} in {directory} is incomplete: {', '.join(missing)} missing; {_unpack_hint(layout)}"
            )
    first = layout.train[0].name
    raise BsamRuntimeError(
        f"no {layout.title} in {folder}: it should hold {layout.binary}/{first}.bin and the other binary files or "
        f"{layout.python}/{first} and the other pickles; unpack {layout.source.url} there (the commands do this "
        "with --download)"
    )


def _unpack_hint(layout: Cifar) -> str:
    return f"unpack {layout.source.url} again, or get it into another folder (the commands do this with --download)"


def _read(layout: Cifar, file: CifarFile, directory: Path, is_binary: bool) -> NDArray[np.uint8]:
    """Return the records of one file, each the class and the pixels, after comparing them with the published ones."""
    path = directory / (f"{file.name}.bin" if is_binary else file.name)
    records = _read_binary(layout, file, path) if is_binary else _read_pickled(layout, file, path)
    if file.sha256 is not None:
        _compare(records.tobytes(), "sha256", file.sha256, path, layout)
    if file.unordered_sha256 is not None:
        digests = sorted(hashlib.sha256(record, usedforsecurity=False).digest() for record in records)
        _compare(
            b"".join(digests), "sha256", file.unordered_sha256, path, layout, "some of its labels or pixels differ"
        )
    return records


def _read_binary(layout: Cifar, file: CifarFile, path: Path) -> NDArray[np.uint8]:
    header = 2 if layout.num_coarse_classes else 1
    length = header + PIXELS
    content = read_exactly(path, file.records * length, f"{file.records:,} records of {length}")
    records = np.frombuffer(content, np.uint8).reshape(file.records, length)
    if layout.num_coarse_classes:
        check_labels(records[:, 0].tolist(), {*range(layout.num_coarse_classes), _UNKNOWN}, path, "coarse label")
    check_labels(records[:, header - 1].tolist(), range(layout.classes), path)
    return np.ascontiguousarray(records[:, header - 1 :])


def _read_pickled(layout: Cifar, file: CifarFile, path: Path) -> NDArray[np.uint8]:
    # protocol 2 of Python 3 writes bytes as text, most of them in two
    limit = file.records * (2 * PIXELS + _PICKLE_OVERHEAD)
    content = read_file(path, limit)
    if len(content) > limit:
        raise BsamRuntimeError(f"{path} has more than {limit:,} bytes: too long for {file.records:,} images")
    if file.md5 is not None:
        _compare(content, "md5", file.md5, path, layout)
    try:
        entries = read_pickle(content)
    except BsamError as error:
        raise BsamRuntimeError(f"{path}: {error}; {_unpack_hint(layout)}") from error
    x, labels = entries.get("data"), entries.get(layout.label_key)
    if not isinstance(x, np.ndarray) or x.shape != (file.records, PIXELS):
        shape = x.shape if isinstance(x, np.ndarray) else "no array"
        raise BsamRuntimeError(f"{path}: 'data' must be an array of {file.records} x {PIXELS} bytes, found {shape}")
    if not isinstance(labels, list) or len(labels) != file.records or any(type(label) is not int for label in labels):
        raise BsamRuntimeError(f"{path}: {layout.label_key!r} must be a list of {file.records} integers")
    check_labels(labels, range(layout.classes), path)
    return np.concatenate([np.array(labels, np.uint8)[:, None], x], axis=1)


def _compare(content: bytes, algorithm: str, expected: str, path: Path, layout: Cifar, difference: str = "") -> None:
    if hashlib.new(algorithm, content, usedforsecurity=False).hexdigest() != expected:
        raise BsamRuntimeError(
            f"{path} is not the published file of {layout.title}: {difference or f'its {algorithm.upper()} differs'}; "
            f"{_unpack_hint(layout)}"
        )
