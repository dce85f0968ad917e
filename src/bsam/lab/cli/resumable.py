"""What an interrupted command says that it has saved."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

SAVED = "Epochs up to the last checkpoint"  # of a training


@contextlib.contextmanager
def resumable(out: Path, file: str, saved: str) -> Iterator[None]:
    """Add a note to what interrupts the block: what is saved in a folder, and how to continue. ``bsam`` prints it.

    Args:
        out: the folder.
        file: the name of the file, at any depth of the folder, from which the same command continues.
        saved: what such a file holds.

    Example:
        >>> try:
        ...     with resumable(Path("nowhere"), "checkpoint.pt", SAVED):
        ...         raise BrokenPipeError
        ... except BrokenPipeError as end:
        ...     print(*end.__notes__)
        No checkpoint.pt was written; run the same command again to start over.
    """
    try:
        yield
    except (KeyboardInterrupt, BrokenPipeError) as end:
        if any(out.rglob(file)):
            end.add_note(f"{saved} are saved in {out}; run the same command again to continue.")
        else:
            end.add_note(f"No {file} was written; run the same command again to start over.")
        raise
