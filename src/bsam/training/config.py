"""What a run is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from ..core.refusal import Refusal
from ..methods import METHODS


@dataclass(frozen=True)
class Run:
    """The settings of one training run: two runs with equal settings give equal numbers.

    Args:
        method: ``"sgd"``, or a name of :data:`bsam.methods.METHODS` around SGD.
        arguments: of the method, by name.
        lr: the learning rate, from which a cosine leads down to 0, step by step.
        momentum: of SGD.
        weight_decay: of SGD.
        epochs: how many.
        batch: samples a step; a remainder of the epoch that does not fill a batch is left out.
        label_noise: the share of the training labels that is flipped.
        seed: of the initial weights, the order of the samples and the flipped labels.
        held_out: the set whose accuracy is noted; a run that helps to choose settings never sees the test set.
        radius: at which sharpness is measured after every epoch; None measures none.
        curvature: whether the largest eigenvalue of the Hessian is taken after the last epoch.
        relief: the points along each axis of a landscape that is taken after the last epoch; None takes none.

    Example:
        >>> Run("sam", {"rho": 0.05}, lr=0.1, seed=3).method
        'sam'
        >>> Run("sma")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        bsam.core.refusal.Refusal: method must be one of sgd, sam, ...; got 'sma'
    """

    method: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    lr: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 5e-4
    epochs: int = 20
    batch: int = 64
    label_noise: float = 0.0
    seed: int = 0
    held_out: Literal["validation", "test"] = "test"
    radius: float | None = None
    curvature: bool = False
    relief: int | None = None

    def __post_init__(self) -> None:
        names = ("sgd", *METHODS)
        if self.method not in names:
            raise Refusal(f"method must be one of {', '.join(names)}; got {self.method!r}")
        if self.method == "sgd" and self.arguments:
            raise Refusal(f"sgd takes no arguments of a method, got {dict(self.arguments)!r}")
        if self.epochs < 1:
            raise Refusal(f"epochs must be 1 or more, got {self.epochs!r}")

    def settings(self) -> dict[str, Any]:
        """All of it as plain values, for JSON."""
        return asdict(self)
