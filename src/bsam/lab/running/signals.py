"""Let SIGTERM raise an exception, as Ctrl-C does."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


class Terminated(KeyboardInterrupt):
    """The process received SIGTERM."""


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Let SIGTERM raise :class:`Terminated`. Does nothing outside the main thread, where signals cannot be handled.

    Example:
        >>> with contextlib.suppress(Terminated), terminable():
        ...     signal.raise_signal(signal.SIGTERM)
        ...     print("not reached")
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise Terminated

    previous = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if previous is None else previous)
