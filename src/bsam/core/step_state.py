"""What ``backward`` leaves for ``step``."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from ..common.errors import BsamRuntimeError
from .vector import Vector


@dataclass
class Results:
    """What a method computes in one ``backward`` besides its direction."""

    offset: Vector | None = None  # the step starts from w + offset
    values: dict[str, Vector | float] = field(default_factory=dict)  # to remember, by name
    reached: dict[str, list[bool]] = field(default_factory=dict)  # which parameters a vector has entries for, by name

    @property
    def vectors(self) -> list[Vector]:
        """The vectors among the results."""
        offsets = [] if self.offset is None else [self.offset]
        return offsets + [value for value in self.values.values() if isinstance(value, Vector)]


@dataclass
class PreparedStep:
    """What the calls of ``backward`` since the last step leave for ``step``."""

    phase: str = "idle"  # idle, in_backward, ready, in_step, stepped (by base), or failed (the last backward raised)
    offsets: list[Vector] = field(default_factory=list)  # of the calls that set one: the step starts from their mean
    local_offsets: bool = False  # whether some offsets differ between ranks
    values: dict[str, dict[Tensor, Tensor] | float] = field(default_factory=dict)  # to remember, by name
    used: tuple[Tensor, Tensor | None, int] | None = None  # a parameter, its gradient and version after the last step
    stale: bool = False  # whether a backward has added to a gradient that a step had used, since ``zero_grad``

    def check_base_step(self, *_: object) -> None:
        """Raise if the base optimizer steps without the method, which would forget that the step was taken."""
        if self.phase == "ready":
            raise BsamRuntimeError(
                "base.step() was called after optimizer.backward: call optimizer.step() instead, which runs the base "
                "optimizer and counts the step, or optimizer.zero_grad() to discard the prepared step"
            )
