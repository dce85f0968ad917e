"""What a method remembers between steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .vector import Vector
from .weights import Weights


class Memory:
    """Vectors by name, one tensor per parameter, and numbers by name, which live in the parameter groups.

    What :meth:`keep` is given counts only after :meth:`commit`: a backward that raises leaves no trace.
    """

    def __init__(self, vectors: Sequence[str], numbers: Sequence[str]) -> None:
        self.vectors, self.numbers = vectors, numbers
        self._tensors: dict[Tensor, dict[str, Tensor]] = defaultdict(dict)
        self._pending: dict[str, list[Tensor] | float] = {}

    def begin(self) -> None:
        """Forget what was kept and not committed."""
        self._pending = {}

    def keep(self, name: str, value: Vector | float, weights: Weights) -> None:
        """Note a vector or a number of this step."""
        self._pending[name] = value.tensors(weights.params) if isinstance(value, Vector) else value

    def commit(self, weights: Weights, param_groups: Sequence[dict[str, Any]]) -> None:
        """Let what was kept count."""
        for name, value in self._pending.items():
            if isinstance(value, list):
                for p, t in zip(weights.params, value, strict=True):
                    self._tensors[p][name] = t
            else:
                for group in param_groups:
                    group[name] = value
        self.begin()

    def vector(self, name: str, weights: Weights) -> Vector | None:
        """The vector under ``name``, with zeros for parameters that came later; None if there is none."""
        found = [self._tensors[p].get(name) for p in weights.params]
        if all(t is None for t in found):
            return None
        tensors = (torch.zeros_like(p, requires_grad=False) if t is None else t for t, p in zip(found, weights.params, strict=True))
        return Vector(tensors, weights.cut)

    def merge_into(self, state_dict: dict[str, Any], param_groups: Sequence[dict[str, Any]]) -> None:
        """Add the vectors to a state dict of the base optimizer; the numbers are in its groups already."""
        for packed, group in zip(state_dict["param_groups"], param_groups, strict=True):
            for i, p in zip(packed["params"], group["params"], strict=True):
                if self._tensors[p]:
                    state_dict["state"][i] = {**state_dict["state"].get(i, {}), **self._tensors[p]}

    def without(self, entries: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
        """The entries of a merged state that are the base optimizer's."""
        own = {i: {k: v for k, v in entry.items() if k not in self.vectors} for i, entry in entries.items()}
        return {i: entry for i, entry in own.items() if entry}

    def load(self, state_dict: dict[str, Any], param_groups: Sequence[dict[str, Any]]) -> None:
        """Take the vectors out of a merged state dict."""
        self._tensors.clear()
        for packed, group in zip(state_dict["param_groups"], param_groups, strict=True):
            for i, p in zip(packed["params"], group["params"], strict=True):
                entry = state_dict["state"].get(i, {})
                self._tensors[p] = {k: entry[k].to(device=p.device, dtype=p.dtype, copy=True) for k in self.vectors if k in entry}
