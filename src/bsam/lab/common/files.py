"""Files: written completely or not at all, in folders that are locked; read and verified, since they may be damaged or
may come from others.

In this order: errors; drafts that replace files; locks; reading; JSON; archives of tensors and arrays; safetensors.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import math
import os
import secrets
import stat
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from filelock import BaseFileLock, FileLock, SoftFileLock, Timeout  # a dependency of torch
from numpy.typing import NDArray
from torch import Tensor

from ...common.errors import BsamRuntimeError

DRAFT = ".draft"  # how the names of files end that are being written
MAX_TEXT = 2**28  # bytes of a JSON file; the largest of ours has ten landscapes of a million points
MAX_ARRAYS = 2**29  # bytes of the arrays in an .npz file; the confusion matrix of 8000 classes takes as much
DIGEST = "sha256"  # metadata key of a safetensors file: SHA-256 of the file in which the digest itself is BLANK
BLANK = "0" * 64
# what damaged content raises where it only means "not cached"
DAMAGE_ERRORS = (OSError, ValueError, TypeError, LookupError, RecursionError)
ABSENT = (FileNotFoundError, NotADirectoryError)
# in messages of torch about memory and devices, which are RuntimeErrors
DEVICE_ERRORS = ("out of memory", "can't allocate memory", "not enough memory", "cuda error")
T = TypeVar("T")
LOCK = ".bsam-lock"
LONGEST_WAIT = 600.0  # seconds; a lock for which others wait is held for a few seconds


class DamagedFile(BsamRuntimeError):
    """The content of a file is damaged, or is not what it should be."""


class ReadFailed(BsamRuntimeError):
    """A file could not be read now, for example because memory ran out. It may be intact."""


class WrongContent(ValueError):
    """Says what is wrong with the content of a file; :func:`reading` adds its path."""


class RunLocked(BsamRuntimeError):
    """Another process has locked the folder."""


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


def write(path: Path, content: bytes | memoryview) -> None:
    """Write a file atomically, as :func:`draft_of` does."""
    try:
        with draft_of(path) as draft:
            draft.write_bytes(content)
    except OSError as error:
        raise BsamRuntimeError(
            f"{path} could not be written ({error.strerror}); any earlier version is kept. Free some space or make "
            "the folder writable, and try again"
        ) from error


def remove_drafts(folder: Path, kept: str) -> None:
    """Remove drafts that killed processes left; call it only where nobody else writes files now.

    Args:
        kept: the name of a file whose drafts are kept, because others may write it.
    """
    for draft in folder.glob(f"*{DRAFT}"):
        if not draft.name.startswith(kept):
            with contextlib.suppress(OSError):
                draft.unlink()


def refuse_other_files(folder: Path, allowed: Iterable[str] = ()) -> None:
    """Raise if a folder has files other than ``allowed``, a lock, and drafts left by a killed process."""
    names = sorted({path.name for path in folder.iterdir() if path.suffix != DRAFT} - {LOCK, *allowed})
    if names:
        raise BsamRuntimeError(f"{folder} holds other files ({', '.join(names[:3])}): choose another folder")


def check_writable(folder: Path, purpose: str) -> None:
    """Create a folder if it does not exist; raise a BsamRuntimeError unless files can be created in it."""
    with usable(folder, purpose):
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()


@contextlib.contextmanager
def usable(folder: Path, purpose: str) -> Iterator[None]:
    """Turn an ``OSError`` into a BsamRuntimeError that says that the folder cannot be used."""
    try:
        yield
    except OSError as error:
        raise BsamRuntimeError(
            f"{folder} cannot be used as a folder for {purpose} ({error.strerror}): choose another one"
        ) from error


@contextlib.contextmanager
def locked(folder: Path, activity: str, *, wait: bool = False) -> Iterator[None]:
    """Lock a folder. If the process is killed, the operating system releases the lock; the lock file stays.

    On file systems without locks, the file itself is the lock and names its process, so that one left by another
    machine has to be removed.

    Args:
        folder: created if it does not exist, and then removed if nothing was written to it.
        activity: the word for the error message, such as ``"training"``.
        wait: wait until the folder is free, for :data:`LONGEST_WAIT`, instead of raising :class:`RunLocked` at once.
    """
    with usable(folder, activity):
        is_new = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        lock: BaseFileLock = FileLock(folder / LOCK)
        try:
            held = lock.acquire(timeout=LONGEST_WAIT if wait else 0)
        except Timeout as error:
            holder = "another process"
            remedy = "Wait for it"
            if isinstance(lock, SoftFileLock):
                holder = _holder(folder / LOCK)
                remedy = f"Wait for it, remove {folder / LOCK} if that process has ended"
            raise RunLocked(f"{folder}: {holder} is {activity} there. {remedy}, or choose another folder") from error
    with held:
        try:
            yield
        finally:
            with contextlib.suppress(OSError):  # Windows does not remove open files
                if is_new and [path.name for path in folder.iterdir()] == [LOCK]:
                    (folder / LOCK).unlink()
                    folder.rmdir()


def _holder(file: Path) -> str:
    """Return the process that a lock file names."""
    words: list[str] = []
    with contextlib.suppress(OSError, UnicodeDecodeError), file.open(encoding="utf-8") as content:
        words = content.read(1000).split()
    return f"process {words[0]} on {words[1]}" if len(words) > 1 else "another process"


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
        return any(words in str(error).lower() for words in DEVICE_ERRORS)
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
        bsam.lab.common.files.WrongContent: the path '../secret' is not inside the folder
    """
    if isinstance(name, str) and "\0" not in name and not Path(name).is_absolute():
        path = folder / name
        if Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder)):
            return path
    raise WrongContent(f"the path {name!r} is not inside the folder")


