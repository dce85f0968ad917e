"""Text for people: numbers and groups in words, and names from files, whose control characters must not reach a
terminal or break a table.
"""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

# The control characters, with which a terminal can be told to do almost anything, and those that change the direction
# of the text around them.
_DIRECTION = (0x200E, 0x200F, 0x2028, 0x2029, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_ESCAPES = {
    **{code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0))},
    **{code: f"\\u{code:04x}" for code in _DIRECTION},
}
WIDEST = 160  # columns; longer lines are hard to read
_IN_TEXT = {code: escape for code, escape in _ESCAPES.items() if chr(code) not in "\n\t"}


def printable(name: str) -> str:
    r"""Return a name as a single line: with escapes for control characters, and ``?`` for bytes that are not UTF-8.

    Example:
        >>> (
        ...     printable("first\nsecond \x1b[31m"),
        ...     printable(b"caf\xe9".decode("utf-8", "surrogateescape")),
        ... )
        ('first\\x0asecond \\x1b[31m', 'caf?')
    """
    return name.encode("utf-8", "replace").decode().translate(_ESCAPES)


def visible(text: str) -> str:
    r"""Return text for a terminal as :func:`printable` does, but keep line breaks and tabs.

    Example:
        >>> visible("first\nsecond \x1b[31m")
        'first\nsecond \\x1b[31m'
    """
    return text.encode("utf-8", "replace").decode().translate(_IN_TEXT)


def say(text: str, *, to_stderr: bool = False) -> None:
    """Print text at once. All commands print with this function."""
    print(visible(text), file=sys.stderr if to_stderr else sys.stdout, flush=True)


def terminal_width() -> int:
    """Return the number of columns for text: those of the terminal, at most 160; 120 if there is none."""
    return min(shutil.get_terminal_size((120, 24)).columns, WIDEST)


def wrapped(text: str) -> str:
    """Return a sentence as lines that fit in the terminal, broken between words."""
    return textwrap.fill(text, terminal_width(), break_long_words=False, break_on_hyphens=False)


Item = TypeVar("Item")
Key = TypeVar("Key", bound=Hashable)


def group_by(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """Return the items by key, in order of first appearance.

    Example:
        >>> group_by([3, 1, 4, 5], key=lambda n: n % 2)
        {1: [3, 1, 5], 0: [4]}
    """
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def count_text(n: int, noun: str) -> str:
    """Return a number and its noun.

    Example:
        >>> count_text(1, "seed"), count_text(3, "seed")
        ('1 seed', '3 seeds')
    """
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"
