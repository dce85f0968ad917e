"""Repeating random draws in the passes of a step."""

from __future__ import annotations

from collections.abc import Iterable

import torch

States = list[tuple[torch.Generator, torch.Tensor]]


class RngReplay:
    """Give all passes of a step the same random numbers, so that they evaluate the same function.

    This covers torch's default generators for the CPU and for the parameters' CUDA devices. Their states are saved
    before the first pass of a step and restored before every later one; after the step they are where the first pass
    left them.

    During the capture of a CUDA graph, the states of CUDA generators can be neither read nor set. Every later pass then
    draws from a clone of the generator, registered with the graph before the capture (:meth:`make_clones`); without
    clones, the passes of a captured step draw independently.
    """

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled
        self._pass = 0  # in this step
        self._max_passes = 1  # in any step so far
        self._before: States = []
        self._after: States = []
        # during a capture: the CUDA generators, and their states before it
        self._captured: list[tuple[torch.Generator, torch.Generator]] = []
        self._clones: dict[int, list[torch.Generator]] = {}  # by device index, one per later pass

    def begin(self) -> None:
        """Begin a step; discard the states of an interrupted one."""
        self._pass, self._before, self._after, self._captured = 0, [], [], []

    def begin_pass(self, devices: Iterable[torch.device]) -> None:
        """Save the states before the first pass of a step; restore them before every later pass."""
        self._pass += 1
        self._max_passes = max(self._max_passes, self._pass)
        if not self._enabled:
            return
        if self._pass == 1:
            on_gpu = [torch.cuda.default_generators[i] for i in _cuda_indices(devices)]
            capturing = bool(on_gpu) and torch.cuda.is_current_stream_capturing()
            readable = [torch.default_generator, *([] if capturing else on_gpu)]
            self._before = [(g, g.get_state()) for g in readable]
            if capturing:
                self._captured = [(g, g.graphsafe_get_state()) for g in on_gpu]
            return
        _set(self._before)
        for generator, _ in self._captured:
            clones = self._clones.get(generator.device.index, [])
            if self._pass - 2 < len(clones):
                generator.graphsafe_set_state(clones[self._pass - 2])

    def first_began_with(self, states: States) -> None:
        """Restore these states before later passes: a framework ran the first pass from them, before this step."""
        if self._enabled:
            self._before = states

    def end_pass(self) -> None:
        """Save the states after the first pass. Call this after every pass that did not raise."""
        if self._pass == 1:
            self._after = [(g, g.get_state()) for g, _ in self._before]

    def close(self) -> None:
        """Set the generators to their states after the first pass. Calling it again has no effect."""
        if self._pass > 1:
            _set(self._after)
        for generator, state in self._captured:
            generator.graphsafe_set_state(state)
        self.begin()

    def make_clones(self, devices: Iterable[torch.device]) -> list[torch.Generator]:
        """Clone the CUDA generators once per later pass. The clones must be registered before the capture.

        Later calls return the same clones, so that several graphs can use them.
        """
        if not self._enabled:
            return []
        for i in _cuda_indices(devices):
            clones = self._clones.setdefault(i, [])
            missing = self._max_passes - 1 - len(clones)
            clones += [torch.cuda.default_generators[i].clone_state() for _ in range(missing)]
        self.update_clones()
        return [clone for clones in self._clones.values() for clone in clones]

    def update_clones(self) -> None:
        """Set the clones to the states of their generators, which may have advanced since the last replay."""
        for index, clones in self._clones.items():
            state = torch.cuda.default_generators[index].get_state()
            for clone in clones:
                clone.set_state(state)


def _cuda_indices(devices: Iterable[torch.device]) -> list[int]:
    return [device.index for device in devices if device.type == "cuda"]


def _set(states: States) -> None:
    for generator, state in states:
        generator.set_state(state)
