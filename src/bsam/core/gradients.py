"""Memory for the gradients of a step."""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from ..common.errors import BsamRuntimeError
from ..common.layout import BucketedTensors, Layout
from .vector import Term, Vector
from .weights import Weights


class GradientMemory:
    """Decide where the gradients of a step are stored, which of them may be overwritten, and which are copied.

    A pass leaves its gradient in ``p.grad``. :meth:`take` turns it into a vector without a copy; evaluating the
    direction may overwrite it. Gradients are copied only if their memory will be written again, by DDP's buckets or the
    CUDA graphs of ``torch.compile``. On the CPU, allocating costs more than copying: before the next pass, the gradient
    is moved to memory that is kept between steps, so that the next pass reuses its memory.
    """

    def __init__(self) -> None:
        self._layout = Layout([])
        self._kept: list[BucketedTensors] = []  # memory for the gradients of a step, in order
        self._used = 0  # how many of them are in use
        self._latest: Term | None = None  # the gradient of the latest pass

    def begin(self, weights: Weights) -> None:
        """Begin a step."""
        if weights.layout is not self._layout:
            self._layout, self._kept = weights.layout, []
        self._weights, self._used, self._latest = weights, 0, None

    def begin_pass(self) -> None:
        """On the CPU, move the previous pass's gradient, so that this pass can reuse its memory."""
        if self._latest is not None and self._layout.on_cpu:
            if self._used == len(self._kept):
                self._kept.append(self._weights.allocate())
            self._latest.move_to(self._kept[self._used])
            self._latest, self._used = None, self._used + 1

    def leave_in_place(self) -> None:
        """Do not move the latest gradient: the passes that follow belong to observers."""
        self._latest = None

    def take(self, grads: list[Tensor | None]) -> Vector:
        """Return gradients, one per parameter, as a vector; None counts as zero."""
        params = self._weights.params
        copy = _written_by_cuda_graphs(params[0].device)
        tensors = (_unshared(g, p, copy) for g, p in zip(grads, params, strict=True))
        gradient = Vector(tensors, self._layout, scratch=True)
        (self._latest,) = gradient.terms
        return gradient


def _written_by_cuda_graphs(device: torch.device) -> bool:
    """Whether CUDA graphs of ``torch.compile`` may write the next gradients into the current ones' memory."""
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    return (
        device.type == "cuda"
        and trees is not None
        and trees.get_manager(device.index, create_if_none_exists=False) is not None
    )


def _unshared(g: Tensor | None, p: Tensor, copy: bool) -> Tensor:
    """Return a gradient that shares no memory (a view may belong to DDP's buckets) and has its parameter's strides,
    with which foreach operations are fast.
    """
    if g is None:
        return torch.zeros_like(p, requires_grad=False)
    if g.layout != torch.strided:
        raise BsamRuntimeError(
            "sharpness-aware methods do not support sparse gradients: build nn.Embedding with sparse=False"
        )
    if copy or g._is_view() or g.is_conj() or g.is_neg() or g.stride() != p.stride():
        return torch.empty_like(p, requires_grad=False).copy_(g)
    return g
