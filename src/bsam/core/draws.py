"""Random numbers of the passes of a step."""

from __future__ import annotations

from collections.abc import Iterable

import torch


class Draws:
    """Lets all passes of a step see the same random draws, so that what is perturbed is one function.

    The generators are torch's: that of the CPU and those of the parameters' CUDA devices. Their states are noted before
    the first pass of a step and set again before each later one; after the step they are where the first pass left
    them.

    While a CUDA graph is captured, states of CUDA generators can be neither read nor set. Each later pass then takes
    its random numbers from a clone of the generator that was registered with the graph before the capture
    (:meth:`clones`); without such clones, passes of a captured step draw on their own.
    """

    def __init__(self, same: bool) -> None:
        self._same = same
        self._pass = 0  # of this step
        self._most = 1  # passes of a step, so far
        self._before: list[tuple[torch.Generator, torch.Tensor]] = []
        self._after: list[tuple[torch.Generator, torch.Tensor]] = []
        # while a graph is captured: the CUDA generators, and the states they had before
        self._captured: list[tuple[torch.Generator, torch.Generator]] = []
        self._clones: dict[int, list[torch.Generator]] = {}  # by device index, one for each later pass

    def begin(self) -> None:
        """A step begins: forget what one that was layout short has left."""
        self._pass, self._before, self._after, self._captured = 0, [], [], []

    def begin_pass(self, devices: Iterable[torch.device]) -> None:
        """To call before each pass: notes the states before the first, and sets them before a later one."""
        self._pass += 1
        self._most = max(self._most, self._pass)
        if not self._same:
            return
        if self._pass == 1:
            indices = [device.index for device in devices if device.type == "cuda"]
            on_gpu = [torch.cuda.default_generators[i] for i in indices]
            capturing = bool(on_gpu) and torch.cuda.is_current_stream_capturing()
            readable = [torch.default_generator, *([] if capturing else on_gpu)]
            self._before = [(g, g.get_state()) for g in readable]
            if capturing:
                self._captured = [(g, g.graphsafe_get_state()) for g in on_gpu]
            return
        for generator, state in self._before:
            generator.set_state(state)
        for generator, _ in self._captured:
            clones = self._clones.get(generator.device.index, [])
            if self._pass - 2 < len(clones):
                generator.graphsafe_set_state(clones[self._pass - 2])

    def end_pass(self) -> None:
        """To call after each pass that did not raise: notes where the first one left the generators."""
        if self._pass == 1:
            self._after = [(g, g.get_state()) for g, _ in self._before]

    def close(self) -> None:
        """After the step: the generators go where its first pass left them. To call it again does no harm."""
        if self._pass > 1:
            for generator, state in self._after:
                generator.set_state(state)
        for generator, own in self._captured:
            generator.graphsafe_set_state(own)
        self.begin()

    def clones(self, devices: Iterable[torch.device]) -> list[torch.Generator]:
        """New clones of the CUDA generators, one for each later pass of a step; to register before the capture."""
        if not self._same:
            return []
        indices = [device.index for device in devices if device.type == "cuda"]
        later = range(self._most - 1)
        self._clones = {i: [torch.cuda.default_generators[i].clone_state() for _ in later] for i in indices}
        return [clone for clones in self._clones.values() for clone in clones]

    def align(self) -> None:
        """Set the clones to the states of their generators, which may have been used since the last replay."""
        for index, clones in self._clones.items():
            state = torch.cuda.default_generators[index].get_state()
            for clone in clones:
                clone.set_state(state)
