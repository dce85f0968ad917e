"""The base class of losses that keep logits close to those of an earlier or an averaged network."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..common.checks import check_count, check_number
from ..common.errors import BsamTypeError, BsamValueError
from ..common.method_info import MethodInfo, Need


class Distillation(MethodInfo, nn.Module):
    r"""Cross-entropy plus, after ``start_epoch``, a penalty that keeps logits close to those of another network.

    The penalty is
    :math:`\lambda \tau^2\, \mathrm{KL}(\mathrm{softmax}(z_{past} / \tau)\, \|\, \mathrm{softmax}(z / \tau))`.
    A subclass implements :meth:`past_logits`. In eval mode, the loss is the cross-entropy alone.
    """

    passes = 1
    is_loss = True

    def __init__(self, *, lam: float, tau: float, start_epoch: int, label_smoothing: float, reduction: str) -> None:
        super().__init__()
        if reduction not in ("mean", "none"):
            raise BsamValueError(f'reduction must be "mean" or "none", got {reduction!r}')
        self.reduction = reduction
        self.lam = check_number("lam", lam, low=0)
        self.tau = check_number("tau", tau, low=1e-6)
        self.label_smoothing = check_number("label_smoothing", label_smoothing, low=0, high=1)
        self.start_epoch, self.epoch = check_count("start_epoch", start_epoch, low=0), 0

    @abstractmethod
    def past_logits(self, inputs: Any, indices: Any) -> tuple[Tensor, Tensor]:
        """Return the logits to stay close to, and a mask that is False for samples without such logits."""

    def step_kind(self) -> bool:
        """Return the kind of this epoch's steps: whether they have the penalty. One kind launches the same kernels."""
        return self.epoch > self.start_epoch

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, counted from 0. Call before each epoch."""
        self.epoch = check_count("epoch", epoch, low=0)

    def forward(
        self, outputs: Tensor, targets: Tensor, *, inputs: Tensor | None = None, indices: Tensor | None = None
    ) -> Tensor:
        """Return the loss of a batch.

        Args:
            outputs: the logits of the network.
            targets: the classes.
            inputs: the inputs of the network (MESA).
            indices: the positions of the samples in the training set (SAF).
        """
        if self.training:
            for name, value, need in (("inputs", inputs, Need.INPUTS), ("indices", indices, Need.SAMPLE_IDS)):
                if value is None and need in self.needs:
                    raise BsamTypeError(f"{self.title} needs {name}: call loss(outputs, targets, {name}=...)")
        # in half precision, rounding errors would exceed the divergence of similar logits
        logits = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
        losses = F.cross_entropy(logits, targets, reduction="none", label_smoothing=self.label_smoothing)
        if self.training and self.step_kind():
            past, known = (t.to(logits.device) for t in self.past_logits(inputs, indices))
            losses = losses + self.lam * divergence(past, logits, self.tau).masked_fill(~known, 0.0)
        return losses.mean() if self.reduction == "mean" else losses

    def get_extra_state(self) -> int:
        """Return the epoch, for ``state_dict``."""
        return self.epoch

    def set_extra_state(self, state: int) -> None:
        """Set the epoch, from ``state_dict``."""
        self.set_epoch(state)


def divergence(past: Tensor, logits: Tensor, tau: float) -> Tensor:
    """Return ``tau^2 KL(softmax(past / tau) || softmax(logits / tau))`` of each sample."""
    log_p, log_q = (F.log_softmax(z.to(logits.dtype) / tau, dim=1) for z in (past, logits))
    return tau**2 * (log_p.exp() * (log_p - log_q)).sum(1)
