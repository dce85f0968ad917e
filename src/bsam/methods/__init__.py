"""One paper, one file; and the list of them all."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from ..core.optimizer import SharpnessAware
from .aesam import AESAM
from .asam import ASAM
from .bsam import BSAM
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
    """What the command line, the contract tests and the reports need to know of a method.

    Args:
        name: by which it is called on the command line.
        cls: its class: an optimizer, or for SAF and MESA a loss that any optimizer minimises.
        title: its name in a table.
        reference: authors, place and year.
        passes: forward+backward passes a step, with the default arguments (on average, where steps differ).
        purpose: what it is for.
        memory: extra memory while a step is under way, in units of the parameters' size, and what of it is kept between
            steps (``benchmarks/memory.py``).
        needs: what it asks of the closure, the data or the base optimizer; empty if nothing.
    """

    name: str
    cls: type[SharpnessAware | nn.Module]
    title: str
    reference: str
    passes: float
    purpose: str
    memory: str
    needs: str = ""

    @property
    def is_loss(self) -> bool:
        """Whether it is a loss, and not an optimizer."""
        return issubclass(self.cls, nn.Module)

    @property
    def capturable(self) -> bool:
        """Whether a CUDA graph of one step is as good as the steps: not where Python decides in each of them, or memory
        moves.
        """
        return self.name not in ("friendly_sam", "looksam", "esam", "aesam", "rst", "saf", "mesa")


_PER_SAMPLE = "closure(indices) returning per-sample losses"

METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method(
            "sam",
            SAM,
            "SAM",
            "Foret et al., ICLR 2021",
            2,
            "Flat minima at twice the price: the method to start with.",
            "2",
        ),
        Method(
            "asam",
            ASAM,
            "ASAM",
            "Kwon et al., ICML 2021",
            2,
            "SAM with radii that do not change when a layer is rescaled.",
            "5",
        ),
        Method(
            "gsam",
            GSAM,
            "GSAM",
            "Zhuang et al., ICLR 2022",
            2,
            "SAM that also closes the gap between the loss and the worst loss nearby.",
            "3",
        ),
        Method(
            "fisher_sam",
            FisherSAM,
            "Fisher SAM",
            "Kim et al., ICML 2022",
            2,
            "SAM that moves less where the loss is already steep.",
            "3",
        ),
        Method(
            "friendly_sam",
            FriendlySAM,
            "F-SAM",
            "Li et al., CVPR 2024",
            2,
            "SAM that perturbs along the noise of the batch, not along the full gradient.",
            "5, 1 kept",
        ),
        Method(
            "pgn",
            PGN,
            "PGN",
            "Zhao et al., ICML 2022",
            2,
            "A penalty on the gradient norm: a mix of SAM's and the plain gradient.",
            "2",
        ),
        Method(
            "gam",
            GAM,
            "GAM",
            "Zhang et al., CVPR 2023",
            4,
            "First-order flatness: small gradients all around, where four passes are affordable.",
            "6",
        ),
        Method(
            "looksam",
            LookSAM,
            "LookSAM",
            "Liu et al., CVPR 2022",
            1.2,
            "Most of SAM at 1 + 1/k passes, by reusing its direction for k steps.",
            "4, 1 kept",
        ),
        Method(
            "esam",
            ESAM,
            "ESAM",
            "Du et al., ICLR 2022",
            2,
            "SAM made cheaper: fewer gradients in the first pass, fewer samples in the second.",
            "2",
            _PER_SAMPLE,
        ),
        Method(
            "ksam",
            KSAM,
            "K-SAM",
            "Ni et al., 2022",
            2,
            "SAM on the k hardest samples of a large batch.",
            "2",
            _PER_SAMPLE,
        ),
        Method(
            "msam",
            MSAM,
            "MSAM",
            "Becker et al., 2024",
            1,
            "A perturbation along the momentum, without a second pass; its radius wants tuning.",
            "1",
            "a base with momentum",
        ),
        Method(
            "aesam",
            AESAM,
            "AE-SAM",
            "Jiang et al., ICLR 2023",
            1.5,
            "SAM only on the steps whose gradient is large; roughly half of them.",
            "2",
            "total_steps",
        ),
        Method(
            "rst",
            RST,
            "RST",
            "Zhao et al., 2022",
            1.5,
            "SAM on a random share of the steps: a budget that is known beforehand.",
            "2",
        ),
        Method(
            "saf",
            SAF,
            "SAF",
            "Du et al., NeurIPS 2022",
            1,
            "Flatness from the losses of earlier epochs, at the price of a table of logits.",
            "0, logits kept",
            "sample ids, set_epoch",
        ),
        Method(
            "mesa",
            MESA,
            "MESA",
            "Du et al., NeurIPS 2022",
            1,
            "SAF where that table would not fit: logits of an average of the model.",
            "1, kept",
            "the inputs, set_epoch; a forward pass more",
        ),
        Method(
            "bsam",
            BSAM,
            "BSAM",
            "Deng, Pang, Zhang, Huang",
            3,
            "Flat on both sides, up the gradient and down; with passes=2 at SAM's price.",
            "3",
        ),
    )
}
