"""Data files of a known size."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

from ...common.errors import BsamRuntimeError


def read_file(path: Path) -> bytes:
    """Return the content of a file, unpacked if its name ends in ``.gz``.

    Example:
        >>> read_file(Path("nowhere/train.bin"))
        Traceback (most recent call last):
        ...
        bsam.common.errors.BsamRuntimeError: nowhere/train.bin cannot be read: No such file or directory; get it again
    """
    try:
        content = path.read_bytes()
        return gzip.decompress(content) if path.suffix == ".gz" else content
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise BsamRuntimeError(f"{path} cannot be read: {reason}; get it again") from error


def read_exactly(path: Path, size: int, layout: str) -> bytes:
    """Return the content of a file that must have ``size`` bytes; ``layout`` describes them in the error message."""
    content = read_file(path)
    if len(content) != size:
        raise BsamRuntimeError(f"{path} must have {size:,} bytes, {layout}, and has {len(content):,}; get it again")
    return content
