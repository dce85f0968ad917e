"""Values that a method remembers between steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from .layout import local
from .vector import Vector
from .weights import Weights

Remembered: TypeAlias = dict[Tensor, Tensor] | float  # one tensor per parameter, or a number


class MethodState:
    """Named vectors, one tensor per parameter, and named numbers, which are stored in the parameter groups.

    Values passed to :meth:`remember` are stored when the step is taken: a backward that raises leaves nothing behind,
    and a skipped step (because of an overflow, or by the user) stores nothing. If several backwards precede a step,
    all of them read the values of the previous step, and the values of the last one are stored.
    """

    def __init__(self, vectors: Sequence[str], numbers: Sequence[str]) -> None:
        self.vectors, self.numbers = vectors, numbers
        self._tensors: dict[Tensor, dict[str, Tensor]] = defaultdict(dict)
        self._current: dict[str, Remembered] = {}  # from the current backward
        self.pending: dict[str, Remembered] = {}  # from finished backwards since the last step

    def begin(self) -> None:
        """Begin a backward; discard values of one that raised."""
        self._current = {}

    def remember(self, name: str, value: Vector | float, weights: Weights) -> None:
        """Keep a vector or a number of the current backward."""
        self._current[name] = (
            dict(zip(weights.params, value.tensors(weights.params), strict=True))
            if isinstance(value, Vector)
            else value
        )

    def stage(self, with_grad: Sequence[Tensor]) -> None:
        """Make the values of a successful backward pending, for parameters with a gradient."""
        for name, value in self._current.items():
            self.pending[name] = {p: value[p] for p in with_grad} if isinstance(value, dict) else value

    def discard(self) -> None:
        """Drop pending values."""
        self._current, self.pending = {}, {}

    @torch.no_grad()
    def commit(self, param_groups: Sequence[dict[str, Any]]) -> None:
        """Store the pending values, after the step. Vectors keep their memory, which a CUDA graph may read."""
        for name, value in self.pending.items():
            if isinstance(value, dict):
                kept = [self._tensors[p].setdefault(name, t) for p, t in value.items()]
                if all(_alike(a, b) for a, b in zip(kept, value.values(), strict=True)):
                    torch._foreach_copy_([local(t) for t in kept], [local(t) for t in value.values()])
                else:
                    for p, t in value.items():
                        self._tensors[p][name] = t
            else:
                for group in param_groups:
                    group[name] = value

    def recall(self, name: str, weights: Weights, missing: Vector | None = None) -> Vector | None:
        """Return the vector stored under ``name``, as :meth:`SharpnessAware.recall` does."""
        stored = [self._tensors[p].get(name) for p in weights.params]
        if all(t is None for t in stored):
            return missing
        others: Sequence[Tensor] = weights.params  # not used if there is an entry for each
        if any(t is None for t in stored):
            zeros = [torch.zeros_like(p, requires_grad=False) for p in weights.params]
            others = zeros if missing is None else missing.tensors(weights.params)
        entries = (other if t is None else t for t, other in zip(stored, others, strict=True))
        tensors = (t if _alike(t, p) else t.to(p) for t, p in zip(entries, weights.params, strict=True))
        return Vector(tensors, weights.layout)

    def merge_into(self, state_dict: dict[str, Any], param_groups: Sequence[dict[str, Any]]) -> None:
        """Add the vectors to a state dict of the base optimizer. Its groups already hold the numbers."""
        for i, p in _numbered(state_dict, param_groups):
            if self._tensors[p]:
                state_dict["state"][i] = {**state_dict["state"].get(i, {}), **self._tensors[p]}

    def load(self, state_dict: dict[str, Any], param_groups: Sequence[dict[str, Any]]) -> None:
        """Load the vectors from a merged state dict."""
        self._tensors.clear()
        for i, p in _numbered(state_dict, param_groups):
            entry = state_dict["state"].get(i, {})
            self._tensors[p] = {
                k: entry[k].to(device=p.device, dtype=p.dtype, copy=True) for k in self.vectors if k in entry
            }


def _alike(a: Tensor, b: Tensor) -> bool:
    return (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)


def _numbered(state_dict: dict[str, Any], param_groups: Sequence[dict[str, Any]]) -> Iterator[tuple[Any, Tensor]]:
    """Iterate over the parameters and their indices in a state dict."""
    for packed, group in zip(state_dict["param_groups"], param_groups, strict=True):
        yield from zip(packed["params"], group["params"], strict=True)
