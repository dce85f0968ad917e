"""Run training steps as replays of a CUDA graph."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from ...core.optimizer import SharpnessAware

FILL = 0.9  # the largest share of the free memory that two passes side by side may take
WARM_UP_STEPS = 3  # eager steps before the capture, which allocate, choose kernels and compile


class Step(Protocol):
    """A training step, as far as its capture is concerned."""

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer that takes the step."""

    def kind(self) -> Hashable:
        """Return the kind of the next step."""

    def step(self, *batch: Tensor) -> Tensor:
        """Take a step and return the loss before it."""


@dataclass
class CapturedSteps:
    """Run a few steps eagerly, capture the next one in a CUDA graph, and replay it from then on.

    The learning rate must be a tensor on the device, and all steps of one kind must launch the same sequence of
    kernels. Each kind (:meth:`Step.kind`) has its own graph.

    Args:
        train_step: the step to capture.
        probed: whether a probe reads the step with a given number; such steps run eagerly.
        on_message: called with messages for the user.
    """

    train_step: Step
    probed: Callable[[int], bool] = lambda t: False
    on_message: Callable[[str], None] = lambda sentence: None

    def __post_init__(self) -> None:
        self._eager_steps: Counter[Hashable] = Counter()  # by kind
        self._graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, Tensor]] = {}  # with the loss, by kind

    def __call__(self, *batch: Tensor) -> Tensor:
        """Take one step and return the loss before it, in a tensor that a later step overwrites."""
        optimizer = self.train_step.optimizer
        method = optimizer if isinstance(optimizer, SharpnessAware) else None
        kind = self.train_step.kind()
        if self._eager_steps[kind] < WARM_UP_STEPS or (method is not None and self.probed(method.t)):
            self._eager_steps[kind] += 1
            torch.cuda.reset_peak_memory_stats()
            return self.train_step.step(*batch)
        if not self._graphs:
            self._inputs = [t.clone() for t in batch]
            if method is not None and method.side_by_side:
                method.side_by_side = self._fits_side_by_side()
        for captured, new in zip(self._inputs, batch, strict=True):
            captured.copy_(new)
        if kind not in self._graphs:
            self._graphs[kind] = self._capture()
        elif method is not None:
            method.count_step()  # a replay runs no Python code
        graph, loss = self._graphs[kind]
        graph.replay()
        return loss

    def _capture(self) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        graph = torch.cuda.CUDAGraph()
        if isinstance(self.train_step.optimizer, SharpnessAware):
            for generator in self.train_step.optimizer.generators():
                graph.register_generator_state(generator)
        pools = [earlier.pool() for earlier, _ in self._graphs.values()]  # graphs can share memory: they run in turn
        pool = pools[0] if pools else None
        gc.collect()  # a graph of an earlier run that is destroyed during the capture would make it fail
        with torch.cuda.graph(graph, pool=pool, stream=torch.cuda.current_stream()):
            loss = self.train_step.step(*self._inputs)
        return graph, loss

    def _fits_side_by_side(self) -> bool:
        """Return whether there is memory for two passes at the same time, and tell the user."""
        allocated = torch.cuda.memory_allocated()
        one_pass = torch.cuda.max_memory_allocated() - allocated  # from the last eager step
        weights = sum(p.nbytes for group in self.train_step.optimizer.param_groups for p in group["params"])
        needed = 2 * one_pass + weights
        free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - allocated
        fits = needed < FILL * free
        self.on_message(
            f"The independent passes of a step run {'side by side' if fits else 'in turn'}: side by side they need "
            f"{needed / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB of GPU memory are free."
        )
        return fits
