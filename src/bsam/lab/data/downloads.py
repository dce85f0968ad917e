"""Data sets whose files are published: downloads, whose SHA-256 digests are compared before anything is unpacked, and
the readers of CIFAR and Fashion-MNIST.
"""

from __future__ import annotations

import gzip
import hashlib
import http.client
import os
import pickle
import socket
import tarfile
import tempfile
import urllib.error
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np
import torch
from numpy.typing import NDArray

from ...common.errors import BsamRuntimeError
from ..common.files import WrongContent, read_bytes
from .arrays import Dataset, Examples

TIMEOUT = 60.0  # seconds


@dataclass(frozen=True)
class Source:
    """A file to download.

    Args:
        url: its address.
        sha256: SHA-256 of its content.
        makes: name of the resulting directory (from the archive) or file.
    """

    url: str
    sha256: str
    makes: str

    @property
    def is_archive(self) -> bool:
        return self.url.endswith(".tar.gz")


def fetch(source: Source, folder: Path, progress: bool = False, timeout: float = TIMEOUT) -> Path:
    """Download a file into a folder, and unpack it if it is an archive, unless it is already there.

    The work is done in a temporary directory: the result appears under its name once it is complete, and an error or an
    interruption leaves nothing behind.

    Args:
        source: the file.
        folder: created if it does not exist.
        progress: whether to show a progress bar on the error stream.
        timeout: seconds without receiving anything after which it fails.

    Returns:
        The path of the file or of the unpacked directory.

    Example:
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = Path(folder, "labels.gz").write_bytes(b"there already")
        ...     fetch(
        ...         Source("https://example.org/labels.gz", "0" * 64, "labels.gz"),
        ...         Path(folder),
        ...     ).name
        'labels.gz'
    """
    target = folder / source.makes
    if target.exists():
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".download-", dir=folder) as temporary:
            file = Path(temporary, PurePosixPath(source.url).name)
            _receive(source, file, target, progress, timeout)
            if source.is_archive:
                with tarfile.open(file, "r:gz") as tar:  # safe: its SHA-256 was compared
                    tar.extractall(file.parent / "unpacked", filter="data")
                file = file.parent / "unpacked" / source.makes
            if not target.exists():  # another process may have been faster, with the same content
                os.replace(file, target)
    except OSError as error:
        reason = error.strerror or error
        raise BsamRuntimeError(
            f"{target} could not be written: {reason}; choose another folder or free some space"
        ) from error
    return target


def _receive(source: Source, file: Path, target: Path, progress: bool, timeout: float) -> None:
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(timeout)  # torch.hub has no argument for it
    try:
        torch.hub.download_url_to_file(source.url, str(file), source.sha256, progress)
    except (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError, RuntimeError) as error:
        is_other_file = isinstance(error, RuntimeError)  # torch raises it if the SHA-256 differs
        reason = f"{'it is incomplete or not the file that its authors published: ' if is_other_file else ''}{error}"
        verb = "unpack" if source.is_archive else "put"
        raise BsamRuntimeError(
            f"{source.url} could not be downloaded ({reason}): try again, or get it on a machine with internet and "
            f"{verb} it in {target.parent}, so that {target} exists"
        ) from error
    finally:
        socket.setdefaulttimeout(before)


