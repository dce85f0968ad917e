"""Replace files atomically."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path


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
    draft = path.with_name(f"{path.name}.{secrets.token_hex(4)}.draft")
    try:
        yield draft
        with draft.open("rb+") as file:
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
