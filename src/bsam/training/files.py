"""Files that are there whole or not at all."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import io
import json
import math
import os
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

from ..core.checks import is_number
from ..core.errors import BsamRuntimeError

T = TypeVar("T")

_MAGIC = b"bsam checkpoint 1 "
_MENDS = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "Free some space and call again"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "Make the folder writable and call again"),
}


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """What goes wrong on the disk in here is said in a sentence."""
    try:
        yield
    except OSError as error:
        mend = _MENDS.get(error.errno or 0, "Once that is mended, call again")
        raise BsamRuntimeError(
            f"{path} could not be written ({error.strerror}); what was there before is kept. {mend}"
        ) from error


@contextlib.contextmanager
def usable(folder: Path, purpose: str) -> Iterator[None]:
    """An ``OSError`` in here means that the folder cannot be used, and is raised as a BsamError that says so."""
    try:
        yield
    except OSError as error:
        raise BsamRuntimeError(f"{folder} cannot be used as a folder for {purpose}: {error.strerror}") from error


def write(path: Path, content: bytes) -> None:
    """Write a file. Whatever happens meanwhile, the path holds the old content or the new one; once this returns, the
    new one is on the disk.
    """
    draft = path.with_name(f"{path.name}.draft")
    with writing(path):
        try:
            with draft.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(path)
            _settle(path.parent)
        except OSError:
            with contextlib.suppress(OSError):
                draft.unlink(missing_ok=True)
            raise


def _settle(folder: Path) -> None:
    """Let the folder's own entries reach the disk: until then a power cut may bring back what a file was called before."""
    place = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(place)
    finally:
        os.close(place)


def write_json(path: Path, content: Any) -> None:
    """Write strict JSON. A number that is not finite becomes null."""
    write(path, (json.dumps(_strict(content), indent=1, allow_nan=False) + "\n").encode())


def read_json(path: Path, kind: type[T], mend: str) -> T:
    """What a JSON file holds. One that is damaged, or holds something of another kind, is refused.

    Args:
        path: of the file.
        kind: dict or list.
        mend: what to do about a damaged file, for the message.
    """
    return parse_json(read_bytes(path), kind, path, mend)


def read_json_lines(path: Path, mend: str) -> list[dict[str, Any]]:
    """What a file with a JSON object on each line holds; a damaged one is refused, as by :func:`read_json`."""
    rows = enumerate(read_bytes(path).splitlines(), 1)
    return [parse_json(line, dict, f"line {number} of {path}", mend) for number, line in rows]


def parse_json(content: bytes, kind: type[T], name: object, mend: str) -> T:
    """What a text holds; what cannot be parsed, or is not of this kind, is refused by its name.

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
        raise BsamRuntimeError(f"{name} is damaged: it holds no JSON {'object' if kind is dict else 'array'}; {mend}")
    return found


def fits(value: Any, kind: Any) -> bool:
    """Whether what was read from JSON has a type.

    A float is any finite number, or null, which stands for one that is not finite (or NaN, which null becomes). A list
    or a tuple is an array, a dataclass an object with its fields, of which those with defaults may be missing, and a
    dict of types an object with exactly these names.

    Args:
        value: what was read.
        kind: a type, as in an annotation, or a dict of them by name.

    Example:
        >>> fits([1, 0.5, None], list[float]), fits([1, "a"], list[float]), fits({"k": [1]}, {"k": float})
        (True, False, False)
    """
    if isinstance(kind, dict):
        named = isinstance(value, dict) and value.keys() == kind.keys()
        return named and all(fits(value[name], kind[name]) for name in kind)
    if dataclasses.is_dataclass(kind):
        kinds = typing.get_type_hints(kind)
        may_lack = {item.name for item in dataclasses.fields(kind) if item.default is not dataclasses.MISSING}
        if not isinstance(value, dict) or may_lack | value.keys() != kinds.keys():
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


def lines(rows: list[Any]) -> bytes:
    """One line of strict JSON per row."""
    return "".join(json.dumps(_strict(row), allow_nan=False) + "\n" for row in rows).encode()


def write_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write tensors and plain values, behind a digest of them."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    content = buffer.getvalue()
    write(path, _MAGIC + hashlib.sha256(content).hexdigest().encode() + b"\n" + content)


def read_checkpoint(path: Path, device: torch.device) -> dict[str, Any]:
    """What :func:`write_checkpoint` wrote; a file that is anything else is refused, and nothing in it is executed."""
    first, _, content = read_bytes(path).partition(b"\n")
    if first != _MAGIC + hashlib.sha256(content).hexdigest().encode():
        raise BsamRuntimeError(f"{path} is damaged: its content is not what was written")
    try:
        return torch.load(io.BytesIO(content), map_location=device, weights_only=True)
    except Exception as error:  # torch raises what it happens to stumble over
        raise BsamRuntimeError(
            f"{path} was refused: it holds more than tensors and plain values, or something else"
        ) from error


def read_bytes(path: Path) -> bytes:
    """The content of a file; one that cannot be read is refused."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise BsamRuntimeError(f"{path} cannot be read ({error.strerror})") from error


def _strict(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _strict(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def refuse_other_files(folder: Path, own: Iterable[str] = ()) -> None:
    """Refuse a folder that holds other files than ours."""
    known = set(own)
    names = sorted(path.name for path in folder.iterdir())
    others = [name for name in names if name != ".bsam-lock" and not name.endswith(".draft") and name not in known]
    if others:
        raise BsamRuntimeError(
            f"{folder} holds files of something else ({', '.join(others[:3])}): choose another folder"
        )
