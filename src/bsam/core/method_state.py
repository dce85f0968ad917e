"""What a method remembers between steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from .vector import Vector
from .weights import Weights

Kept: TypeAlias = dict[Tensor, Tensor] | float  # one tensor per parameter, or a number


class MethodState:
    """Vectors by name, one tensor per parameter, and numbers by name, which live in the parameter groups.

    What :meth:`keep` is given counts once the step is taken: a backward that raises leaves no trace, and a step that is
    skipped (because a scaled gradient overflowed, or by the user) is not remembered. Of several backwards before a
    step, each sees what the step before left, and the last one's counts.
    """

    def __init__(self, vectors: Sequence[str], numbers: Sequence[str]) -> None:
        self.vectors, self.numbers = vectors, numbers
        self._tensors: dict[Tensor, dict[str, Tensor]] = defaultdict(dict)
        self._noted: dict[str, Kept] = {}  # by the backward that is under way
        self.pending: dict[str, Kept] = {}  # by the backwards since the last step

    def begin(self) -> None:
        """A backward begins: forget what one that raised has left."""
        self._noted = {}

    def keep(self, name: str, value: Vector | float, weights: Weights) -> None:
        """Note a vector or a number."""
        self._noted[name] = (
            dict(zip(weights.params, value.tensors(weights.params), strict=True))
            if isinstance(value, Vector)
            else value
        )

    def settle(self, reached: Sequence[Tensor]) -> None:
        """The backward succeeded: what it noted will count, for the parameters that it reached."""
        for name, value in self._noted.items():
            self.pending[name] = {p: value[p] for p in reached} if isinstance(value, dict) else value

    def forget(self) -> None:
        """Drop what does not count yet."""
        self._noted, self.pending = {}, {}

    def commit(self, param_groups: Sequence[dict[str, Any]]) -> None:
        """The step is taken: let it count."""
        for name, value in self.pending.items():
            if isinstance(value, dict):
                for p, t in value.items():
                    self._tensors[p][name] = t
            else:
                for group in param_groups:
                    group[name] = value

    def vector(self, name: str, weights: Weights) -> Vector | None:
        """The vector under ``name``, with zeros for parameters that it does not know; None if it knows none."""
        found = [self._tensors[p].get(name) for p in weights.params]
        if all(t is None for t in found):
            return None
        tensors = (
            torch.zeros_like(p, requires_grad=False) if t is None else t.to(p)
            for t, p in zip(found, weights.params, strict=True)
        )
        return Vector(tensors, weights.layout)

    def merge_into(self, state_dict: dict[str, Any], param_groups: Sequence[dict[str, Any]]) -> None:
        """Add the vectors to a state dict of the base optimizer; the numbers are in its groups already."""
        for packed, group in zip(state_dict["param_groups"], param_groups, strict=True):
            for i, p in zip(packed["params"], group["params"], strict=True):
                if self._tensors[p]:
                    state_dict["state"][i] = {**state_dict["state"].get(i, {}), **self._tensors[p]}

    def without(self, entries: dict[Any, Any]) -> dict[Any, Any]:
        """The entries of a merged state that are the base optimizer's."""
        return _without(entries, self.vectors)

    def load(self, state_dict: dict[str, Any], param_groups: Sequence[dict[str, Any]]) -> None:
        """Take the vectors out of a merged state dict."""
        self._tensors.clear()
        for packed, group in zip(state_dict["param_groups"], param_groups, strict=True):
            for i, p in zip(packed["params"], group["params"], strict=True):
                entry = state_dict["state"].get(i, {})
                self._tensors[p] = {
                    k: entry[k].to(device=p.device, dtype=p.dtype, copy=True) for k in self.vectors if k in entry
                }


def of_base(state_dict: dict[str, Any], names: str) -> dict[str, Any]:
    """What of a merged state dict is the base optimizer's, whichever method it was merged with.

    Its groups list the names that are the method's, under the key ``names``.
    """
    own = {name for group in state_dict["param_groups"] for name in group.get(names, ())}
    groups = [{k: v for k, v in group.items() if k not in own} for group in state_dict["param_groups"]]
    return {**state_dict, "state": _without(state_dict["state"], own), "param_groups": groups}


def _without(entries: dict[Any, Any], names: Collection[str]) -> dict[Any, Any]:
    """State entries without some names. What an optimizer keeps beside the entries of parameters stays as it is."""
    own = {}
    for i, entry in entries.items():
        if isinstance(entry, dict):
            entry = {k: v for k, v in entry.items() if k not in names}
            if not entry:
                continue
        own[i] = entry
    return own
