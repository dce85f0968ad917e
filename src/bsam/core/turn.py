"""How far the step that is under way has come."""

from __future__ import annotations

from dataclasses import dataclass, field

from .ranks import Ranks
from .vector import Vector

NOT_READY = {
    "idle": "step() has nothing to step with: call backward(closure) first, or step(closure)",
    "stale": "the last backward raised, so there is nothing whole to step with: call backward(closure) or zero_grad()",
    "busy": "step was called from inside the closure: a closure computes the loss, and the optimizer steps after it",
}


@dataclass
class Turn:
    """What ``backward`` leaves for ``step``.

    One object of its own, because Lightning and Fabric wrap an optimizer in an object of a derived class: ``backward``
    may run on the wrapper and ``step`` on the optimizer, and both must find the same state.
    """

    phase: str = "idle"  # idle; busy: in backward; ready: to step; stale: the last backward raised
    offset: Vector | None = None  # where this backward wants the step to start, from w
    offsets: list[Vector] = field(default_factory=list)  # and where the backwards since the last step did
    apart: bool = False  # whether some of these are this rank's alone

    def start(self, ranks: Ranks) -> Vector | None:
        """Where the step starts, from w: the mean of the offsets (over ranks, too, where they differ). None is w."""
        if not self.offsets:
            return None
        mean = sum(self.offsets[1:], self.offsets[0]) / len(self.offsets)
        return Vector(ranks.averaged(mean.tensors()), mean.layout) if self.apart else mean

    def clear(self) -> None:
        """Nothing is prepared any more."""
        self.phase, self.offsets, self.apart = "idle", [], False
