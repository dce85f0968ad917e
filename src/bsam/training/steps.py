"""Run training steps as replays of a CUDA graph."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ..core.optimizer import SharpnessAware
from .train_step import TrainStep

FILL = 0.9  # the largest share of the free memory that two passes side by side may take
WARM_UP = 3  # eager steps before the capture, which allocate, choose kernels and compile


@contextlib.contextmanager
def side_stream(device: torch.device) -> Iterator[None]:
    """Run the block on a separate CUDA stream; does nothing on a CPU.

    To capture steps in a CUDA graph, the network must be built on that stream, too. cuDNN's benchmark mode is on: all
    batches of a run have the same shape, so searching for the best kernels pays off.
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


class CapturedSteps:
    """Run a few steps eagerly, capture the next one in a CUDA graph, and replay it from then on.

    The learning rate must be a tensor on the device, and every step must launch the same sequence of kernels.

    Args:
        train_step: the step to capture.
        probed: whether a probe reads the step with a given number; such steps run eagerly.
        on_message: called with messages for the user.
    """

    def __init__(
        self,
        train_step: TrainStep,
        probed: Callable[[int], bool] | None = None,
        on_message: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        self.train_step, self._on_message = train_step, on_message
        self._probed = probed or (lambda t: False)
        self._eager_steps = 0
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, *batch: Tensor) -> Tensor:
        """Take one step and return the loss before it, in a tensor that the next step overwrites."""
        optimizer = self.train_step.optimizer
        if self._eager_steps < WARM_UP or (isinstance(optimizer, SharpnessAware) and self._probed(optimizer.t)):
            self._eager_steps += 1
            torch.cuda.reset_peak_memory_stats()
            return self.train_step.step(*batch)
        if self._graph is None:
            if isinstance(optimizer, SharpnessAware) and optimizer.side_by_side:
                optimizer.side_by_side = self._fits_side_by_side()
            self._inputs = [t.clone() for t in batch]
            self._graph = torch.cuda.CUDAGraph()
            if isinstance(optimizer, SharpnessAware):
                for generator in optimizer.generators():
                    self._graph.register_generator_state(generator)
            with torch.cuda.graph(self._graph, stream=torch.cuda.current_stream()):
                self._loss = self.train_step.step(*self._inputs)
        else:
            for captured, new in zip(self._inputs, batch, strict=True):
                captured.copy_(new)
            if isinstance(optimizer, SharpnessAware):
                optimizer.count_step()  # a replay runs no Python code
        self._graph.replay()
        return self._loss

    def _fits_side_by_side(self) -> bool:
        """Return whether there is memory for two passes at the same time, and tell the user."""
        allocated = torch.cuda.memory_allocated()
        one_pass = torch.cuda.max_memory_allocated() - allocated  # from the last eager step
        weights = sum(p.nbytes for group in self.train_step.optimizer.param_groups for p in group["params"])
        needed, free = 2 * one_pass + weights, torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - allocated
        fits = needed < FILL * free
        self._on_message(
            f"The independent passes of a step run {'side by side' if fits else 'in turn'}: side by side they need "
            f"{needed / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB of GPU memory are free."
        )
        return fits
