"""What ends a command early: signals that a scheduler sends before it ends a job, and what the command then has saved.

After SIGTERM and SIGUSR1, training writes a checkpoint first.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

# SLURM sends SIGTERM at a job's time limit, and SIGUSR1 earlier if it is asked to. Windows has no SIGUSR1.
SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name))
SAVED = "Epochs up to the last checkpoint"  # of a training


class Terminated(KeyboardInterrupt):
    """The process received SIGTERM or SIGUSR1; ``number`` is the signal's."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class _Received:
    number = 0  # the last signal that arrived; 0 before the first one
    deferred = False  # whether a block of deferred_signals looks at it


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Let SIGTERM and SIGUSR1 raise :class:`Terminated`, except in blocks of :func:`deferred_signals`.

    Does nothing outside the main thread, where signals cannot be handled.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.signal(number, _receive) for number in SIGNALS}
    try:
        yield
    finally:
        _Received.number = 0
        for number, handler in previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _receive(number: int, _: object) -> None:
    _Received.number = number
    if not _Received.deferred:
        raise Terminated(number)


@contextlib.contextmanager
def deferred_signals() -> Iterator[Callable[[], int]]:
    """Provide a function that returns the number of the received signal, or 0. In the block, no signal raises.

    Repeated signals are no problem then: SLURM sends one to all processes, and torchrun or the parent forwards it.
    """
    before = _Received.deferred
    _Received.deferred = True
    try:
        yield lambda: _Received.number
    finally:
        _Received.deferred = before


@contextlib.contextmanager
def resumable(out: Path, file: str, saved: str) -> Iterator[None]:
    """Add a note to what ends the block early: what is saved in a folder, and how to continue. ``bsam`` prints it after
    an interruption and after an error in code of the user.

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
    except (KeyboardInterrupt, Exception) as end:
        if any(out.rglob(file)):
            end.add_note(f"{saved} are saved in {out}; run the same command again to continue.")
        else:
            end.add_note(f"No {file} was written; run the same command again to start over.")
        raise
