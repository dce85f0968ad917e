"""Files that are there whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ..core.refusal import Refusal

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
        raise Refusal(f"{path} could not be written ({error.strerror}); what was there before is kept. {mend}") from error


@contextlib.contextmanager
def usable(folder: Path, purpose: str) -> Iterator[None]:
    """An ``OSError`` in here means that the folder cannot be used, and is raised as a Refusal that says so."""
    try:
        yield
    except OSError as error:
        raise Refusal(f"{folder} cannot be used as a folder for {purpose}: {error.strerror}") from error


def write(path: Path, content: bytes) -> None:
    """Write a file. Whatever happens meanwhile, the path holds the old content or the new one; once this returns, the new one is on the disk."""
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
    try:
        first, _, content = path.read_bytes().partition(b"\n")
    except OSError as error:
        raise Refusal(f"{path} cannot be read ({error.strerror})") from error
    if first != _MAGIC + hashlib.sha256(content).hexdigest().encode():
        raise Refusal(f"{path} is damaged: its content is not what was written")
    try:
        return torch.load(io.BytesIO(content), map_location=device, weights_only=True)
    except Exception as error:  # torch raises what it happens to stumble over
        raise Refusal(f"{path} was refused: it holds more than tensors and plain values, or something else") from error


def _strict(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _strict(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
