"""Saving and restoring the buffers of modules between the passes of a step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from .tensors import Memory, copy, copy_keeping_versions, is_writable

# buffers of one device and dtype, copies from before the step, copies from after the first pass
_Group = tuple[list[Tensor], list[Tensor], list[Tensor]]


class Buffers:
    """Start every pass of a step with the buffers from before it; end the step with those that the first pass left.

    The statistics of batch norm, the vectors of spectral norm and other running averages are thus updated once per
    step, and all passes evaluate the same function, whether a buffer is written in place or replaced. All buffers are
    copied in every step: batch norm writes in place without a new tensor version, so changes cannot be detected.

    A buffer that the first pass creates, such as those of lazy modules, has no earlier value: later passes start from
    the value that the first pass left. A buffer that shares memory with a parameter moves with it.

    Modules whose class sets ``buffers_set_once = True`` are left out: their first batch initializes their buffers.
    """

    def __init__(self) -> None:
        # for every buffer: its module's ``_buffers`` dict, its name there, and its tensor before the step
        self._entries: list[tuple[Any, str, Tensor | None]] = []
        self._first: list[Tensor | None] = []  # the tensors in these entries after the first pass
        self._groups: list[_Group] = []
        self._saved, self._passes = False, 0

    @torch.no_grad()
    def save(self, modules: Sequence[nn.Module]) -> None:
        """Save the buffers of ``modules`` before the first pass of a step."""
        self._saved, self._passes = False, 0
        self._all = [m._buffers for root in modules for m in root.modules() if not _set_once(m)]
        entries = _entries(self._all)
        held = [t for _, _, t in entries]
        earlier = [t for _, _, t in self._entries]
        if len(held) != len(earlier) or any(a is not b for a, b in zip(held, earlier, strict=True)):
            self._groups = _allocate(held, modules)
        self._entries = entries
        for buffers, before, _ in self._groups:
            copy(buffers, into=before)
        self._saved = True

    @torch.no_grad()
    def begin_pass(self, modules: Sequence[nn.Module]) -> None:
        """Save the buffers before the first pass, and restore them before later ones; keep the first pass's result."""
        if not self._saved:
            self.save(modules)
        if self._passes == 1:
            if sum(map(len, self._all)) != len(self._entries):
                self._add_created(modules)
            self._first = [module_buffers[name] for module_buffers, name, _ in self._entries]
            for buffers, _, after in self._groups:
                copy(buffers, into=after)
        if self._passes >= 1:
            self._restore_before()
        self._passes += 1

    @property
    def writable(self) -> list[Tensor]:
        """The buffers that are restored in place."""
        return [t for buffers, _, _ in self._groups for t in buffers]

    @torch.no_grad()
    def close(self, failed: bool = False) -> None:
        """Set the buffers to their values after the first pass, or, if the step failed, before the step.

        Calling it again has no effect.
        """
        if self._saved and failed:
            self._restore_before()
        elif self._passes > 1:
            for (module_buffers, name, _), t in zip(self._entries, self._first, strict=True):
                module_buffers[name] = t
            for buffers, _, after in self._groups:
                copy_keeping_versions(after, into=buffers)
        self._saved, self._passes, self._first = False, 0, []

    def _add_created(self, modules: Sequence[nn.Module]) -> None:
        """Add buffers that the first pass created, with the values that it left."""
        listed = {(id(module_buffers), name) for module_buffers, name, _ in self._entries}
        created = [entry for entry in _entries(self._all) if (id(entry[0]), entry[1]) not in listed]
        groups = _allocate([t for _, _, t in created], modules)
        for buffers, before, _ in groups:
            copy(buffers, into=before)
        self._entries, self._groups = self._entries + created, self._groups + groups

    def _restore_before(self) -> None:
        for module_buffers, name, t in self._entries:
            if module_buffers[name] is not t:
                module_buffers[name] = t
        for buffers, before, _ in self._groups:
            copy_keeping_versions(before, into=buffers)


def _set_once(module: nn.Module) -> bool:
    return getattr(type(module), "buffers_set_once", False)


def _entries(buffers: list[Any]) -> list[tuple[Any, str, Tensor | None]]:
    """Return the entries of the modules' dictionaries that have a value or None; lazy buffers have no value yet."""
    return [(held, name, t) for held in buffers if held for name, t in held.items() if t is None or not is_lazy(t)]


def _allocate(tensors: list[Tensor | None], modules: Sequence[nn.Module]) -> list[_Group]:
    """Group buffers by device and dtype for foreach operations, and allocate memory for their copies."""
    weights = Memory(p for root in modules for p in root.parameters() if not is_lazy(p))
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for t in tensors:
        if t is not None and is_writable(t) and not weights.overlaps(t):
            groups[t.device, t.dtype].append(t)
    return [(g, [torch.empty_like(t) for t in g], [torch.empty_like(t) for t in g]) for g in groups.values()]
