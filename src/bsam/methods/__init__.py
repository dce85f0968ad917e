"""One paper, one file; and the list of them all."""

from __future__ import annotations

from dataclasses import dataclass

from ..core.optimizer import SharpnessAware
from .bsam import BSAM
from .sam import SAM


@dataclass(frozen=True)
class Method:
    """What the command line, the contract tests and the reports need to know of a method."""

    name: str
    cls: type[SharpnessAware]
    title: str
    reference: str
    passes: float  # forward+backward passes a step, with the default arguments


METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method("sam", SAM, "Sharpness-Aware Minimization", "Foret et al., ICLR 2021", 2),
        Method("bsam", BSAM, "Bilateral Sharpness-Aware Minimization", "Deng, Pang, Zhang, Huang", 3),
    )
}
