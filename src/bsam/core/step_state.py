"""The progress of one optimizer step, from ``backward`` to ``step``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import Tensor

from ..common.errors import BsamRuntimeError
from .ranks import Ranks
from .vector import Vector

NOT_READY = {
    "idle": "step() has nothing to step with: call backward(closure) first, or step(closure)",
    "failed": "the last backward raised, so there is nothing to step with: call backward(closure) again",
    "in_step": "step was called while a step is under way",
    "in_backward": "step was called from inside the closure: a closure must only compute the loss",
}


@dataclass
class StepState:
    """The data that ``backward`` leaves for ``step``."""

    phase: str = "idle"  # idle, in_backward, ready, in_step, or failed (the last backward raised)
    offset: Vector | None = None  # of the current backward: the step starts from w + offset
    offsets: list[Vector] = field(default_factory=list)  # from all backwards since the last step
    local_offsets: bool = False  # whether some offsets differ between ranks
    used: tuple[Tensor, Tensor | None, int] | None = None  # a parameter, its gradient and version after the last step
    stale: bool = False  # whether a backward has added to a gradient that a step had used, since ``zero_grad``

    @contextlib.contextmanager
    def in_backward(self) -> Iterator[None]:
        """Return the context of a backward, after which a step is possible unless it raised."""
        try:
            self.phase, self.offset = "in_backward", None
            yield
            self.phase = "ready"
        finally:
            if self.phase != "ready":
                self.phase = "failed"

    def keep(self, offset: Vector, local: bool) -> None:
        """Keep the offset of a successful backward until the step; ``local`` if it differs between ranks."""
        self.offsets.append(offset)
        self.local_offsets |= local
        self.offset = None

    @contextlib.contextmanager
    def in_step(self) -> Iterator[None]:
        """Return the context of the base optimizer's step; raise unless a step is prepared."""
        self.check_ready()
        try:
            self.phase = "in_step"
            yield
        finally:
            self.phase = "ready"

    def check_ready(self) -> None:
        """Raise unless a step is prepared."""
        if self.phase != "ready":
            raise BsamRuntimeError(NOT_READY[self.phase])

    def check_base_step(self, *_: object) -> None:
        """Raise if the base optimizer steps without the method, which would forget that the step was taken."""
        if self.phase == "ready":
            raise BsamRuntimeError(
                "base.step() was called after optimizer.backward: call optimizer.step() instead, which runs the base "
                "optimizer and counts the step, or optimizer.zero_grad() to discard the prepared step"
            )

    def start(self, ranks: Ranks) -> Vector | None:
        """Return the start of the step relative to w: the mean of the offsets, also over ranks if they differ."""
        if not self.offsets:
            return None
        mean = sum(self.offsets[1:], self.offsets[0]) / len(self.offsets)
        return Vector(ranks.average_(mean.tensors()), mean.layout) if self.local_offsets else mean

    def clear(self) -> None:
        """Discard the prepared step."""
        self.phase, self.offsets, self.local_offsets, self.used = "idle", [], False, None

    def note_used(self, p: Tensor) -> None:
        """Note the gradient that a step has used, if a later ``backward`` should find it unchanged."""
        self.used = p, p.grad, -1 if p.grad is None else p.grad._version

    def note_stale(self) -> None:
        """Note whether the gradient that the last step used is still there."""
        if self.used is not None:
            p, gradient, version = self.used
            self.stale |= gradient is not None and p.grad is gradient and gradient._version == version
