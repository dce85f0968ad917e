"""The methods, one file for each paper, and the registry of all of them."""

from __future__ import annotations

from dataclasses import dataclass

from ..core.optimizer import SharpnessAware
from .aesam import AESAM
from .asam import ASAM
from .bsam import BSAM
from .distillation import Distillation
from .esam import ESAM
from .fisher_sam import FisherSAM
from .friendly_sam import FriendlySAM
from .gam import GAM
from .gsam import GSAM
from .ksam import KSAM
from .looksam import LookSAM
from .mesa import MESA
from .msam import MSAM
from .pgn import PGN
from .rst import RST
from .saf import SAF
from .sam import SAM


@dataclass(frozen=True)
class Method:
    """A method under its name on the command line. All else is read from its class.

    Args:
        name: its name on the command line.
        cls: an optimizer, or for SAF and MESA a loss that any optimizer minimises.
    """

    name: str
    cls: type[SharpnessAware] | type[Distillation]

    @property
    def title(self) -> str:
        """Its name in a table."""
        return self.cls.title

    @property
    def reference(self) -> str:
        """Authors, place and year."""
        return self.cls.reference

    @property
    def passes(self) -> float:
        """Forward and backward passes per step with the default arguments, on average where steps differ."""
        return self.cls.passes

    @property
    def purpose(self) -> str:
        """What it is for."""
        return self.cls.purpose

    @property
    def memory(self) -> str:
        """Extra memory during a step, and what of it is kept between steps, in units of the parameters' size."""
        return self.cls.memory

    @property
    def needs(self) -> str:
        """What it needs beyond a closure that returns the loss; empty if nothing."""
        return ", ".join(["is a loss"] * self.is_loss + [need.value for need in self.cls.needs])

    @property
    def is_loss(self) -> bool:
        """Whether it is a loss, and not an optimizer."""
        return issubclass(self.cls, Distillation)

    @property
    def capturable(self) -> bool:
        """Whether a CUDA graph of one step can replay all, as no decision is made in Python and no memory moves."""
        return self.cls.capturable


_CLASSES: dict[str, type[SharpnessAware] | type[Distillation]] = {
    "sam": SAM,
    "asam": ASAM,
    "gsam": GSAM,
    "fisher_sam": FisherSAM,
    "friendly_sam": FriendlySAM,
    "pgn": PGN,
    "gam": GAM,
    "looksam": LookSAM,
    "esam": ESAM,
    "ksam": KSAM,
    "msam": MSAM,
    "aesam": AESAM,
    "rst": RST,
    "saf": SAF,
    "mesa": MESA,
    "bsam": BSAM,
}
METHODS: dict[str, Method] = {name: Method(name, cls) for name, cls in _CLASSES.items()}
