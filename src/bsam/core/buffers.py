"""The buffers of the modules that the closure runs, during the passes of a step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.nn.parameter import is_lazy

from .layout import sharding

LARGE = 2**20  # bytes; larger buffers are copied only if they move

_Group = tuple[list[Tensor], list[Tensor], list[Tensor]]  # buffers, their values before the step, after the first pass


class Buffers:
    """Show every pass of a step the buffers as they were before the step, and leave them as the first pass left them.

    So the statistics of batch norm, the vectors of spectral norm and averages of a module move once a step, and all
    passes evaluate the same function. It does not matter who writes to a buffer, nor whether it is written in place or
    replaced. In-place writes of batch norm do not change a tensor's version, so small buffers are copied in every step.
    A large one is copied from the step on in which it is seen to move: by its value in its first step, by its version
    in a later one, in which the later passes see it as the first pass left it.

    A class of modules whose first batch initializes their buffers sets ``buffers_set_once = True``, and they keep them.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[Any, str, Tensor | None]] = []  # the dict of a module, a name, what it held
        self._first: list[Tensor | None] = []  # what the first pass left there
        self._held: list[Tensor | None] = []  # what all entries held in the latest step
        self._groups: list[_Group] = []
        self._still: dict[Tensor, int] = {}  # large buffers that have not moved yet, and their versions
        self._moved: set[Tensor] = set()  # large buffers that have
        self._new: list[Tensor] = []  # large buffers of which this is not known yet
        self._saved, self._passes = False, 0

    @torch.no_grad()
    def save(self, modules: Iterable[nn.Module]) -> None:
        """Save the buffers of these modules. Call before the first pass of a step."""
        self._saved, self._passes = False, 0
        owners = [m for root in modules for m in root.modules() if m._buffers]
        self._entries = [
            (m._buffers, name, t)
            for m in owners
            if not getattr(type(m), "buffers_set_once", False)
            for name, t in m._buffers.items()
        ]
        held = [t for _, _, t in self._entries]
        same = len(held) == len(self._held) and all(a is b for a, b in zip(held, self._held, strict=True))
        if not same or not all(map(self._is_still, self._still)):
            self._held = held
            self._copy_only([t for t in held if t is not None and is_writable(t) and not self._is_still(t)])
        for buffers, before, _ in self._groups:
            _copy(buffers, into=before)
        self._saved = True

    @torch.no_grad()
    def begin_pass(self, modules: Iterable[nn.Module]) -> None:
        """Save the buffers before the first pass of a step, and restore them before a later one."""
        if not self._saved:
            self.save(modules)
        if self._passes == 1:
            self._first = [entries[name] for entries, name, _ in self._entries]
            self._sort_large()
            for buffers, _, after in self._groups:
                _copy(buffers, into=after)
        if self._passes >= 1:
            self._restore_before()
        self._passes += 1

    @torch.no_grad()
    def close(self, failed: bool = False) -> None:
        """Leave the buffers as the first pass left them, or as before the step if it failed.

        Calling it again has no effect.
        """
        if self._saved and failed:
            self._restore_before()
        elif self._passes == 1:
            self._sort_large()
        elif self._passes > 1:
            for (entries, name, _), t in zip(self._entries, self._first, strict=True):
                if entries[name] is not t:
                    entries[name] = t
            for buffers, _, after in self._groups:
                write(after, into=buffers)
        self._saved, self._passes, self._first = False, 0, []

    def _restore_before(self) -> None:
        for entries, name, t in self._entries:
            if entries[name] is not t:
                entries[name] = t
        for buffers, before, _ in self._groups:
            write(before, into=buffers)

    def _is_still(self, t: Tensor) -> bool:
        return self._still.get(t) == t._version

    def _copy_only(self, tensors: list[Tensor]) -> None:
        """Let these be the buffers that are copied, and allocate memory for the copies."""
        groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
        for t in tensors:
            groups[t.device, t.dtype].append(t)  # foreach operations are fast on these
        self._groups = [
            (g, [torch.empty_like(t) for t in g], [torch.empty_like(t) for t in g]) for g in groups.values()
        ]
        self._moved &= set(tensors)
        self._new = [t for t in tensors if t.nbytes > LARGE and t not in self._moved]

    def _sort_large(self) -> None:
        """Notice which large buffers the first pass has moved."""
        for t in [t for t in self._still if not self._is_still(t)]:
            del self._still[t]
            self._moved.add(t)
            self._groups.append(([t], [t.clone()], [t.clone()]))  # its value before is lost
        if not self._new or (self._new[0].is_cuda and torch.cuda.is_current_stream_capturing()):
            return
        before = {t: old for group in self._groups for t, old in zip(*group[:2], strict=True)}
        still = {t: t._version for t in self._new if equal(t, before[t])}
        self._still |= still
        self._moved |= set(self._new) - still.keys()
        self._new = []
        kept = [[entry for entry in zip(*group, strict=True) if entry[0] not in still] for group in self._groups]
        self._groups = [tuple(map(list, zip(*group, strict=True))) for group in kept if group]  # type: ignore[misc]


def is_writable(t: Tensor) -> bool:
    """Whether a forward pass can write to a tensor in place: not if it is expanded, sparse or made for inference."""
    if is_lazy(t) or t.layout != torch.strided or t.is_inference() or sharding(t) is not None:
        return False
    return all(stride != 0 or n == 1 for n, stride in zip(t.shape, t.stride(), strict=True))


def equal(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same shape and values; NaN equals NaN."""
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())


def write(source: list[Tensor], into: list[Tensor]) -> None:
    """Copy without a new version: a graph that the user keeps, in which a buffer was saved, stays valid."""
    with _unsafe_preserve_version_counter(tuple(into)):
        _copy(source, into)


def _copy(source: list[Tensor], into: list[Tensor]) -> None:
    if [t.shape for t in into] != [t.shape for t in source]:  # an observer finds its shape in the first batch
        for t, s in zip(into, source, strict=True):
            t.resize_(s.shape)
    torch._foreach_copy_(into, source)