def write_json(path: Path, content: Any) -> None:
    """Write strict JSON; non-finite numbers become null."""
    write(path, (json.dumps(_strict(content), indent=1, allow_nan=False) + "\n").encode())


def write_json_lines(path: Path, rows: Iterable[Any]) -> None:
    write(path, "".join(json.dumps(_strict(row), allow_nan=False) + "\n" for row in rows).encode())


def _strict(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _strict(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_json(path: Path, kind: type[T], hint: str, keys: Iterable[str] = ()) -> T:
    """Return the content of a JSON file; raise as :func:`~bsam.lab.common.files.reading` does.

    Args:
        path: the file.
        kind: the expected type, dict or list.
        hint: what to do if the file is damaged.
        keys: keys without which the file is damaged; in a list, those of each entry.
    """
    with reading(path, hint):
        content = json.loads(read_bytes(path, MAX_TEXT))
        if not isinstance(content, kind):
            raise WrongContent(f"it is no {kind.__name__}")
        for entry in content if isinstance(content, list) else [content]:
            check_keys(entry, keys)
        return content


def read_json_lines(path: Path, hint: str, keys: Iterable[str] = ()) -> list[dict[str, Any]]:
    """Return the JSON objects in a file with one per line; the arguments are those of :func:`read_json`."""
    with reading(path, hint):
        rows = [json.loads(line) for line in read_bytes(path, MAX_TEXT).splitlines()]
        for row in rows:
            check_keys(row, keys)
        return rows


def check_keys(entry: Any, keys: Iterable[str]) -> None:
    """Raise :class:`~bsam.lab.common.files.WrongContent` unless an entry of a file is a dict with these keys."""
    if not isinstance(entry, dict):
        raise WrongContent(f"an entry is no dict but {type(entry).__name__}")
    if missing := [key for key in keys if key not in entry]:
        raise WrongContent(f"it has no {missing[0]!r}")


def load_torch(content: bytes, device: torch.device | str = "cpu") -> Any:
    """Return what is in a file of ``torch.save``, without running code from it.

    Raise an exception if the archive is damaged: torch itself does not check its CRCs.
    """
    if content.startswith(b"PK") or zipfile.is_zipfile(io.BytesIO(content)):  # torch itself once wrote no archive
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
    digest = hashlib.sha256(start)
    digest.update(data)
    return b"".join([start.replace(BLANK.encode(), digest.hexdigest().encode(), 1), data])


def load_tensors(content: bytes) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors and the metadata of a safetensors file.

    Raise an exception if the file has a digest of :func:`save_tensors` that does not match its content.
    """
    from safetensors.torch import load

    header, data = _split(content)
    metadata = dict(header.get("__metadata__", {}))
    if (stored := metadata.get(DIGEST)) is not None:
        digest = hashlib.sha256(content[: len(content) - len(data)].replace(stored.encode(), BLANK.encode(), 1))
        digest.update(data)
        if stored != digest.hexdigest():
            raise WrongContent("its SHA-256 is not the one in its header")
    return dict(sorted(load(content).items())), metadata  # it returns them in any order


def _split(content: bytes) -> tuple[dict[str, Any], memoryview]:
    """Return the header and the data of a safetensors file."""
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    if not isinstance(header, dict):
        raise WrongContent("its header is not a dictionary")
    return header, memoryview(content)[end:]
