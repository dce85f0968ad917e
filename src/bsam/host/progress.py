"""Progress of long work on the error stream."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

INTERVAL = {True: 0.2, False: 10.0}  # seconds between two lines: on a terminal, where they replace each other, and else


@contextlib.contextmanager
def stderr_progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """Yield a function of (done, total) that prints the progress of work; nothing is printed before its first call."""
    is_terminal = sys.stderr.isatty()
    first: tuple[float, int] | None = None  # when the first call came, and what had been done by then
    last = -INTERVAL[False]

    def show(done: int, total: int) -> None:
        nonlocal first, last
        now = time.monotonic()
        first = first or (now, done)
        if now - last < INTERVAL[is_terminal] and done < total:
            return
        since, new = now - first[0], done - first[1]
        left = f", about {since / new * (total - done):.0f} s left" if new and done < total else ""
        line = f"{what}: {done} of {total}{left}"
        print(f"\r{line}\x1b[K" if is_terminal else line, end="" if is_terminal else "\n", file=sys.stderr, flush=True)
        last = now

    try:
        yield show
    finally:
        if first is not None and is_terminal:
            print(file=sys.stderr, flush=True)
