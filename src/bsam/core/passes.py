"""The parts of a pass besides the weights: buffers, random generators, and modules that are not trained."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from .ranks import find_ddp
from .tensors import Memory, copy, is_writable, sharding
from .vector import Vector


class PassPart:
    """Something that the passes of a step use or change. ``Objective`` calls all parts, in one order.

    The parts are the weights, ``p.grad``, the buffers, the random generators and modules that are not trained.
    """

    def begin_pass(self, number: int, at: Vector | None) -> None:
        """Prepare the pass with this number, from 0, at ``w + at``."""

    def end_step(self, failed: bool) -> None:
        """End the passes of a step; if one of them failed, restore what it changed.

        After an error or interrupt later in the step, this is called again, with ``failed``, for all parts.
        """

    def restart(self) -> None:
        """Discard the passes so far, as if they had failed: the next one is the first."""
        self.end_step(failed=True)


# buffers of one device and dtype, copies from before the step, copies from after the first pass
_Group = tuple[list[Tensor], list[Tensor], list[Tensor]]
_Entry = tuple[Any, str, Tensor | None]  # a module's ``_buffers``, a name in it, and its tensor before the step


class Buffers(PassPart):
    """Start every pass of a step with the buffers from before it; end the step with those that the first pass left.

    Batch norm's statistics and other running averages are thus updated once per step, and all passes evaluate the same
    function, whether a buffer is written in place or replaced. All buffers are copied in every step: batch norm writes
    in place without a new tensor version. A buffer that the first pass creates has no earlier value: later passes start
    from the one that it left. A buffer that shares memory with a parameter moves with it. Modules whose class sets
    ``buffers_set_once = True`` are left out: their first batch initializes their buffers.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._entries: list[_Entry] = []
        self._first: list[Tensor | None] = []  # the tensors in these entries after the first pass
        self._groups: list[_Group] = []
        self.saved = False  # whether they are saved, for the next step or the one under way

    @torch.no_grad()
    def save(self) -> None:
        """Save the buffers before the first pass of a step."""
        self.saved = False
        self._first = []
        self._all = [
            m._buffers
            for root in self._modules
            for m in root.modules()
            if not getattr(type(m), "buffers_set_once", False)
        ]
        entries = _entries(self._all)
        tensors = [t for _, _, t in entries]
        earlier = [t for _, _, t in self._entries]
        if len(tensors) != len(earlier) or any(a is not b for a, b in zip(tensors, earlier, strict=True)):
            self._groups = self._allocate(tensors)
        self._entries = entries
        for buffers, before, _ in self._groups:
            copy(buffers, into=before)
        self.saved = True

    @torch.no_grad()
    def begin_pass(self, number: int, at: Vector | None) -> None:
        """Save the buffers before the first pass, and restore them before later ones; keep the first pass's result."""
        if number == 0:
            if not self.saved:
                self.save()
            return
        if number == 1:
            if sum(map(len, self._all)) != len(self._entries):
                self._add_created()
            self._first = [module_buffers[name] for module_buffers, name, _ in self._entries]
            for buffers, _, after in self._groups:
                copy(buffers, into=after)
        self._restore_before()

    @property
    def writable(self) -> list[Tensor]:
        """The buffers that are restored in place."""
        return [t for buffers, _, _ in self._groups for t in buffers]

    @torch.no_grad()
    def end_step(self, failed: bool) -> None:
        """Set the buffers to their values after the first pass, or, if the step failed, before the step."""
        if self.saved and failed:
            self._restore_before()
        elif self._first:
            for (module_buffers, name, _), t in zip(self._entries, self._first, strict=True):
                module_buffers[name] = t
            for buffers, _, after in self._groups:
                copy(after, into=buffers)
        self._first = []

    def _add_created(self) -> None:
        """Add buffers that the first pass created, with the values that it left."""
        listed = {(id(module_buffers), name) for module_buffers, name, _ in self._entries}
        created = [entry for entry in _entries(self._all) if (id(entry[0]), entry[1]) not in listed]
        groups = self._allocate([t for _, _, t in created])
        for buffers, before, _ in groups:
            copy(buffers, into=before)
        self._entries = self._entries + created
        self._groups = self._groups + groups

    def _restore_before(self) -> None:
        for module_buffers, name, t in self._entries:
            if module_buffers[name] is not t:
                module_buffers[name] = t
        for buffers, before, _ in self._groups:
            copy(before, into=buffers)

    def _allocate(self, tensors: list[Tensor | None]) -> list[_Group]:
        """Group buffers by device and dtype for foreach operations, and allocate memory for their copies."""
        weights = Memory(p for root in self._modules for p in root.parameters() if not is_lazy(p))
        groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
        for t in tensors:
            if t is not None and is_writable(t) and not weights.overlaps(t):
                groups[t.device, t.dtype].append(t)
        return [(g, [torch.empty_like(t) for t in g], [torch.empty_like(t) for t in g]) for g in groups.values()]


