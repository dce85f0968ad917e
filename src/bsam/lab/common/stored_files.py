"""Replace files atomically; read files that may be damaged or may come from others, and verify their content."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import math
import os
import secrets
import stat
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...common.errors import BsamRuntimeError

DRAFT = ".draft"  # how the names of files end that are being written
MAX_TEXT = 2**28  # bytes of a JSON file; the largest of ours has ten landscapes of a million points
MAX_ARRAYS = 2**29  # bytes of the arrays in an .npz file; the confusion matrix of 8000 classes takes as much
DIGEST = "sha256"  # metadata key of a safetensors file: SHA-256 of the file in which the digest itself is BLANK
BLANK = "0" * 64
# what damaged content raises where it only means "not cached"
DAMAGE = (OSError, ValueError, TypeError, LookupError, RecursionError)
ABSENT = (FileNotFoundError, NotADirectoryError)
# in messages of torch about memory and devices, which are RuntimeErrors
OF_DEVICE = ("out of memory", "can't allocate memory", "not enough memory", "cuda error")


class DamagedFile(BsamRuntimeError):
    """The content of a file is damaged, or is not what it should be."""


class ReadFailed(BsamRuntimeError):
    """A file could not be read now, for example because memory ran out. It may be intact."""


class WrongContent(ValueError):
    """Says what is wrong with the content of a file; :func:`reading` adds its path."""


@contextlib.contextmanager
def draft_of(path: Path) -> Iterator[Path]:
    """Let the block write a draft, which then replaces a file.

    If the process is killed or the machine fails, the path holds either the old or the new content. The draft has a
    unique name, since another process may write the same file.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with draft_of(Path(folder, "a.txt")) as draft:
        ...         _ = draft.write_text("complete")
        ...     Path(folder, "a.txt").read_text(), len(list(Path(folder).iterdir()))
        ('complete', 1)
    """
    draft = path.with_name(f"{path.name}.{secrets.token_hex(4)}{DRAFT}")
    try:
        yield draft
        with draft.open("rb+") as file:
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)


@contextlib.contextmanager
def reading(path: Path, hint: str) -> Iterator[None]:
    """Turn any exception into a BsamRuntimeError that says that the file cannot be read.

    Errors of the operating system and lack of memory raise :class:`ReadFailed`, since they say nothing about the
    content; everything else raises :class:`DamagedFile`.

    Args:
        path: the file.
        hint: what to do if its content is damaged, or if it is missing.
    """
    try:
        yield
    except (DamagedFile, ReadFailed):
        raise
    except Exception as error:  # zipfile, zlib, torch and safetensors raise many kinds
        reason = (isinstance(error, OSError) and error.strerror) or type(error).__name__
        if isinstance(error, WrongContent):
            reason = str(error)
        if _says_nothing_of_content(error):
            raise ReadFailed(
                f"{path} cannot be read now ({reason}). It may be intact: keep it, and try again"
            ) from error
        raise DamagedFile(f"{path} cannot be read ({reason}): {hint}") from error


def _says_nothing_of_content(error: Exception) -> bool:
    if isinstance(error, OSError):
        return error.errno is not None and not isinstance(error, ABSENT)  # decompression raises some without a number
    if isinstance(error, RuntimeError):
        return any(words in str(error).lower() for words in OF_DEVICE)
    return isinstance(error, MemoryError)


def read_bytes(path: Path, limit: int | None = None) -> bytes:
    """Return the content of a regular file; links are followed.

    A device or a FIFO, which may have no end, raises :class:`WrongContent`, and so does a file of more than ``limit``
    bytes.
    """
    size = size_of(path)
    if limit is not None and size > limit:
        raise WrongContent(f"it has {size / 1e6:,.0f} MB, more than {limit / 1e6:,.0f} MB")
    return path.read_bytes()


def size_of(path: Path) -> int:
    """Return the number of bytes of a regular file; anything else raises :class:`WrongContent`."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise WrongContent("it is not a regular file")
    return status.st_size


def inside(folder: Path, name: object) -> Path:
    """Return the path of a file that another file in ``folder`` names.

    Raise :class:`WrongContent` unless the name is relative and its path, with links followed, is in the folder.

    Example:
        >>> inside(Path("runs"), "first/metrics.jsonl").parts
        ('runs', 'first', 'metrics.jsonl')
        >>> inside(Path("runs"), "../secret")
        Traceback (most recent call last):
        ...
        bsam.lab.common.stored_files.WrongContent: the path '../secret' is not inside the folder
    """
    if isinstance(name, str) and "\0" not in name and not Path(name).is_absolute():
        path = folder / name
        if Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder)):
            return path
    raise WrongContent(f"the path {name!r} is not inside the folder")


