"""The memory of the gradients of a step."""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from ..common.errors import BsamRuntimeError
from ..common.layout import BucketedTensors, Layout
from .vector import Term, Vector
from .weights import Weights


class GradientMemory:
    """Decide where the gradients of a step are stored, who may overwrite them, and what is copied.

    A pass leaves its gradient in ``p.grad``. :meth:`take` makes a vector of it without a copy, which the evaluation of
    the direction may overwrite; where somebody else writes to that memory again (DDP's buckets, the CUDA graphs of
    ``torch.compile``), it copies. On the CPU, allocation costs more than a copy: before the next pass its gradient is
    moved to memory that is kept between steps, so that the next pass reuses the memory of this one.
    """

    def __init__(self) -> None:
        self._layout = Layout([])
        self._kept: list[BucketedTensors] = []  # memory for the gradients of a step, in their order
        self._used = 0  # of the kept ones, in this step
        self._latest: Term | None = None  # the gradient of the latest pass

    def begin(self, weights: Weights) -> None:
        """Begin a step."""
        if weights.layout is not self._layout:
            self._layout, self._kept = weights.layout, []
        self._weights, self._used, self._latest = weights, 0, None

    def begin_pass(self) -> None:
        """On the CPU, move the gradient of the previous pass, so that this pass reuses its memory."""
        if self._latest is not None and self._layout.on_cpu:
            if self._used == len(self._kept):
                self._kept.append(self._weights.allocate())
            self._latest.move_to(self._kept[self._used])
            self._latest, self._used = None, self._used + 1

    def leave_in_place(self) -> None:
        """Leave the gradients so far where they are: the passes that follow are not the method's."""
        self._latest = None

    def take(self, grads: list[Tensor | None]) -> Vector:
        """Return gradients, one for each parameter, as a vector; None is zero."""
        params = self._weights.params
        copy = _written_by_cuda_graphs(params[0].device)
        tensors = (_own_memory(g, p, copy) for g, p in zip(grads, params, strict=True))
        gradient = Vector(tensors, self._layout, scratch=True)
        (self._latest,) = gradient.terms
        return gradient


def _written_by_cuda_graphs(device: torch.device) -> bool:
    """Whether CUDA graphs of ``torch.compile`` may write the next gradients into the memory of the current ones."""
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    return (
        device.type == "cuda"
        and trees is not None
        and trees.get_manager(device.index, create_if_none_exists=False) is not None
    )


def _own_memory(g: Tensor | None, p: Tensor, copy: bool) -> Tensor:
    """Return a gradient in memory of its own (a view may be of DDP's buckets), with the strides of its parameter, which
    foreach operations are fast on.
    """
    if g is None:
        return torch.zeros_like(p, requires_grad=False)
    if g.layout != torch.strided:
        raise BsamRuntimeError(
            "a parameter got a sparse gradient, which sharpness-aware methods do not support: build its nn.Embedding "
            "with sparse=False"
        )
    if copy or g._is_view() or g.is_conj() or g.is_neg() or g.stride() != p.stride():
        return torch.empty_like(p, requires_grad=False).copy_(g)
    return g
