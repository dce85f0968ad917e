"""Moving the parameters and restoring them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..common.layout import BucketedTensors, Layout
from .vector import Vector


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
        self._saved = 0  # number of buckets whose backup holds w

    def refresh(self, param_groups: Sequence[dict[str, Any]]) -> None:
        """Read the parameter groups again: between steps, parameters may be added, frozen, moved or cast."""
        trained = [(i, p) for i, group in enumerate(param_groups) for p in group["params"] if p.requires_grad]
        self.params = [p for _, p in trained]
        signature = [(i, type(p), p.device, p.dtype, p.shape, p.stride()) for i, p in trained]
        if signature != self._signature:
            self.layout = Layout(self.params, [i for i, _ in trained])
            self._backup, self._signature = self.allocate(), signature
        self._tensors = self.layout.split(self.params)
        self._saved = 0

    @property
    def moved(self) -> bool:
        """Whether the parameters are away from ``w``."""
        return self._saved > 0

    @property
    def sharded(self) -> bool:
        """Whether some parameters are sharded."""
        return self.mesh is not None

    @property
    def mesh(self) -> Any:
        """The device mesh of sharded parameters; None if no parameter is sharded."""
        return next((bucket.sharding[0] for bucket in self.layout.buckets if bucket.sharding is not None), None)

    def allocate(self) -> BucketedTensors:
        """Return uninitialized memory with the sizes and the layout of the parameters."""
        return self.layout.split([torch.empty_like(p, requires_grad=False) for p in self.params])

    @torch.no_grad()
    def move(self, to: Vector) -> None:
        """Move the parameters to ``w + to``, from any position."""
        for k, (tensors, backup) in enumerate(zip(self._tensors, self._backup, strict=True)):
            if k < self._saved:
                torch._foreach_copy_(tensors, backup)
            else:
                torch._foreach_copy_(backup, tensors)
                self._saved = k + 1  # before they move: an interrupt must restore only saved buckets
            to.add_to(self._tensors, k)
        torch.clear_autocast_cache()  # autocast around the step caches casts of the old weights

    @torch.no_grad()
    def restore(self) -> None:
        """Move the parameters back to ``w``."""
        for k in range(self._saved):
            torch._foreach_copy_(self._tensors[k], self._backup[k])
        self.commit()

    def commit(self) -> None:
        """Make the current values the new ``w``."""
        if self._saved:
            torch.clear_autocast_cache()
        self._saved = 0
