"""SAF."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..core.checks import check_count, check_indices
from ..core.distillation import Distillation
from ..core.errors import BsamValueError

NEVER = torch.iinfo(torch.int32).min


class SAF(Distillation):
    r"""Sharpness-Aware training for Free: a loss that holds the logits near those of a few epochs ago, for any
    optimizer.

    .. math::  \mathrm{CE}(z, y) + \lambda \tau^2\, \mathrm{KL}(\mathrm{softmax}(z_{past} / \tau)\, \|\,
    \mathrm{softmax}(z / \tau))

    In train mode the logits of a sample are noted once an epoch, the first time it is seen: further passes of a
    sharpness-aware optimizer find what they need and change nothing. Logits that are not finite are not noted. In eval
    mode it is the cross-entropy. The table is part of ``state_dict``. In DDP each
    rank notes the samples that it sees: they add no loss on a rank that did not see them ``epochs_back`` epochs ago, so
        let the sampler give a rank the same
    samples in every epoch, and keep one ``state_dict`` per rank.

    Args:
        samples: how many the training set has.
        classes: how many logits a sample has.
        lam: the weight of the second term.
        tau: the temperature.
        start_epoch: the number of epochs (counted from 0) without the second term.
        epochs_back: how old the logits are.
        label_smoothing: of the cross-entropy.
        reduction: ``"mean"``, or ``"none"`` for one loss per sample.

    Example:
        >>> loss = SAF(samples=4, classes=3, start_epoch=0, epochs_back=1)
        >>> z, y, index = torch.eye(3), torch.tensor([0, 1, 2]), torch.tensor([3, 0, 1])
        >>> first = loss(z, y, index)
        >>> loss.set_epoch(1)
        >>> torch.allclose(loss(z, y, index), first), bool(loss(2 * z, y, index) > torch.nn.functional.cross_entropy(2 * z, y))
        (True, True)

    Reference: Du, Zhou, Feng, Tan, Zhou, "Sharpness-Aware Training for Free", NeurIPS 2022. A sample that was not seen
        then adds no second term; the released
    code uses zeros there.
    """

    table: Tensor
    stamp: Tensor

    def __init__(
        self,
        samples: int,
        classes: int,
        *,
        lam: float = 0.3,
        tau: float = 5.0,
        start_epoch: int = 5,
        epochs_back: int = 3,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
    ) -> None:
        super().__init__(
            lam=lam, tau=tau, start_epoch=start_epoch, label_smoothing=label_smoothing, reduction=reduction
        )
        self.epochs_back = check_count("epochs_back", epochs_back)
        slots = self.epochs_back + 1  # this epoch's beside the one that is read
        self.register_buffer(
            "table",
            torch.zeros(slots, check_count("samples", samples), check_count("classes", classes), dtype=torch.half),
        )
        self.register_buffer(
            "stamp", torch.full((slots, samples), NEVER, dtype=torch.int32)
        )  # the epoch in which an entry was filled

    def forward(self, logits: Tensor, target: Tensor, index: Tensor) -> Tensor:
        if not self.training:
            return self.loss(logits, target, index)
        index = self.checked(index, logits).to(self.table.device, torch.long)
        loss = self.loss(logits, target, index)
        self.note(index, logits.detach())
        return loss

    def _apply(self, fn: Any, recurse: bool = True) -> SAF:
        super()._apply(fn, recurse)
        self.table = self.table.half()  # whatever the module was cast to
        return self

    def recall(self, sample: Tensor) -> tuple[Tensor, Tensor]:
        epoch = self.epoch - self.epochs_back
        slot = epoch % len(self.table)
        return self.table[slot, sample], self.stamp[slot, sample] == epoch

    def note(self, index: Tensor, logits: Tensor) -> None:
        """Keep the logits of samples that this epoch has not seen yet."""
        slot = self.epoch % len(self.table)
        new = (self.stamp[slot, index] != self.epoch) & logits.isfinite().all(1).to(index.device)
        self.table[slot, index] = torch.where(
            new.unsqueeze(1), logits.to(self.table).nan_to_num(), self.table[slot, index]
        )
        self.stamp[slot, index] = torch.where(new, self.epoch, self.stamp[slot, index])

    def checked(self, index: Tensor, logits: Tensor) -> Tensor:
        """The sample ids, if the table has room for these logits under each of them."""
        _, samples, classes = self.table.shape
        if logits.shape[1:] != (classes,):
            raise BsamValueError(
                f"logits must be one row of {classes} per sample, got the shape {tuple(logits.shape)}: does classes= "
                "count them?"
            )
        check_indices("index", index, len(logits), samples)
        return index
