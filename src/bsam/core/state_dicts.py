"""Splitting an optimizer's state dict."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any


def base_state(state_dict: dict[str, Any], names: str) -> dict[str, Any]:
    """Return the base optimizer's part of a state dict that also holds the state of a method.

    The groups list the names of the method's entries under the key ``names``.
    """
    method_names = {name for group in state_dict["param_groups"] for name in group.get(names, ())}
    groups = [{k: v for k, v in group.items() if k not in method_names} for group in state_dict["param_groups"]]
    return {**state_dict, "state": without(state_dict["state"], method_names), "param_groups": groups}


def without(entries: dict[Any, Any], names: Collection[str]) -> dict[Any, Any]:
    """Return the state without the entries whose names are in ``names``. State that belongs to no parameter is kept."""
    kept = {}
    for i, entry in entries.items():
        if isinstance(entry, dict):
            entry = {k: v for k, v in entry.items() if k not in names}
            if not entry:
                continue
        kept[i] = entry
    return kept