def _entries(module_buffers: list[Any]) -> list[_Entry]:
    """Return the entries of the modules' dictionaries that have a value or None; lazy buffers have no value yet."""
    items = ((buffers, name, t) for buffers in module_buffers for name, t in buffers.items())
    return [item for item in items if item[2] is None or not is_lazy(item[2])]


class RngReplay(PassPart):
    """Give all passes of a step the same random numbers, so that they evaluate the same function.

    The states of torch's default generators, for the CPU and the parameters' CUDA devices, are saved before the first
    pass of a step and restored before every later one; after the step they are where the first pass left them.

    During the capture of a CUDA graph, the states of CUDA generators can be neither read nor set. Every later pass then
    draws from a clone of the generator, registered with the graph before the capture (:meth:`make_clones`).

    If not ``enabled``, every pass draws new numbers. ``cuda_generators`` returns the parameters' CUDA generators.
    """

    def __init__(self, enabled: bool, cuda_generators: Callable[[], list[torch.Generator]]) -> None:
        self._enabled = enabled
        self._cuda_generators = cuda_generators
        self._max_passes = 1  # in any step so far
        self._clones: dict[torch.Generator, list[torch.Generator]] = {}  # one per later pass
        self._before: list[tuple[torch.Generator, Tensor]] = []
        self._after: list[tuple[torch.Generator, Tensor]] = []  # the first pass
        # during a capture: the CUDA generators, and their states before it
        self._captured: list[tuple[torch.Generator, torch.Generator]] = []

    def save(self) -> None:
        """Save the states before the first pass of a step."""
        if not self._enabled:
            return
        on_gpu = self._cuda_generators()
        if on_gpu and torch.cuda.is_current_stream_capturing():
            self._captured = [(g, g.graphsafe_get_state()) for g in on_gpu]
            on_gpu = []
        self._before = [(g, g.get_state()) for g in (torch.default_generator, *on_gpu)]

    def begin_pass(self, number: int, at: Vector | None) -> None:
        """Save the states before the first pass of a step; restore them before every later pass."""
        self._max_passes = max(self._max_passes, number + 1)
        if number == 0:
            if not self._before:
                self.save()
            return
        if number == 1:
            self._after = [(g, g.get_state()) for g, _ in self._before]
        for generator, state in self._before:
            generator.set_state(state)
        for generator, _ in self._captured:
            clones = self._clones.get(generator, [])
            if number <= len(clones):
                generator.graphsafe_set_state(clones[number - 1])

    def end_step(self, failed: bool) -> None:
        """Set the generators to their states after the first pass."""
        for generator, state in self._after:
            generator.set_state(state)
        for generator, captured_state in self._captured:
            generator.graphsafe_set_state(captured_state)
        self._before = []
        self._after = []
        self._captured = []

    def restart(self) -> None:
        """Let the next pass draw what the first one drew; in the capture of a CUDA graph, it draws new numbers."""
        for generator, state in self._before:
            generator.set_state(state)
        self._after = []
        self.end_step(failed=True)

    def make_clones(self) -> list[torch.Generator]:
        """Clone the CUDA generators once per later pass. The clones must be registered before the capture.

        Later calls return the same clones, so that several graphs can use them.
        """
        for generator in self._cuda_generators() if self._enabled else ():
            clones = self._clones.setdefault(generator, [])
            clones += [generator.clone_state() for _ in range(self._max_passes - 1 - len(clones))]
        self.update_clones()
        return [clone for clones in self._clones.values() for clone in clones]

    def update_clones(self) -> None:
        """Set the clones to the states of their generators, which may have advanced since the last replay."""
        for generator, clones in self._clones.items():
            for clone in clones:
                clone.set_state(generator.get_state())


class OtherModules(PassPart):
    """Modules that the closure calls but the optimizer does not train, such as the discriminator of a GAN.

    Their parameters are frozen during a step unless they are ``trained``: their gradients are not computed, and
    ``p.grad`` stays as it was. If DDP's reducer waits for these gradients, or FSDP shards them, they are computed, and
    ``p.grad`` is restored afterwards.
    """

    def __init__(self, modules: Sequence[nn.Module], trained: Collection[Tensor]) -> None:
        self._modules = modules
        self._trained = trained
        self._frozen: list[Tensor] = []
        self._grads: list[tuple[Tensor, Tensor | None]] = []

    def begin_pass(self, number: int, at: Vector | None) -> None:
        """Freeze the parameters before the first pass."""
        for module in self._modules if number == 0 else ():
            reduced = find_ddp(module) is not None
            for p in module.parameters():
                if not p.requires_grad or p in self._trained:
                    continue
                if reduced or sharding(p) is not None:
                    # a view may belong to DDP's buckets, which the passes overwrite
                    shared = p.grad is not None and p.grad._is_view()
                    self._grads.append((p, p.grad.clone() if shared else p.grad))  # type: ignore[union-attr]
                    p.grad = None
                else:
                    self._frozen.append(p)
                    p.requires_grad_(False)

    def end_step(self, failed: bool) -> None:
        """Restore ``requires_grad`` and ``p.grad``."""
        for p in self._frozen:
            p.requires_grad_(True)
        for p, g in self._grads:
            p.grad = g
