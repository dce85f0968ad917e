"""The parameters that a method moves and restores, and the memory of their gradients."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from ..common.errors import BsamRuntimeError
from .layout import BucketedTensors, Layout
from .tensors import clear_weight_caches, other_memory
from .vector import Term, Vector


class Weights:
    """The trainable parameters of an optimizer, moved in place and restored bit for bit from a backup.

    The memory of the backup is kept between steps: allocating it costs more than copying into it.
    """

    def __init__(self) -> None:
        self.params: list[Tensor] = []
        self.layout = Layout([])
        self._signature: list[Any] = []
        self._tensors: BucketedTensors = []
        self._backup: BucketedTensors = []
        self.moved = False  # whether the parameters are away from w, which is then in the backup

    def refresh(self, param_groups: Sequence[dict[str, Any]]) -> None:
        """Read the parameter groups again: between steps, parameters may be added, frozen, moved or cast."""
        trained = [(i, p) for i, group in enumerate(param_groups) for p in group["params"] if p.requires_grad]
        self.params = [p for _, p in trained]
        try:
            signature = [(i, type(p), p.device, p.dtype, p.shape, p.stride()) for i, p in trained]
        except (RuntimeError, ValueError) as error:
            if not any(is_lazy(p) for p in self.params):
                raise
            raise BsamRuntimeError(
                "base has lazy parameters, which get their shapes in the first forward pass: run the network once "
                "before training, as in `with torch.no_grad(): model(x)`"
            ) from error
        if signature != self._signature:
            self.layout = Layout(self.params, [i for i, _ in trained])
            self._backup, self._signature = self.allocate(), signature
        self._tensors = self.layout.split(self.params)
        self.commit()

    @property
    def sharded(self) -> bool:
        """Whether some parameters are sharded."""
        return self.mesh is not None

    @property
    def mesh(self) -> Any:
        """The device mesh of sharded parameters; None if no parameter is sharded."""
        return next((bucket.sharding[0] for bucket in self.layout.buckets if bucket.sharding is not None), None)

    @property
    def on_one_gpu(self) -> bool:
        """Whether all parameters are real tensors on one GPU, and not sharded."""
        on_gpu = all(bucket.plain and bucket.device.type == "cuda" for bucket in self.layout.buckets)
        return on_gpu and len(self.layout.devices) == 1

    def allocate(self) -> BucketedTensors:
        """Return uninitialized memory with the sizes and the layout of the parameters."""
        return self.layout.split([torch.empty_like(p, requires_grad=False) for p in self.params])

    @torch.no_grad()
    def move(self, to: Vector) -> None:
        """Move the parameters to ``w + to``, from any position."""
        self._find_shards()
        source, target = (self._backup, self._tensors) if self.moved else (self._tensors, self._backup)
        for tensors, copies in zip(source, target, strict=True):  # all before the first moves: they may share memory
            torch._foreach_copy_(copies, tensors)
        self.moved = True
        for k in range(len(self._tensors)):
            to.add_to(self._tensors, k)
        clear_weight_caches()

    @torch.no_grad()
    def restore(self) -> None:
        """Copy ``w`` from the backup to the parameters; do nothing if they have not moved."""
        if self.moved:
            self._find_shards()
            for tensors, backup in zip(self._tensors, self._backup, strict=True):
                torch._foreach_copy_(tensors, backup)
        self.commit()

    def _find_shards(self) -> None:
        """Look up the memory of sharded parameters: FSDP2 may replace it in the first forward pass."""
        if self.sharded:
            self._tensors = self.layout.split(self.params)

    def commit(self) -> None:
        """Keep the current values as ``w``: the backup is no longer used, and the next move saves a new one."""
        clear_weight_caches()
        self.moved = False

    @contextlib.contextmanager
    def elsewhere(self, *, in_backup: bool = False) -> Iterator[None]:
        """Let the parameters use other memory inside the context, so that moving them leaves ``w`` in place.

        Only for parameters :attr:`on_one_gpu`, which are at ``w``. With ``in_backup`` they use the backup's memory.
        """
        backup, moved = self._backup, self.moved
        w = [[t.data for t in bucket] for bucket in self._tensors]
        with other_memory(self.params, self.layout.join(backup) if in_backup else None):
            try:
                self._backup, self.moved = w, True
                yield
            finally:
                self._backup, self.moved = backup, moved
                clear_weight_caches()


class GradientMemory:
    """Decide where the gradients of a step are stored, which of them may be overwritten, and which are copied.

    A pass leaves its gradient in ``p.grad``. :meth:`take` turns it into a vector without a copy; evaluating the
    direction may overwrite it. Gradients are copied only if DDP or the CUDA graphs of ``torch.compile`` may write to
    their memory again, or if their strides differ from the parameter's. On the CPU, allocating costs more than copying:
    before the next pass, the gradient is copied to memory that is kept between steps and its tensors are freed, so that
    the allocator gives them to the next pass. The direction therefore overwrites the last gradient on the CPU, and the
    first one elsewhere.
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
    """Return a gradient that later passes do not overwrite, with its parameter's strides; copy it only if necessary.

    A view is copied because it may belong to DDP's buckets. Foreach operations are fast if all strides agree.
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
