"""Lock folders, and write files completely or not at all."""

from __future__ import annotations

import contextlib
import json
import math
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from filelock import BaseFileLock, FileLock, SoftFileLock, Timeout  # a dependency of torch

from ...common.errors import BsamRuntimeError

T = TypeVar("T")

LOCK = ".bsam-lock"
LONGEST_WAIT = 600.0  # seconds; a lock for which others wait is held for a few seconds


class RunLocked(BsamRuntimeError):
    """Another process has locked the folder."""


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
            holder, remedy = "another process", "Wait for it"
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
def usable(folder: Path, purpose: str) -> Iterator[None]:
    """Turn an ``OSError`` into a BsamRuntimeError that says that the folder cannot be used."""
    try:
        yield
    except OSError as error:
        raise BsamRuntimeError(
            f"{folder} cannot be used as a folder for {purpose} ({error.strerror}): choose another one"
        ) from error


def check_writable(folder: Path, purpose: str) -> None:
    """Create a folder if it does not exist; raise a BsamRuntimeError unless files can be created in it."""
    with usable(folder, purpose):
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()


def refuse_other_files(folder: Path, allowed: Iterable[str] = ()) -> None:
    """Raise if a folder has files other than ``allowed``, a lock, and drafts left by a killed process."""
    names = sorted({path.name for path in folder.iterdir() if path.suffix != ".draft"} - {LOCK, *allowed})
    if names:
        raise BsamRuntimeError(f"{folder} holds other files ({', '.join(names[:3])}): choose another folder")


def write(path: Path, content: bytes | memoryview, *, sync: bool = True) -> None:
    """Write a file atomically: if the process is killed, the path holds either the old or the new content.

    Args:
        path: the file.
        content: its new content.
        sync: wait for the disk, so that this also holds if the whole machine fails.
    """
    draft = path.with_name(f"{path.name}.draft")
    try:
        with draft.open("wb") as file:
            file.write(content)
            file.flush()
            if sync:
                os.fsync(file.fileno())
        draft.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        raise BsamRuntimeError(
            f"{path} could not be written ({error.strerror}); any earlier version is kept. Free some space or make "
            "the folder writable, and try again"
        ) from error


def write_json(path: Path, content: Any) -> None:
    """Write strict JSON; non-finite numbers become null."""
    write(path, (json.dumps(_strict(content), indent=1, allow_nan=False) + "\n").encode())


def write_json_lines(path: Path, rows: Iterable[Any], *, sync: bool = True) -> None:
    """Write each row as a line of strict JSON; ``sync`` is that of :func:`write`."""
    write(path, "".join(json.dumps(_strict(row), allow_nan=False) + "\n" for row in rows).encode(), sync=sync)


@contextlib.contextmanager
def reading(path: Path, hint: str) -> Iterator[None]:
    """Turn any exception into a BsamRuntimeError that says that the file cannot be read, followed by ``hint``."""
    try:
        yield
    except Exception as error:  # zipfile, zlib, torch and safetensors raise many kinds
        reason = (isinstance(error, OSError) and error.strerror) or type(error).__name__
        raise BsamRuntimeError(f"{path} cannot be read ({reason}): {hint}") from error


def read_json(path: Path, kind: type[T], hint: str) -> T:
    """Return the content of a JSON file; raise a BsamRuntimeError if it cannot be read.

    Args:
        path: the file.
        kind: the expected type, dict or list.
        hint: what to do if the file cannot be read.
    """
    with reading(path, hint):
        content = json.loads(path.read_bytes())
        if not isinstance(content, kind):
            raise TypeError
        return content


def read_json_lines(path: Path, hint: str) -> list[dict[str, Any]]:
    """Return the JSON objects in a file with one per line; raise as :func:`read_json` does."""
    with reading(path, hint):
        return [dict(json.loads(line)) for line in path.read_bytes().splitlines()]


def _strict(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _strict(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
