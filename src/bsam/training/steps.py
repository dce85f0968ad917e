"""Running the steps of a training: one by one, or as one CUDA graph that is replayed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ..core.optimizer import SharpnessAware
from .train_step import TrainStep

WARM_UP = 3  # steps before the capture: they allocate, choose kernels and compile


@contextlib.contextmanager
def side_stream(device: torch.device) -> Iterator[None]:
    """Where everything must happen that a CUDA graph is to capture, from the building of the network on; nothing
    special on a CPU.

    Batches have one shape all through a training, so that a search for the best kernels pays.
    """
    if device.type != "cuda":
        yield
        return
    stream, before = torch.cuda.Stream(device), torch.backends.cudnn.benchmark
    stream.wait_stream(torch.cuda.current_stream(device))
    try:
        torch.backends.cudnn.benchmark = True
        with torch.cuda.stream(stream):
            yield
    finally:
        torch.backends.cudnn.benchmark = before
        torch.cuda.current_stream(device).wait_stream(stream)


class Plain:
    """Steps one by one."""

    def __init__(self, learner: TrainStep) -> None:
        self.learner = learner

    def __call__(self, *batch: Tensor) -> Tensor:
        """One step; the loss before it, which the next step may overwrite."""
        return self.learner.step(*batch)


class Captured(Plain):
    """Steps as one CUDA graph. The first ones are taken plainly, the next one is captured; from then on batches are
    copied to where the graph reads them.

    The learning rate must be a tensor on the device, and every step the same sequence of kernels. Steps that a probe is
    to read are taken plainly.
    """

    def __init__(self, learner: TrainStep, watched: Callable[[int], bool] | None = None) -> None:
        super().__init__(learner)
        self._watched = watched or (lambda t: False)
        self._plain = 0
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, *batch: Tensor) -> Tensor:
        """One step."""
        optimizer = self.learner.optimizer
        if self._plain < WARM_UP or (isinstance(optimizer, SharpnessAware) and self._watched(optimizer.t)):
            self._plain += 1
            return self.learner.step(*batch)
        if self._graph is None:
            self._inputs = [t.clone() for t in batch]
            self._graph = torch.cuda.CUDAGraph()
            if isinstance(optimizer, SharpnessAware):
                for generator in optimizer.generators():
                    self._graph.register_generator_state(generator)
            with torch.cuda.graph(self._graph, stream=torch.cuda.current_stream()):
                self._loss = self.learner.step(*self._inputs)
        else:
            for kept, new in zip(self._inputs, batch, strict=True):
                kept.copy_(new)
            if isinstance(optimizer, SharpnessAware):
                optimizer.count_step()  # what Python does in a step, a graph does not
        self._graph.replay()
        return self._loss
