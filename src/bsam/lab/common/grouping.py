"""Group items by a key, and count them in words."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

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
