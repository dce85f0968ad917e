"""Lock folders, and write files completely or not at all."""

from __future__ import annotations

import contextlib
import json
import math
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from filelock import BaseFileLock, FileLock, SoftFileLock, Timeout  # a dependency of torch

from ...common.errors import BsamRuntimeError
from ..common.stored_files import DRAFT, MAX_TEXT, WrongContent, draft_of, read_bytes, reading

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
    names = sorted({path.name for path in folder.iterdir() if path.suffix != DRAFT} - {LOCK, *allowed})
    if names:
        raise BsamRuntimeError(f"{folder} holds other files ({', '.join(names[:3])}): choose another folder")


def remove_drafts(folder: Path, kept: str) -> None:
    """Remove drafts that killed processes left; call it only where nobody else writes files now.

    Args:
        folder: the folder.
        kept: the name of a file whose drafts are kept, because others may write it.
    """
    for draft in folder.glob(f"*{DRAFT}"):
        if not draft.name.startswith(kept):
            with contextlib.suppress(OSError):
                draft.unlink()


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


def write_json(path: Path, content: Any) -> None:
    """Write strict JSON; non-finite numbers become null."""
    write(path, (json.dumps(_strict(content), indent=1, allow_nan=False) + "\n").encode())


def write_json_lines(path: Path, rows: Iterable[Any]) -> None:
    """Write each row as a line of strict JSON."""
    write(path, "".join(json.dumps(_strict(row), allow_nan=False) + "\n" for row in rows).encode())


def read_json(path: Path, kind: type[T], hint: str, keys: Iterable[str] = ()) -> T:
    """Return the content of a JSON file; raise as :func:`~bsam.lab.common.stored_files.reading` does.

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
    """Raise :class:`~bsam.lab.common.stored_files.WrongContent` unless an entry of a file is a dict with these keys."""
    if not isinstance(entry, dict):
        raise WrongContent(f"an entry is no dict but {type(entry).__name__}")
    if missing := [key for key in keys if key not in entry]:
        raise WrongContent(f"it has no {missing[0]!r}")


def _strict(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _strict(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
