"""Look up names given by the user, in upper or lower case, with a suggestion for typos."""

from __future__ import annotations

import difflib
from collections.abc import Collection

from ...common.errors import BsamValueError


def find_name(kind: str, name: object, known: Collection[str]) -> str:
    """Return the known name that equals ``name``, ignoring case; if there is none, raise with the closest match.

    Args:
        kind: what is looked up, for the error message, such as ``"method"``.
        name: the user's input.
        known: the valid names.
    """
    by_lower = {valid.lower(): valid for valid in known}
    lower = str(name).lower()
    if lower in by_lower:
        return by_lower[lower]
    closest = difflib.get_close_matches(lower, by_lower, n=1)
    hint = f". Did you mean {by_lower[closest[0]]!r}?" if closest else ""
    raise BsamValueError(f"{kind} must be one of {', '.join(known)}; got {name!r}{hint}")
