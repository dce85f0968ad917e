"""Folders that one process at a time works in, and files that are written completely or not at all."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from filelock import FileLock, Timeout  # a dependency of torch

from ..common.errors import BsamRuntimeError

T = TypeVar("T")

LOCK = ".bsam-lock"  # the name of a lock file


class RunLocked(BsamRuntimeError):
    """Another process holds the lock of the folder."""


@contextlib.contextmanager
def locked(folder: Path, activity: str, *, wait: bool = False) -> Iterator[None]:
    """Lock a folder. The operating system releases the lock of a process that is killed; the lock file stays.

    Args:
        folder: created if it does not exist.
        activity: what this process does there, for the message to another one: ``"training"``.
        wait: wait for the process that holds the lock, rather than raise :class:`RunLocked`.
    """
    with usable(folder, activity):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            lock = FileLock(folder / LOCK).acquire(blocking=wait)
        except Timeout as error:
            raise RunLocked(
                f"{folder}: another process is {activity} there. Wait for it, or choose another folder"
            ) from error
    with lock:
        yield


@contextlib.contextmanager
def usable(folder: Path, purpose: str) -> Iterator[None]:
    """Raise an ``OSError`` as a BsamRuntimeError: the folder cannot be used."""
    try:
        yield
    except OSError as error:
        raise BsamRuntimeError(f"{folder} cannot be used as a folder for {purpose}: {error.strerror}") from error


def refuse_other_files(folder: Path, own: Iterable[str] = ()) -> None:
    """Refuse a folder with other files than ``own``, lock files and unfinished files of a killed process."""
    other = sorted({path.name for path in folder.iterdir() if path.suffix != ".draft"} - {LOCK, *own})
    if other:
        raise BsamRuntimeError(
            f"{folder} holds files of something else ({', '.join(other[:3])}): choose another folder"
        )


def write(path: Path, content: bytes) -> None:
    """Write a file. If the process is killed meanwhile, the path holds the old content or the new content."""
    draft = path.with_name(f"{path.name}.draft")
    try:
        with draft.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        raise BsamRuntimeError(
            f"{path} could not be written ({error.strerror}); what was there before is kept. Free some space, or make "
            "the folder writable, and call again"
        ) from error


def write_json(path: Path, content: Any) -> None:
    """Write strict JSON. A number that is not finite becomes null."""
    write(path, (json.dumps(_strict(content), indent=1, allow_nan=False) + "\n").encode())


def write_json_lines(path: Path, rows: Iterable[Any]) -> None:
    """Write one line of strict JSON per row."""
    write(path, "".join(json.dumps(_strict(row), allow_nan=False) + "\n" for row in rows).encode())


@contextlib.contextmanager
def reading(path: Path, hint: str) -> Iterator[None]:
    """Raise any error as a BsamRuntimeError: the file cannot be read, and ``hint`` says what to do."""
    try:
        yield
    except Exception as error:  # zipfile, zlib, torch and safetensors raise many kinds
        why = (isinstance(error, OSError) and error.strerror) or type(error).__name__
        raise BsamRuntimeError(f"{path} cannot be read ({why}): {hint}") from error


def read_json(path: Path, kind: type[T], hint: str) -> T:
    """Return what a JSON file holds; raise a BsamRuntimeError if it cannot be read.

    Args:
        path: of the file.
        kind: dict or list.
        hint: what to do about a file that cannot be read.
    """
    with reading(path, hint):
        found = json.loads(path.read_bytes())
        if not isinstance(found, kind):
            raise TypeError
        return found


def read_json_lines(path: Path, hint: str) -> list[dict[str, Any]]:
    """Return the JSON object on each line of a file; raise as :func:`read_json` does."""
    with reading(path, hint):
        return [dict(json.loads(line)) for line in path.read_bytes().splitlines()]


def _strict(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _strict(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