def load_torch(content: bytes, device: torch.device | str = "cpu") -> Any:
    """Return what is in a file of ``torch.save``, without running code from it.

    Raise an exception if the archive is damaged: torch itself does not check its CRCs.
    """
    if content.startswith(b"PK") or zipfile.is_zipfile(io.BytesIO(content)):  # older versions wrote no archive
        with _archive(content) as archive:
            damaged = archive.testzip()
        if damaged is not None:
            raise WrongContent(f"the CRC of {damaged} is wrong")
    return torch.load(io.BytesIO(content), map_location=device, weights_only=True)


def load_arrays(content: bytes, limit: int = MAX_ARRAYS) -> dict[str, NDArray[Any]]:
    """Return the arrays in an ``.npz`` file by name, without unpickling.

    Raise an exception if a CRC is wrong or if the arrays take more than ``limit`` bytes, before they are decompressed.
    """
    with _archive(content) as archive:
        size = sum(entry.file_size for entry in archive.infolist())
        if size > limit:
            raise WrongContent(f"its arrays take {size / 1e6:,.0f} MB, more than {limit / 1e6:,.0f} MB")
        # read returns at most file_size bytes, and checks their CRC
        return {entry.filename.removesuffix(".npy"): _array(archive.read(entry)) for entry in archive.infolist()}


def _array(content: bytes) -> NDArray[Any]:
    """Return the array of an ``.npy`` file; raise if its header describes more or less than the file has."""
    file = io.BytesIO(content)
    is_first = np.lib.format.read_magic(file) == (1, 0)
    read_header = np.lib.format.read_array_header_1_0 if is_first else np.lib.format.read_array_header_2_0
    shape, _, dtype = read_header(file)
    if not dtype.itemsize or math.prod(shape) * dtype.itemsize != len(content) - file.tell():
        raise WrongContent("the header of an array does not agree with its size")
    file.seek(0)
    return np.lib.format.read_array(file, allow_pickle=False)


def _archive(content: bytes) -> zipfile.ZipFile:
    """Open a ZIP archive; raise if damage to its directory hides an entry, which ``zipfile`` does not notice."""
    archive = zipfile.ZipFile(io.BytesIO(content))
    entries = archive.infolist()
    end = content.rfind(b"PK\5\6")
    count = int.from_bytes(content[end + 10 : end + 12], "little")
    if count not in (len(entries), 0xFFFF):  # with 0xFFFF, the number is in a record for large archives
        raise WrongContent(f"its directory lists {len(entries)} of {count} entries")
    # torch reads an entry with the attribute of a folder as uninitialised memory
    if any(entry.external_attr & 0x10 and not entry.is_dir() for entry in entries):
        raise WrongContent("its directory calls an entry a folder")
    return archive


def save_tensors(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """Return tensors as a safetensors file with metadata and a digest, which :func:`load_tensors` compares.

    Equal arguments give equal bytes; the package itself would write several entries of metadata in random order.
    """
    from safetensors.torch import save

    content = save(dict(tensors))
    header, data = _split(content)
    entries = {"__metadata__": {DIGEST: BLANK, **metadata}, **header}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data stays aligned
    start = len(text).to_bytes(8, "little") + text
    return b"".join([start.replace(BLANK.encode(), _digest(start, data).encode(), 1), data])


def load_tensors(content: bytes) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors and the metadata of a safetensors file.

    Raise an exception if the file has a digest of :func:`save_tensors` that does not match its content.
    """
    from safetensors.torch import load

    header, data = _split(content)
    metadata = dict(header.get("__metadata__", {}))
    if (digest := metadata.get(DIGEST)) is not None:
        start = content[: len(content) - len(data)].replace(digest.encode(), BLANK.encode(), 1)
        if digest != _digest(start, data):
            raise WrongContent("its SHA-256 is not the one in its header")
    return dict(sorted(load(content).items())), metadata  # it returns them in any order


def _split(content: bytes) -> tuple[dict[str, Any], memoryview]:
    """Return the header and the data of a safetensors file."""
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    if not isinstance(header, dict):
        raise WrongContent("its header is not a dictionary")
    return header, memoryview(content)[end:]


def _digest(start: bytes, data: memoryview) -> str:
    digest = hashlib.sha256(start)
    digest.update(data)
    return digest.hexdigest()
