"""The end that somebody else decides on: SIGTERM, as Ctrl-C."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


class Terminated(KeyboardInterrupt):
    """SIGTERM came: what Ctrl-C would clean up is cleaned up."""


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """In here SIGTERM raises :class:`Terminated`. Only the main thread of a process may say so; in others nothing
    changes.

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
