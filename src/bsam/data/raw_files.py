"""Data files of a known size and their labels, checked while they are read."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Collection, Iterable
from pathlib import Path

from ..core.errors import BsamRuntimeError


def read_file(path: Path, limit: int) -> bytes:
    """Return the content of a file, unpacked where its name ends in ``.gz``, but at most ``limit + 1`` bytes of it.

    Example:
        >>> read_file(Path("nowhere/train.bin"), 3073)
        Traceback (most recent call last):
        ...
        bsam.core.errors.BsamRuntimeError: nowhere/train.bin cannot be read: No such file or directory; get it again
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            return file.read(limit + 1)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise BsamRuntimeError(f"{path} cannot be read: {reason}; get it again") from error


def read_exactly(path: Path, size: int, layout: str) -> bytes:
    """Return the content of a file that must have ``size`` bytes; ``layout`` describes them in the error message."""
    content = read_file(path, size)
    if len(content) != size:
        found = "more" if len(content) > size else f"{len(content):,}"
        raise BsamRuntimeError(f"{path} must have {size:,} bytes, {layout}, and has {found}; get it again")
    return content


def check_labels(labels: Iterable[int], allowed: Collection[int], path: Path, what: str = "label") -> None:
    """Raise an error that names the first record whose label is not one of ``allowed``."""
    for record, label in enumerate(labels):
        if label not in allowed:
            raise BsamRuntimeError(
                f"{path}: record {record} has the {what} {label}, which is out of range: the file is damaged or of "
                "another data set"
            )
