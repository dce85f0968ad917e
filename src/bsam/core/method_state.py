"""What a method remembers between steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from .vector import Vector
from .weights import Weights

Remembered: TypeAlias = dict[Tensor, Tensor] | float  # one tensor per parameter, or a number


class MethodState:
    """Vectors by name, one tensor per parameter, and numbers by name, which are stored in the parameter groups.

    What :meth:`remember` is given takes effect with the step: a backward that raises leaves nothing behind, and a step
    that is skipped (because a scaled gradient overflowed, or by the user) is not remembered. Of several backwards
    before a step, each reads what the previous step stored, and the values of the last one are stored.
    """

    def __init__(self, vectors: Sequence[str], numbers: Sequence[str]) -> None:
        self.vectors, self.numbers = vectors, numbers
        self._tensors: dict[Tensor, dict[str, Tensor]] = defaultdict(dict)
        self._current: dict[str, Remembered] = {}  # of the backward that is running
        self.pending: dict[str, Remembered] = {}  # of the backwards since the last step

    def begin(self) -> None:
        """Begin a backward, and discard what one that raised has left."""
        self._current = {}

    def remember(self, name: str, value: Vector | float, weights: Weights) -> None:
        """Note a vector or a number of the backward that is running."""
        self._current[name] = (
            dict(zip(weights.params, value.tensors(weights.params), strict=True))
            if isinstance(value, Vector)
            else value
        )

    def stage(self, with_grad: Sequence[Tensor]) -> None:
        """Make the values of a successful backward pending, for the parameters that got a gradient."""
        for name, value in self._current.items():
            self.pending[name] = {p: value[p] for p in with_grad} if isinstance(value, dict) else value

    def discard(self) -> None:
        """Drop pending values."""
        self._current, self.pending = {}, {}

    def commit(self, param_groups: Sequence[dict[str, Any]]) -> None:
        """Store pending values: the step is taken."""
        for name, value in self.pending.items():
            if isinstance(value, dict):
                for p, t in value.items():
                    self._tensors[p][name] = t
            else:
                for group in param_groups:
                    group[name] = value

    def recall(self, name: str, weights: Weights) -> Vector | None:
        """Return the vector stored under ``name``, zero for parameters without an entry; None if none has one."""
        found = [self._tensors[p].get(name) for p in weights.params]
        if all(t is None for t in found):
            return None
        tensors = (
            torch.zeros_like(p, requires_grad=False) if t is None else t.to(p)
            for t, p in zip(found, weights.params, strict=True)
        )
        return Vector(tensors, weights.layout)

    def merge_into(self, state_dict: dict[str, Any], param_groups: Sequence[dict[str, Any]]) -> None:
        """Add the vectors to a state dict of the base optimizer, whose groups hold the numbers already."""
        for i, p in _numbered(state_dict, param_groups):
            if self._tensors[p]:
                state_dict["state"][i] = {**state_dict["state"].get(i, {}), **self._tensors[p]}

    def load(self, state_dict: dict[str, Any], param_groups: Sequence[dict[str, Any]]) -> None:
        """Take the vectors from a merged state dict."""
        self._tensors.clear()
        for i, p in _numbered(state_dict, param_groups):
            entry = state_dict["state"].get(i, {})
            self._tensors[p] = {
                k: entry[k].to(device=p.device, dtype=p.dtype, copy=True) for k in self.vectors if k in entry
            }


def _numbered(state_dict: dict[str, Any], param_groups: Sequence[dict[str, Any]]) -> Iterator[tuple[Any, Tensor]]:
    """Iterate over the parameters with their numbers in a state dict."""
    for packed, group in zip(state_dict["param_groups"], param_groups, strict=True):
        yield from zip(packed["params"], group["params"], strict=True)
