"""The methods, one file per paper, and their registry."""

from __future__ import annotations

from ..check import SharpnessAware  # with its method ``check``
from .aesam import AESAM
from .asam import ASAM
from .bsam import BSAM
from .crsam import CRSAM
from .distillation import Distillation
from .esam import ESAM
from .fisher_sam import FisherSAM
from .friendly_sam import FriendlySAM
from .functional_sam import FunctionalSAM
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
from .saner import SANER
from .vasso import VaSSO

# By name on the command line: optimizers, and (SAF and MESA) losses that any optimizer can minimise.
METHODS: dict[str, type[SharpnessAware] | type[Distillation]] = {
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
    "functional_sam": FunctionalSAM,
    "saner": SANER,
    "vasso": VaSSO,
    "crsam": CRSAM,
    "saf": SAF,
    "mesa": MESA,
    "bsam": BSAM,
}
