"""Lock a folder, so that one process at a time works in it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from ..core.errors import BsamRuntimeError
from .files import LOCK as LOCK
from .files import usable


class RunLocked(BsamRuntimeError):
    """Another process holds the lock of the folder."""


@contextlib.contextmanager
def locked(folder: Path, activity: str, *, wait: bool = False) -> Iterator[None]:
    """Lock a folder: other processes are refused, or wait.

    The file ``.bsam-lock`` is removed at the end. One that a killed process left behind blocks nobody: what counts is
    the operating system's lock on it. A file of this name that is not empty is never changed or removed.

    Args:
        folder: created if it does not exist.
        activity: what this process does there, for the message to another one: ``"training"``.
        wait: wait for the process that holds the lock, rather than raise :class:`RunLocked`.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder, locked(Path(folder), "training"):
        ...     with contextlib.suppress(RunLocked), locked(Path(folder), "training"):
        ...         print("not reached")
    """
    path = folder / LOCK
    descriptor = _acquired(path, activity, wait)
    try:
        yield
    finally:
        try:
            found = os.fstat(descriptor)
            if stat.S_ISREG(found.st_mode) and not found.st_size and _is_at(descriptor, path):
                path.unlink(missing_ok=True)  # while it is locked: nobody else can have locked this file meanwhile
        finally:
            os.close(descriptor)


def _acquired(path: Path, activity: str, wait: bool) -> int:
    """Return the descriptor of the locked file. If its last holder removed the file meanwhile, try the next one."""
    while True:
        with contextlib.ExitStack() as stack:
            with usable(path.parent, activity):
                path.parent.mkdir(parents=True, exist_ok=True)
                if path.is_symlink():
                    raise BsamRuntimeError(
                        f"{path} is a symbolic link, which is not followed: remove it, or choose another folder"
                    )
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
                stack.callback(os.close, descriptor)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise RunLocked(
                    f"{path.parent}: another process is {activity} there. Wait for it, or choose another folder"
                ) from error
            except OSError as error:  # a network file system may have no locks
                raise BsamRuntimeError(
                    f"{path} cannot be locked ({error.strerror}): choose a folder elsewhere"
                ) from error
            if _is_at(descriptor, path):
                stack.pop_all()
                return descriptor


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False
