"""The progress of one optimizer step, from ``backward`` to ``step``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from ..common.errors import BsamRuntimeError
from .ranks import Ranks
from .vector import Vector

NOT_READY = {
    "idle": "step() has nothing to step with: call backward(closure) first, or step(closure)",
    "failed": "the last backward raised, so there is nothing to step with: call backward(closure) or zero_grad()",
    "in_backward": "step was called from inside the closure: a closure only computes the loss, and may call backward",
}


@dataclass
class StepState:
    """What ``backward`` leaves for ``step``."""

    phase: str = "idle"  # idle, in_backward, ready, or failed: the last backward raised
    offset: Vector | None = None  # from w: where the current backward wants the step to start
    offsets: list[Vector] = field(default_factory=list)  # those of all backwards since the last step
    local_offsets: bool = False  # whether some offsets were computed by only this rank

    @contextlib.contextmanager
    def in_backward(self) -> Iterator[None]:
        """Return the context of a backward: a step is possible once it ends without an error."""
        try:
            self.phase, self.offset = "in_backward", None
            yield
            self.phase = "ready"
        finally:
            if self.phase != "ready":
                self.phase = "failed"

    def keep(self, offset: Vector, local: bool) -> None:
        """Keep the offset of a successful backward until the step; ``local``: computed by only this rank."""
        self.offsets.append(offset)
        self.local_offsets |= local
        self.offset = None

    def check_ready(self) -> None:
        """Raise unless there is something to step with."""
        if self.phase != "ready":
            raise BsamRuntimeError(NOT_READY[self.phase])

    def start(self, ranks: Ranks) -> Vector | None:
        """Return where the step starts, relative to w: the mean of the offsets, over ranks where they differ."""
        if not self.offsets:
            return None
        mean = sum(self.offsets[1:], self.offsets[0]) / len(self.offsets)
        return Vector(ranks.average_(mean.tensors()), mean.layout) if self.local_offsets else mean

    def clear(self) -> None:
        """Discard what was prepared."""
        self.phase, self.offsets, self.local_offsets = "idle", [], False
