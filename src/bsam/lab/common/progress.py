"""A progress line for long-running work."""

from __future__ import annotations

import contextlib
import shutil
import sys
import time

from .printing import say, visible

INTERVAL = {True: 0.2, False: 60.0}  # seconds between updates, on a terminal and elsewhere


class ProgressLine(contextlib.AbstractContextManager["ProgressLine"]):
    """Show progress on the error stream until the block ends.

    On a terminal one line is redrawn; elsewhere a line is printed every minute and at the end.
    """

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._stages: dict[str, tuple[int, int]] = {}
        self._begun: dict[str, tuple[float, int]] = {}  # when a stage began, and how much was done by then
        self._line = ""
        self._last = -INTERVAL[True] if self._is_terminal else time.monotonic()
        self._is_noted = False

    def reach(self, stage: str, done: int, total: int, note: str | None = None) -> None:
        """Report that ``done`` of ``total`` items are done.

        Args:
            stage: the name of the work. Several stages are shown side by side; a stage whose count falls starts again.
            done: the number of finished items.
            total: the number of all items.
            note: the end of the line; by default the estimated time left. Outside a terminal, no final line is
                printed if the last call had a note.
        """
        now = time.monotonic()
        self._is_noted = note is not None
        if done < self._stages.get(stage, (total + 1, total))[0]:
            self._begun[stage] = now, done
        self._stages[stage] = done, total
        begun, before = self._begun[stage]
        if note is None and before < done < total:
            note = f"about {duration((now - begun) / (done - before) * (total - done))} left"
        counts = (f"{name}: {number} of {most}" for name, (number, most) in self._stages.items())
        self._line = ", ".join([*counts, *([note] if note else [])])
        if now - self._last >= INTERVAL[self._is_terminal]:
            self._last = now
            self._draw()

    def say(self, sentence: str) -> None:
        """Print a sentence on the output stream, above the progress line."""
        has_line = self._is_terminal and bool(self._line)
        if has_line:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
        say(sentence)
        if has_line:
            self._draw()

    def _draw(self) -> None:
        line = visible(self._line)
        shown = f"\r{line[: shutil.get_terminal_size().columns - 1]}\x1b[K" if self._is_terminal else line
        print(shown, end="" if self._is_terminal else "\n", file=sys.stderr, flush=True)

    def __exit__(self, exc_type: type[BaseException] | None, *_: object) -> None:
        if self._line and (self._is_terminal or not (self._is_noted or exc_type)):
            self._draw()
        if self._line and self._is_terminal:
            print(file=sys.stderr, flush=True)


def duration(seconds: float) -> str:
    """Return a duration in words.

    Example:
        >>> duration(0.4), duration(50), duration(400), duration(9000), duration(400_000)
        ('0.4 s', '50 s', '7 min', '2.5 h', '4.6 d')
    """
    if seconds < 10:
        return f"{seconds:.1f} s"
    for size, unit, top in ((1, "s", 100), (60, "min", 100)):
        if seconds / size < top:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.1f} d"