def sha256(content: bytes) -> str:
    """Return the SHA-256 of the content, in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def read_file(path: Path) -> bytes:
    """Return the content of a file, unpacked if its name ends in ``.gz``.

    Example:
        >>> read_file(Path("nowhere/train.bin"))
        Traceback (most recent call last):
        ...
        bsam.common.errors.BsamRuntimeError: nowhere/train.bin cannot be read: No such file or directory; get it again
    """
    try:
        content = read_bytes(path)
        return gzip.decompress(content) if path.suffix == ".gz" else content
    except (OSError, EOFError, zlib.error, WrongContent) as error:
        reason = getattr(error, "strerror", None) or error
        raise BsamRuntimeError(f"{path} cannot be read: {reason}; get it again") from error


def read_exactly(path: Path, size: int, layout: str) -> bytes:
    """Return the content of a file that must have ``size`` bytes; ``layout`` describes them in the error message."""
    content = read_file(path)
    if len(content) != size:
        raise BsamRuntimeError(f"{path} must have {size:,} bytes, {layout}, and has {len(content):,}; get it again")
    return content


CIFAR_SIDE = 32
CIFAR_PIXELS = 3 * 32 * 32


@dataclass(frozen=True)
class CifarFile:
    """A file of CIFAR.

    Args:
        name: file name without ``.bin``.
        records: number of images.
        pickle_sha256: SHA-256 of the published pickle.
        records_sha256: SHA-256 of the records (class and pixels) in their order; None: not checked.
        sorted_sha256: SHA-256 of the sorted SHA-256 digests of the records; None: not checked.
    """

    name: str
    records: int
    pickle_sha256: str
    records_sha256: str | None = None
    sorted_sha256: str | None = None


@dataclass(frozen=True)
class Cifar:
    """Layout and checksums of CIFAR-10 or CIFAR-100.

    Args:
        name: name of the data set.
        title: its name in messages.
        classes: number of classes.
        label_bytes: label bytes in a binary record; the class is the last of them.
        label_key: key of the labels in a pickle.
        binary, python: directories of the binary files and of the pickles.
        train, test: training files and test file.
        mean, std: mean and standard deviation of the training pixels per channel.
        sha256: SHA-256 of the archive with the binary files.
    """

    name: str
    title: str
    classes: int
    label_bytes: int
    label_key: str
    binary: str
    python: str
    train: tuple[CifarFile, ...]
    test: CifarFile
    mean: tuple[float, ...]
    std: tuple[float, ...]
    sha256: str

    @property
    def source(self) -> Source:
        url = f"https://www.cs.toronto.edu/~kriz/{self.title.lower()}-binary.tar.gz"
        return Source(url, self.sha256, makes=self.binary)


_CIFAR10_PICKLES = (
    "54636561a3ce25bd3e19253c6b0d8538147b0ae398331ac4a2d86c6d987368cd",
    "766b2cef9fbc745cf056b3152224f7cf77163b330ea9a15f9392beb8b89bc5a8",
    "0f00d98ebfb30b3ec0ad19f9756dc2630b89003e10525f5e148445e82aa6a1f9",
    "3f7bb240661948b8f4d53e36ec720d8306f5668bd0071dcb4e6c947f78e9682b",
    "d91802434d8376bbaeeadf58a737e3a1b12ac839077e931237e0dcd43adcb154",
    "f53d8d457504f7cff4ea9e021afcf0e0ad8e24a91f3fc42091b8adef61157831",
)
_CIFAR10_RECORDS = (
    "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
    "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
    "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
    "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
    "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
    "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
)
_CIFAR10_NAMES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
_CIFAR10_FILES = [
    CifarFile(name, 10_000, pickle_sha256, records_sha256)
    for name, pickle_sha256, records_sha256 in zip(_CIFAR10_NAMES, _CIFAR10_PICKLES, _CIFAR10_RECORDS, strict=True)
]

CIFAR10 = Cifar(
    "cifar10",
    "CIFAR-10",
    classes=10,
    label_bytes=1,
    label_key="labels",
    binary="cifar-10-batches-bin",
    python="cifar-10-batches-py",
    train=tuple(_CIFAR10_FILES[:5]),
    test=_CIFAR10_FILES[5],
    mean=(0.4914, 0.4822, 0.4465),
    std=(0.2470, 0.2435, 0.2616),
    sha256="c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
)
CIFAR100 = Cifar(
    "cifar100",
    "CIFAR-100",
    classes=100,
    label_bytes=2,
    label_key="fine_labels",
    binary="cifar-100-binary",
    python="cifar-100-python",
    train=(
        CifarFile(
            "train",
            50_000,
            "735e79b04f092ca3d2e6d07f368c0a7d70d48c48d28865950cc24454cf45129b",
            sorted_sha256="6d2a03c47c105e4c34d3a2ff16c2803e8df0e5d6fa0c631e46663a327aeac573",
        ),
    ),
    test=CifarFile(
        "test",
        10_000,
        "4b67687d9933c4db8f0831104447f15b93774f4f464bd0516f0f0f2ac83b7864",
        sorted_sha256="381b7d98ce1e9b98232a8df0db0a22992654c39ff2433270656ab8ace5a45e65",
    ),
    mean=(0.5071, 0.4865, 0.4409),
    std=(0.2673, 0.2564, 0.2762),
    sha256="58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
)


def read_cifar(layout: Cifar, folder: str | Path) -> Dataset:
    """Read CIFAR-10, CIFAR-100 or a data set in their layout, preferably from binary files.

    Binary files must hold the published records; in CIFAR-100 their order and coarse labels may differ, as in files
    that were converted from other formats. A pickle must be the published file; other pickles are not loaded.

    Args:
        layout: :data:`CIFAR10` (ten classes) or :data:`CIFAR100` (a hundred classes, the fine labels).
        folder: holds the directory of the binary files or of the pickles, or is one of the two.

    Example:
        >>> read_cifar(CIFAR10, "/nowhere")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        bsam.common.errors.BsamRuntimeError: no CIFAR-10 in /nowhere: data_batch_1.bin, ... missing in
        /nowhere/cifar-10-batches-bin; unpack ...
    """
    folder = Path(folder)
    directory, is_binary, missing = min(_cifar_candidates(layout, folder), key=lambda candidate: len(candidate[2]))
    if missing:
        raise BsamRuntimeError(
            f"no {layout.title} in {folder}: {', '.join(missing)} missing in {directory}; unpack {layout.source.url} "
            f"in {folder} (the commands do this with --download), or put the pickles into {folder / layout.python}"
        )
    read = _read_cifar_binary if is_binary else _read_cifar_pickle
    sets = []
    for files in (layout.train, (layout.test,)):
        records = np.concatenate([read(layout, file, directory) for file in files])
        y = records[:, 0].astype(np.int64)
        x = np.ascontiguousarray(records[:, 1:])
        sets.append(Examples(torch.from_numpy(x.reshape(-1, 3, CIFAR_SIDE, CIFAR_SIDE)), torch.from_numpy(y)))
    return Dataset(layout.name, layout.classes, sets[0], None, sets[1], layout.mean, layout.std)


def has_cifar(layout: Cifar, folder: Path) -> bool:
    """Return whether :func:`read_cifar` finds all binary files or all pickles, without reading them."""
    return any(not missing for _, _, missing in _cifar_candidates(layout, folder))


def _cifar_candidates(layout: Cifar, folder: Path) -> Iterator[tuple[Path, bool, list[str]]]:
    """Yield each directory that may hold the files, whether it would hold binary files, and which are missing."""
    for name, suffix in ((layout.binary, ".bin"), (layout.python, "")):
        files = [file.name + suffix for file in (*layout.train, layout.test)]
        for directory in (folder / name, folder):
            yield directory, bool(suffix), [file for file in files if not (directory / file).is_file()]


def _read_cifar_binary(layout: Cifar, file: CifarFile, directory: Path) -> NDArray[np.uint8]:
    """Return the records (class and pixels) of a file; raise if they are not the published ones."""
    path = directory / f"{file.name}.bin"
    length = layout.label_bytes + CIFAR_PIXELS
    content = read_exactly(path, file.records * length, f"{file.records:,} records of {length}")
    records = np.frombuffer(content, np.uint8).reshape(file.records, length)[:, layout.label_bytes - 1 :]
    in_order = sha256(records.tobytes()) if file.records_sha256 else None
    digests = sorted(hashlib.sha256(record.tobytes()).digest() for record in records) if file.sorted_sha256 else []
    in_any_order = sha256(b"".join(digests)) if file.sorted_sha256 else None
    if (in_order, in_any_order) != (file.records_sha256, file.sorted_sha256):
        raise BsamRuntimeError(
            f"{path} does not hold the labels and pixels of {layout.title}; unpack {layout.source.url} again"
        )
    return records


def _read_cifar_pickle(layout: Cifar, file: CifarFile, directory: Path) -> NDArray[np.uint8]:
    path = directory / file.name
    content = read_file(path)
    if sha256(content) != file.pickle_sha256:  # a pickle may run code when it is loaded
        raise BsamRuntimeError(
            f"{path} is not the published file of {layout.title} (its SHA-256 differs), and other pickles are not "
            f"loaded; unpack {layout.source.url} instead"
        )
    entries = pickle.loads(content, encoding="latin1")
    return np.concatenate([np.array(entries[layout.label_key], np.uint8)[:, None], entries["data"]], axis=1)


FASHION_SIDE = 28
FASHION_CLASSES = 10
FASHION_TRAIN = 60_000
FASHION_TEST = 10_000
_FASHION_SITE = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
_FASHION_IMAGES = "images-idx3-ubyte"
_FASHION_LABELS = "labels-idx1-ubyte"
_FASHION_PLACES = (".", "fashion-mnist", "FashionMNIST/raw")  # as given, as Debian has it, as torchvision has it

_FASHION_SHA256 = (
    (f"train-{_FASHION_IMAGES}", "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84"),
    (f"train-{_FASHION_LABELS}", "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845"),
    (f"t10k-{_FASHION_IMAGES}", "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073"),
    (f"t10k-{_FASHION_LABELS}", "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5"),
)
FASHION_SOURCES = tuple(Source(f"{_FASHION_SITE}{name}.gz", sha256, f"{name}.gz") for name, sha256 in _FASHION_SHA256)


def read_fashion_mnist(folder: str | Path, train: int = FASHION_TRAIN, test: int = FASHION_TEST) -> Dataset:
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
        images, labels = (_fashion_file(Path(folder), f"{part}-{kind}") for kind in (_FASHION_IMAGES, _FASHION_LABELS))
        x = _read_idx(images, (n, FASHION_SIDE, FASHION_SIDE))
        y = _read_idx(labels, (n,))
        sets.append(
            Examples(
                torch.from_numpy(x.reshape(n, 1, FASHION_SIDE, FASHION_SIDE)), torch.from_numpy(y.astype(np.int64))
            )
        )
    return Dataset("fashion_mnist", FASHION_CLASSES, sets[0], None, sets[1], mean=(0.2860,), std=(0.3530,))


def has_fashion_mnist(folder: Path) -> bool:
    """Return whether :func:`read_fashion_mnist` finds all four files, without reading them."""
    return all(_fashion_files(folder, name) for name, _ in _FASHION_SHA256)


def _fashion_files(folder: Path, name: str) -> list[Path]:
    paths = (folder / place / (name + suffix) for place in _FASHION_PLACES for suffix in ("", ".gz"))
    return [path for path in paths if path.is_file()]


def _fashion_file(folder: Path, name: str) -> Path:
    for file in _fashion_files(folder, name):
        return file
    raise BsamRuntimeError(
        f"no Fashion-MNIST in {folder}: {name} or {name}.gz is missing; --download gets it, or put "
        f"{_FASHION_SITE}{name}.gz there"
    )


def _read_idx(path: Path, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """Return the array in an idx file, which follows a header with the type, the number of axes and their lengths."""
    header = 4 + 4 * len(shape)
    layout = " x ".join(map(str, shape))
    content = bytearray(read_exactly(path, header + int(np.prod(shape)), f"an idx file of {layout} bytes"))
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape)
