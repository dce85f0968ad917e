"""CIFAR-10 and CIFAR-100, from the files that their authors publish."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from ..core.errors import BsamError, BsamRuntimeError, BsamTypeError, BsamValueError
from .download import Source
from .examples import Dataset, Examples
from .pickled import read_pickle

SIDE, PIXELS = 32, 3 * 32 * 32
Bytes = NDArray[np.uint8]
_UNKNOWN = 255  # a coarse label that whoever wrote the file did not know
_SPARE = 256  # bytes of a pickle, per record, for labels, file names and the rest


@dataclass(frozen=True)
class Batch:
    """One file.

    Args:
        name: without ``.bin``.
        records: how many images.
        sha256: of its content as a binary file; None compares nothing.
        md5: of the pickle that the authors published; None compares nothing.
        any_order: SHA-256 over the sorted SHA-256 of its records, each the class and the pixels, without coarse labels;
            None compares nothing.
    """

    name: str
    records: int
    sha256: str | None = None
    md5: str | None = None
    any_order: str | None = None


@dataclass(frozen=True)
class Cifar:
    """One of the two data sets.

    Args:
        name: of it.
        title: in messages.
        classes: how many.
        coarse: of how many coarse classes a label precedes the class in a binary file; 0 if none does.
        key: under which the pickles have the labels.
        binary: the directory of the binary layout.
        python: the directory of the pickles.
        train: the files to train on.
        test: the file to test on.
        mean: of the training pixels per channel.
        std: their standard deviation.
        source: where it comes from.
    """

    name: str
    title: str
    classes: int
    coarse: int
    key: str
    binary: str
    python: str
    train: tuple[Batch, ...]
    test: Batch
    mean: tuple[float, ...]
    std: tuple[float, ...]
    source: Source


_SITE = "https://www.cs.toronto.edu/~kriz/"

CIFAR10 = Cifar(
    "cifar10",
    "CIFAR-10",
    classes=10,
    coarse=0,
    key="labels",
    binary="cifar-10-batches-bin",
    python="cifar-10-batches-py",
    train=(
        Batch("data_batch_1", 10_000, sha256="cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5"),
        Batch("data_batch_2", 10_000, sha256="a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed"),
        Batch("data_batch_3", 10_000, sha256="bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67"),
        Batch("data_batch_4", 10_000, sha256="014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48"),
        Batch("data_batch_5", 10_000, sha256="755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add"),
    ),
    test=Batch("test_batch", 10_000, sha256="8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b"),
    mean=(0.4914, 0.4822, 0.4465),
    std=(0.2470, 0.2435, 0.2616),
    source=Source(
        _SITE + "cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530", 170_052_171, "cifar-10-batches-bin"
    ),
)
CIFAR100 = Cifar(
    "cifar100",
    "CIFAR-100",
    classes=100,
    coarse=20,
    key="fine_labels",
    binary="cifar-100-binary",
    python="cifar-100-python",
    train=(
        Batch(
            "train",
            50_000,
            md5="16019d7e3df5f24257cddd939b257f8d",
            any_order="6d2a03c47c105e4c34d3a2ff16c2803e8df0e5d6fa0c631e46663a327aeac573",
        ),
    ),
    test=Batch(
        "test",
        10_000,
        md5="f0ef6b0ae62326f3e7ffdfab6717acfc",
        any_order="381b7d98ce1e9b98232a8df0db0a22992654c39ff2433270656ab8ace5a45e65",
    ),
    mean=(0.5071, 0.4865, 0.4409),
    std=(0.2673, 0.2564, 0.2762),
    source=Source(
        _SITE + "cifar-100-binary.tar.gz", "03b5dce01913d631647c71ecec9e9cb8", 168_513_733, "cifar-100-binary"
    ),
)


def cifar10(folder: str | Path) -> Dataset:
    """CIFAR-10: 50,000 images to train on and 10,000 to test on, in ten classes.

    Pixels and labels are held to the SHA-256 of the published binary files, whichever layout they come in.

    Args:
        folder: where ``cifar-10-batches-bin`` or ``cifar-10-batches-py`` is, or one of the two itself.

    Example:
        >>> cifar10("/nowhere")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        bsam.core.errors.BsamRuntimeError: no CIFAR-10 in /nowhere: it should hold cifar-10-batches-bin/data_batch_1.bin
        ... or cifar-10-batches-py/data_batch_1 ...
    """
    return read_cifar(CIFAR10, folder)


def cifar100(folder: str | Path) -> Dataset:
    """CIFAR-100: 50,000 images to train on and 10,000 to test on, in a hundred classes (the fine labels).

    Pixels and labels are held to a SHA-256 of the published ones, whichever layout they come in, and the pickles to
    their published MD5 as well. Binary files may have been written from other sources, in another order and without
    coarse labels (255).

    Args:
        folder: where ``cifar-100-binary`` or ``cifar-100-python`` is, or one of the two itself.
    """
    return read_cifar(CIFAR100, folder)


def read_cifar(kind: Cifar, folder: str | Path) -> Dataset:
    """One of the two, or what is written like it, from the first layout that is found: binary files before pickles."""
    place, is_binary = _find(kind, Path(folder))
    parts = []
    for batches in (kind.train, (kind.test,)):
        read = [(_binary if is_binary else _python)(kind, batch, place) for batch in batches]
        x, y = np.concatenate([x for x, _ in read]), np.concatenate([y for _, y in read])
        counts, share = np.bincount(y, minlength=kind.classes), len(y) // kind.classes
        if (counts != share).any():
            odd = int((counts != share).argmax())
            raise BsamRuntimeError(
                f"{place}: class {odd} has {counts[odd]} images in {', '.join(batch.name for batch in batches)}; in "
                f"{kind.title} it has {share}"
            )
        parts.append(Examples(torch.from_numpy(x.reshape(-1, 3, SIDE, SIDE)), torch.from_numpy(y.astype(np.int64))))
    return Dataset(
        kind.name, kind.classes, train=parts[0], validation=None, test=parts[1], mean=kind.mean, std=kind.std
    )


def has_cifar(kind: Cifar, folder: Path) -> bool:
    """Whether all files of one layout are where :func:`read_cifar` looks for them; what is in them is not looked at."""
    return any(not missing for _, _, missing in _layouts(kind, folder))


def _layouts(kind: Cifar, folder: Path) -> Iterator[tuple[Path, bool, list[str]]]:
    """Where files may be, whether they would be binary ones, and which are missing there."""
    for directory, suffix in ((kind.binary, ".bin"), (kind.python, "")):
        names = [batch.name + suffix for batch in (*kind.train, kind.test)]
        for place in (folder / directory, folder):
            yield place, bool(suffix), [name for name in names if not (place / name).is_file()]


def _find(kind: Cifar, folder: Path) -> tuple[Path, bool]:
    """Where the files are, and whether they are binary ones."""
    partly = ""
    for place, is_binary, missing in _layouts(kind, folder):
        if not missing:
            return place, is_binary
        if len(missing) <= len(kind.train):
            partly = (
                partly or f"{place} has only some files of {kind.title}: {', '.join(missing)} missing; {_anew(kind)}"
            )
    if partly:
        raise BsamRuntimeError(partly)
    first = kind.train[0].name
    raise BsamRuntimeError(
        f"no {kind.title} in {folder}: it should hold {kind.binary}/{first}.bin and the other binary files or "
        f"{kind.python}/{first} and the other pickles; "
        f"--download gets it, or unpack {kind.source.url} there"
    )


def _anew(kind: Cifar) -> str:
    return f"unpack {kind.source.url} anew, or --download it into another folder"


def _binary(kind: Cifar, batch: Batch, place: Path) -> tuple[Bytes, Bytes]:
    path, header = place / f"{batch.name}.bin", 2 if kind.coarse else 1
    size = batch.records * (header + PIXELS)
    content = _content(path, size)
    if len(content) != size:
        raise BsamValueError(
            f"{path} must have {size:,} bytes, {batch.records:,} records of {header + PIXELS}, and has "
            f"{'more' if len(content) > size else f'{len(content):,}'}"
        )
    records = np.frombuffer(content, np.uint8).reshape(batch.records, header + PIXELS)
    if kind.coarse:
        _check_range(records[:, 0].tolist(), {*range(kind.coarse), _UNKNOWN}, "coarse label", path)
    y = records[:, header - 1]
    _check_range(y.tolist(), range(kind.classes), "label", path)
    _compare(content, "sha256", batch.sha256, path, kind)
    _compare_records(records[:, header - 1 :], batch, path, kind)
    return records[:, header:], y


def _python(kind: Cifar, batch: Batch, place: Path) -> tuple[Bytes, Bytes]:
    path, most = (
        place / batch.name,
        batch.records * (2 * PIXELS + _SPARE),
    )  # bytes may be written as text, most of them in two
    content = _content(path, most)
    if len(content) > most:
        raise BsamRuntimeError(f"{path} has more than {most:,} bytes: too long for {batch.records:,} images")
    _compare(content, "md5", batch.md5, path, kind)
    try:
        found = read_pickle(content)
    except BsamError as refused:
        raise BsamRuntimeError(f"{path} was refused: {refused}; {_anew(kind)}") from refused
    x, labels = found.get("data"), found.get(kind.key)
    if not isinstance(x, np.ndarray) or x.shape != (batch.records, PIXELS):
        raise BsamValueError(
            f"{path}: 'data' must be an array of {batch.records} x {PIXELS} bytes, found "
            f"{x.shape if isinstance(x, np.ndarray) else 'no array'}"
        )
    if not isinstance(labels, list) or len(labels) != batch.records or any(type(label) is not int for label in labels):
        raise BsamTypeError(f"{path}: {kind.key!r} must be a list of {batch.records} whole numbers")
    _check_range(labels, range(kind.classes), "label", path)
    y = np.array(labels, np.uint8)
    records = np.concatenate([y[:, None], x], axis=1)
    _compare(records.tobytes(), "sha256", batch.sha256, path, kind)
    _compare_records(records, batch, path, kind)
    return x, y


def _content(path: Path, most: int) -> bytes:
    """The file, or so much of it that it is seen to be longer than ``most``."""
    try:
        with path.open("rb") as file:
            return file.read(most + 1)
    except OSError as problem:
        raise BsamRuntimeError(f"{path} cannot be read: {problem.strerror}") from problem


def _check_range(labels: list[int], allowed: Collection[int], what: str, path: Path) -> None:
    for record, label in enumerate(labels):
        if label not in allowed:
            raise BsamRuntimeError(
                f"{path}: record {record} has the {what} {label}, which is out of range: the file is damaged or of "
                "another data set"
            )


def _compare(content: bytes, algorithm: str, expected: str | None, path: Path, kind: Cifar) -> None:
    if expected is not None and hashlib.new(algorithm, content, usedforsecurity=False).hexdigest() != expected:
        raise BsamRuntimeError(
            f"{path} is not the one of {kind.title} that was published: its {algorithm.upper()} differs; {_anew(kind)}"
        )


def _compare_records(records: Bytes, batch: Batch, path: Path, kind: Cifar) -> None:
    """Hold records, each the class and the pixels, to the published ones in whatever order."""
    if batch.any_order is None:
        return
    digests = sorted(hashlib.sha256(record, usedforsecurity=False).digest() for record in records)
    if hashlib.sha256(b"".join(digests), usedforsecurity=False).hexdigest() != batch.any_order:
        raise BsamRuntimeError(
            f"{path} is not the one of {kind.title} that was published: some of its labels or pixels differ; "
            f"{_anew(kind)}"
        )
