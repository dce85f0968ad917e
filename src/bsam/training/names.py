"""Names that a user gives: in any case, with a suggestion for a typo."""

from __future__ import annotations

import difflib
from collections.abc import Collection

from ..common.errors import BsamValueError


def find_name(kind: str, name: object, known: Collection[str]) -> str:
    """Return the known name that equals ``name`` in another case; else raise, with the closest one.

    Args:
        kind: what the name is of, for the error.
        name: what the user gave.
        known: the names.
    """
    by_lower = {each.lower(): each for each in known}
    lower = str(name).lower()
    if lower in by_lower:
        return by_lower[lower]
    closest = difflib.get_close_matches(lower, by_lower, n=1)
    hint = f". Did you mean {by_lower[closest[0]]!r}?" if closest else ""
    raise BsamValueError(f"{kind} must be one of {', '.join(known)}; got {name!r}{hint}")
