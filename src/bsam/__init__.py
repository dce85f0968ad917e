"""The library: sharpness-aware optimizers (BSAM and others), flatness, integrations. The laboratory is `bsam.lab`."""

from typing import TYPE_CHECKING

from .common.lazy_names import import_on_use

if TYPE_CHECKING:
    from . import check as check
    from . import flatness as flatness
    from . import integrations as integrations
    from .common.combined_optimizer import CombinedOptimizer as CombinedOptimizer
    from .common.errors import BsamError as BsamError
    from .common.norm_groups import norm_groups as norm_groups
    from .core.objective import Objective as Objective
    from .core.optimizer import SharpnessAware as SharpnessAware
    from .core.vector import Vector as Vector
    from .methods import METHODS as METHODS
    from .methods.aesam import AESAM as AESAM
    from .methods.asam import ASAM as ASAM
    from .methods.bsam import BSAM as BSAM
    from .methods.crsam import CRSAM as CRSAM
    from .methods.esam import ESAM as ESAM
    from .methods.fisher_sam import FisherSAM as FisherSAM
    from .methods.friendly_sam import FriendlySAM as FriendlySAM
    from .methods.functional_sam import FunctionalSAM as FunctionalSAM
    from .methods.gam import GAM as GAM
    from .methods.gsam import GSAM as GSAM
    from .methods.ksam import KSAM as KSAM
    from .methods.looksam import LookSAM as LookSAM
    from .methods.mesa import MESA as MESA
    from .methods.msam import MSAM as MSAM
    from .methods.pgn import PGN as PGN
    from .methods.rst import RST as RST
    from .methods.saf import SAF as SAF
    from .methods.sam import SAM as SAM
    from .methods.saner import SANER as SANER
    from .methods.vasso import VaSSO as VaSSO

__version__ = "0.3.0"

# Imported on first use: the command's help does not need torch.
_MODULES = {name: name for name in ("check", "common", "core", "flatness", "integrations", "methods")}
_MODULES |= {
    "BsamError": "common.errors",
    "CombinedOptimizer": "common.combined_optimizer",
    "Objective": "core.objective",
    "SharpnessAware": "check",  # with its method ``check``
    "Vector": "core.vector",
    "norm_groups": "common.norm_groups",
}
_METHODS = (
    "METHODS", "AESAM", "ASAM", "BSAM", "CRSAM", "ESAM", "FisherSAM", "FriendlySAM", "FunctionalSAM", "GAM", "GSAM",
    "KSAM", "LookSAM", "MESA", "MSAM", "PGN", "RST", "SAF", "SAM", "SANER", "VaSSO",
)  # fmt: skip
_MODULES |= dict.fromkeys(_METHODS, "methods")
__all__ = [*_MODULES]

if not TYPE_CHECKING:  # type checkers know the names above, and report others
    __getattr__, __dir__ = import_on_use(__name__, _MODULES)
