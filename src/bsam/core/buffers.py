"""The buffers of the modules that the closure runs, during the passes of a step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from .layout import sharding

LARGE = 2**20  # bytes; larger buffers are copied only if they move

Copies = list[tuple[list[Tensor], list[Tensor], list[Tensor]]]  # buffers, their values before the step, after a pass


class Buffers:
    """Show every pass of a step the buffers as they were before the step, and leave them as the first pass left them.

    So the statistics of batch norm, the vectors of spectral norm and averages of a module move once a step, and all
    passes evaluate the same function. It does not matter who writes to a buffer, nor whether it is written in place or
    replaced. In-place writes of batch norm do not change a tensor's version, so small buffers are copied in every step.
    A large one is copied if it moved in the first step or its version has changed since.

    A module whose first batch sets its buffers for good has an attribute ``buffers_set_once = True`` and keeps them.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[Any, str, Tensor | None]] = []  # the dict of a module, a name, what it held
        self._first: list[Tensor | None] = []  # what the first pass left there
        self._tensors: list[Tensor] = []
        self._copies: Copies = []
        self._still: list[tuple[Tensor, int]] = []  # large buffers that did not move, and their versions
        self._compared = False
        self._saved, self._passes = False, 0

    @torch.no_grad()
    def save(self, modules: Sequence[nn.Module]) -> None:
        """Save the buffers of these modules. Call before the first pass of a step."""
        self._saved, self._passes = False, 0
        self._entries = [
            (m._buffers, name, t)
            for root in modules
            for m in root.modules()
            if m._buffers and not getattr(m, "buffers_set_once", False)
            for name, t in m._buffers.items()
        ]
        tensors = [t for _, _, t in self._entries if t is not None and _is_writable(t)]
        unchanged = len(tensors) == len(self._tensors) and all(map(_is, tensors, self._tensors))
        if not unchanged or any(t._version != version for t, version in self._still):
            self._tensors, self._still, self._compared = tensors, [], False
            self._copies = _grouped(tensors)
        for buffers, before, _ in self._copies:
            _copy(buffers, into=before)
        self._saved = True

    @torch.no_grad()
    def begin_pass(self, modules: Sequence[nn.Module]) -> None:
        """Save the buffers before the first pass of a step, and restore them before a later one."""
        if not self._saved:
            self.save(modules)
        if self._passes == 1:
            self._first = [entries[name] for entries, name, _ in self._entries]
            self._ignore_still_ones()
            for buffers, _, after in self._copies:
                _copy(buffers, into=after)
        if self._passes >= 1:
            self._restore_before()
        self._passes += 1

    @torch.no_grad()
    def close(self, failed: bool = False) -> None:
        """Leave the buffers as the first pass left them, or as before the step if it failed. Again: no effect."""
        if self._saved and failed:
            self._restore_before()
        elif self._passes > 1:
            for (entries, name, _), t in zip(self._entries, self._first, strict=True):
                _rebind(entries, name, t)
            for buffers, _, after in self._copies:
                _write(after, into=buffers)
        self._saved, self._passes, self._first = False, 0, []

    def _restore_before(self) -> None:
        for entries, name, t in self._entries:
            _rebind(entries, name, t)
        for buffers, before, _ in self._copies:
            _write(before, into=buffers)

    def _ignore_still_ones(self) -> None:
        """Find the large buffers that the first pass has not moved; they are not copied from now on."""
        if self._compared or any(t.is_cuda and torch.cuda.is_current_stream_capturing() for t in self._tensors):
            return
        self._compared = True
        pairs = [pair for buffers, before, _ in self._copies for pair in zip(buffers, before, strict=True)]
        self._still = [(t, t._version) for t, old in pairs if t.nbytes > LARGE and torch.equal(t, old)]
        ignored = {id(t) for t, _ in self._still}
        kept = [[entry for entry in zip(*lists, strict=True) if id(entry[0]) not in ignored] for lists in self._copies]
        self._copies = [tuple(map(list, zip(*entries, strict=True))) for entries in kept if entries]  # type: ignore[misc]


def _is(a: object, b: object) -> bool:
    return a is b


def _is_writable(t: Tensor) -> bool:
    """Whether a forward pass can write to a buffer in place: not if it is expanded, sparse or made for inference."""
    if t.layout != torch.strided or t.is_inference() or sharding(t) is not None:
        return False
    return all(stride != 0 or n == 1 for n, stride in zip(t.shape, t.stride(), strict=True))


def _grouped(tensors: Sequence[Tensor]) -> Copies:
    """Group tensors by device and dtype, which foreach operations are fast on, and allocate both copies of each."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for t in tensors:
        groups[t.device, t.dtype].append(t)
    return [(g, [torch.empty_like(t) for t in g], [torch.empty_like(t) for t in g]) for g in groups.values()]


def _copy(source: list[Tensor], into: list[Tensor]) -> None:
    for t, s in zip(into, source, strict=True):
        if t.shape != s.shape:  # an observer that finds the number of channels in its first batch
            t.resize_(s.shape)
    torch._foreach_copy_(into, source)


def _write(source: list[Tensor], into: list[Tensor]) -> None:
    """Copy without a new version: a graph that the user keeps, in which a buffer was saved, stays valid."""
    with _unsafe_preserve_version_counter(tuple(into)):
        _copy(source, into)


def _rebind(entries: Any, name: str, t: Tensor | None) -> None:
    if type(entries) is dict and entries.get(name) is not t:  # that of a scripted module is no dict, and not assigned
        entries[name] = t
