"""Files that are written completely or not at all, and JSON that is checked when it is read."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import io
import json
import math
import os
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..core.checks import is_number
from ..core.errors import BsamRuntimeError

T = TypeVar("T")

LOCK = ".bsam-lock"  # the name of a lock file
_WRITE_ERROR_HINTS = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "Free some space and call again"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "Make the folder writable and call again"),
}


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise an ``OSError`` as a BsamRuntimeError: the path could not be written."""
    try:
        yield
    except OSError as error:
        hint = _WRITE_ERROR_HINTS.get(error.errno or 0, "Call again when the cause is removed")
        raise BsamRuntimeError(
            f"{path} could not be written ({error.strerror}); what was there before is kept. {hint}"
        ) from error


@contextlib.contextmanager
def usable(folder: Path, purpose: str) -> Iterator[None]:
    """Raise an ``OSError`` as a BsamRuntimeError: the folder cannot be used."""
    try:
        yield
    except OSError as error:
        raise BsamRuntimeError(f"{folder} cannot be used as a folder for {purpose}: {error.strerror}") from error


def check_writable(folder: Path) -> None:
    """Raise the ``OSError`` of a folder in which no file can be made, or which cannot be made itself."""
    there = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
    if not os.access(there, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(there))


def refuse_other_files(folder: Path, own: Iterable[str] = ()) -> None:
    """Refuse a folder with other files than ``own``, lock files and unfinished files of a killed process."""
    other = sorted({path.name for path in folder.iterdir() if path.suffix != ".draft"} - {LOCK, *own})
    if other:
        raise BsamRuntimeError(
            f"{folder} holds files of something else ({', '.join(other[:3])}): choose another folder"
        )


def write(path: Path, content: bytes, *, durable: bool = True) -> None:
    """Write a file. Whatever happens meanwhile, the path holds the old content or the new content.

    Args:
        path: of the file.
        content: of the file.
        durable: whether the content is on the disk, safe from a power cut, when this returns.
    """
    draft = path.with_name(f"{path.name}.draft")
    with writing(path):
        try:
            with draft.open("wb") as file:
                file.write(content)
                file.flush()
                if durable:
                    os.fsync(file.fileno())
            draft.replace(path)
            if durable:
                _sync_folder(path.parent)
        except OSError:
            with contextlib.suppress(OSError):
                draft.unlink(missing_ok=True)
            raise


def _sync_folder(folder: Path) -> None:
    """Write the folder's entries to the disk: until then a power cut may undo a renaming."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, content: Any, *, durable: bool = True) -> None:
    """Write strict JSON. A number that is not finite becomes null."""
    write(path, (json.dumps(_strict(content), indent=1, allow_nan=False) + "\n").encode(), durable=durable)


def write_json_lines(path: Path, rows: Iterable[Any], *, durable: bool = True) -> None:
    """Write one line of strict JSON per row."""
    lines = (json.dumps(_strict(row), allow_nan=False) + "\n" for row in rows)
    write(path, "".join(lines).encode(), durable=durable)


def read_bytes(path: Path) -> bytes:
    """Return the content of a file; raise a BsamRuntimeError if it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise BsamRuntimeError(f"{path} cannot be read ({error.strerror})") from error


def read_json(path: Path, kind: type[T], hint: str) -> T:
    """Return what a JSON file holds; raise a BsamRuntimeError if it is damaged or of another kind.

    Args:
        path: of the file.
        kind: dict or list.
        hint: what to do about a damaged file, for the message.
    """
    return parse_json(read_bytes(path), kind, path, hint)


def read_json_lines(path: Path, hint: str) -> list[dict[str, Any]]:
    """Return the JSON object on each line of a file; raise as :func:`read_json` does."""
    rows = enumerate(read_bytes(path).splitlines(), 1)
    return [parse_json(line, dict, f"line {number} of {path}", hint) for number, line in rows]


def parse_json(content: bytes, kind: type[T], name: object, hint: str) -> T:
    """Return what a JSON text holds; raise a BsamRuntimeError with its name if it is damaged or of another kind.

    Example:
        >>> parse_json(b'{"epoch": 1', dict, "line 1 of runs.jsonl", "remove the file")
        Traceback (most recent call last):
        ...
        bsam.core.errors.BsamRuntimeError: line 1 of runs.jsonl is damaged: it holds no JSON object; remove the file
    """
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, kind):
        raise BsamRuntimeError(f"{name} is damaged: it holds no JSON {'object' if kind is dict else 'array'}; {hint}")
    return found


def read_arrays(file: Path, hint: str) -> dict[str, NDArray[Any]]:
    """Return the arrays of a file of :func:`write_arrays`, by name; raise if it is damaged. Nothing is unpickled.

    Args:
        file: the file.
        hint: what to do if it is damaged.
    """
    content = read_bytes(file)
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as found:
            return dict(found)
    except Exception as error:  # of zipfile, zlib or numpy: damaged files raise many kinds
        raise BsamRuntimeError(f"{file} is damaged; {hint}") from error


def write_arrays(file: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Write arrays by name, compressed."""
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)  # type: ignore[arg-type] # names are free
    write(file, buffer.getvalue())


def fits(value: Any, kind: Any) -> bool:
    """Return whether a value that was read from JSON has a type.

    A float is any finite number, or null, which stands for one that is not finite (or NaN, which null becomes). A list
    or a tuple is an array, a dataclass an object with its fields, of which those with defaults may be missing, and a
    dict of types an object with exactly these names.

    Args:
        value: what was read.
        kind: a type, as in an annotation, or a dict of them by name.

    Example:
        >>> (
        ...     fits([1, 0.5, None], list[float]),
        ...     fits([1, "a"], list[float]),
        ...     fits({"k": [1]}, {"k": float}),
        ... )
        (True, False, False)
    """
    if isinstance(kind, dict):
        named = isinstance(value, dict) and value.keys() == kind.keys()
        return named and all(fits(value[name], kind[name]) for name in kind)
    if dataclasses.is_dataclass(kind):
        kinds = typing.get_type_hints(kind)
        optional = {item.name for item in dataclasses.fields(kind) if item.default is not dataclasses.MISSING}
        if not isinstance(value, dict) or optional | value.keys() != kinds.keys():
            return False
        return all(fits(one, kinds[name]) for name, one in value.items())
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin in (list, tuple):
        return isinstance(value, list) and all(fits(one, parts[0]) for one in value)
    if origin in (dict, Mapping):
        return isinstance(value, dict) and all(fits(one, parts[1]) for one in value.values())
    if origin in (types.UnionType, typing.Union):
        return any(fits(value, part) for part in parts)
    if kind is float:
        return value is None or value != value or is_number(value)
    return isinstance(value, kind) and (kind is not int or is_number(value))  # a bool is an int, too


def _strict(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _strict(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
