"""SIGTERM raises an exception, as Ctrl-C does."""

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
    """Let SIGTERM raise :class:`Terminated`. Does nothing outside the main thread, which alone may handle signals.

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

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)
