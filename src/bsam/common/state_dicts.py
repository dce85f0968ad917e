"""Parts of an optimizer's state dict."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any


def base_state(state_dict: dict[str, Any], names: str) -> dict[str, Any]:
    """Return the base optimizer's part of a state dict that was merged with any method.

    The groups of the state dict list the method's names under the key ``names``.
    """
    own = {name for group in state_dict["param_groups"] for name in group.get(names, ())}
    groups = [{k: v for k, v in group.items() if k not in own} for group in state_dict["param_groups"]]
    return {**state_dict, "state": without(state_dict["state"], own), "param_groups": groups}


def without(entries: dict[Any, Any], names: Collection[str]) -> dict[Any, Any]:
    """Return state entries without some names. What an optimizer stores beside entries of parameters stays as it is."""
    own = {}
    for i, entry in entries.items():
        if isinstance(entry, dict):
            entry = {k: v for k, v in entry.items() if k not in names}
            if not entry:
                continue
        own[i] = entry
    return own
