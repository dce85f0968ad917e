"""The weights that a method moves, and the way back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .layout import Buckets, Layout
from .vector import Vector


class Weights:
    """All trainable parameters of an optimizer: moved in place, brought back by ``copy_`` from one backup, bit for bit.

    The backup is kept between steps: fresh memory costs more than the copy into it.
    """

    def __init__(self) -> None:
        self.params: list[Tensor] = []
        self.layout = Layout([])
        self.sharded = False
        self._signature: list[Any] = []
        self._parts: Buckets = []
        self._backup: Buckets = []
        self._saved = 0  # parts whose backup holds w
        self._room: list[Buckets] = []

    def refresh(self, param_groups: Sequence[dict[str, Any]]) -> None:
        """Look at the parameters as they are now: groups come, parameters are frozen, moved and cast between steps."""
        owned = [(i, p) for i, group in enumerate(param_groups) for p in group["params"] if p.requires_grad]
        self.params = [p for _, p in owned]
        signature = [(i, type(p), p.device, p.dtype, p.shape, p.stride()) for i, p in owned]
        if signature != self._signature:
            self.layout = Layout(self.params, [i for i, _ in owned])
            self._backup, self._room = self._new_parts(), []
            self._signature = signature
            self.sharded = any(part.sharding is not None for part in self.layout.parts)
        self._parts = self.layout.split(self.params)
        self._saved = 0

    @property
    def moved(self) -> bool:
        """Whether they are away from ``w``."""
        return self._saved > 0

    @property
    def mesh(self) -> Any:
        """The ranks that the parameters are spread over; None if they are not."""
        return next((part.sharding[0] for part in self.layout.parts if part.sharding is not None), None)

    def room(self, n: int) -> Buckets:
        """MethodState for the ``n``-th gradient of a step, kept between steps."""
        while len(self._room) <= n:
            self._room.append(self._new_parts())
        return self._room[n]

    def _new_parts(self) -> Buckets:
        return self.layout.split([torch.empty_like(p, requires_grad=False) for p in self.params])

    @torch.no_grad()
    def move(self, to: Vector) -> None:
        """To ``w + to``, wherever they are now."""
        for k, (part, backup) in enumerate(zip(self._parts, self._backup, strict=True)):
            if k < self._saved:
                torch._foreach_copy_(part, backup)
            else:
                torch._foreach_copy_(backup, part)
                self._saved = k + 1  # before the part moves: an interrupt here must not restore what was not saved
            to.add_to(self._parts, k)
        torch.clear_autocast_cache()  # an autocast region around the step keeps casts of the weights as they were

    @torch.no_grad()
    def restore(self) -> None:
        """Back to ``w``."""
        for k in range(self._saved):
            torch._foreach_copy_(self._parts[k], self._backup[k])
        self.stay()

    def stay(self) -> None:
        """Where they are is ``w`` from now on."""
        if self._saved:
            torch.clear_autocast_cache()
        self._saved = 0
