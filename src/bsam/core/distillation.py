"""The losses that hold logits near those of an earlier or an averaged network."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .checks import check_count, check_number
from .errors import BsamValueError


class Distillation(nn.Module):
    r"""Cross-entropy, and from ``start_epoch`` on
    :math:`\lambda \tau^2\, \mathrm{KL}(\mathrm{softmax}(z_{past} / \tau)\, \|\, \mathrm{softmax}(z / \tau))`.

    A method writes :meth:`recall`. In eval mode it is the cross-entropy alone.
    """

    def __init__(self, *, lam: float, tau: float, start_epoch: int, label_smoothing: float, reduction: str) -> None:
        super().__init__()
        if reduction not in ("mean", "none"):
            raise BsamValueError(f'reduction must be "mean" or "none", got {reduction!r}')
        self.lam, self.tau = check_number("lam", lam, low=0), check_number("tau", tau, low=1e-6)
        self.label_smoothing, self.reduction = (
            check_number("label_smoothing", label_smoothing, low=0, high=1),
            reduction,
        )
        self.start_epoch, self.epoch = check_count("start_epoch", start_epoch, low=0), 0

    @abstractmethod
    def recall(self, sample: Tensor) -> tuple[Tensor, Tensor]:
        """The logits to stay near, and which of them are known."""

    def set_epoch(self, epoch: int) -> None:
        """To call before each epoch, counted from 0."""
        self.epoch = check_count("epoch", epoch, low=0)

    def loss(self, logits: Tensor, target: Tensor, sample: Tensor) -> Tensor:
        """Both terms; ``sample`` is what :meth:`recall` knows a sample by."""
        logits = logits.to(
            torch.promote_types(logits.dtype, torch.float32)
        )  # or the divergence of near logits would drown in the rounding of half precision
        losses = F.cross_entropy(logits, target, reduction="none", label_smoothing=self.label_smoothing)
        if self.training and self.epoch >= self.start_epoch:
            past, known = (t.to(logits.device) for t in self.recall(sample))
            losses = losses + self.lam * torch.where(known, divergence(past, logits, self.tau), 0.0)
        return losses.mean() if self.reduction == "mean" else losses

    def get_extra_state(self) -> int:
        """The epoch, for ``state_dict``."""
        return self.epoch

    def set_extra_state(self, state: int) -> None:
        """The epoch, from ``state_dict``."""
        self.epoch = state


def divergence(past: Tensor, logits: Tensor, tau: float) -> Tensor:
    """``tau^2 KL(softmax(past / tau) || softmax(logits / tau))``, sample by sample."""
    log_p, log_q = (F.log_softmax(z.to(logits.dtype) / tau, dim=1) for z in (past, logits))
    return tau**2 * (log_p.exp() * (log_p - log_q)).sum(1)
