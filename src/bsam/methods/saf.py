"""SAF."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from ..common.checks import check_count, check_flag
from ..common.errors import BsamTypeError, BsamValueError
from ..common.method_info import Need
from ..core.objective import in_later_pass
from ..core.schedule import capturing
from .distillation import Distillation

NEVER = torch.iinfo(torch.int32).min


class SAF(Distillation):
    r"""Sharpness-Aware training for Free: a loss that keeps the logits close to those of a few epochs ago.

    .. math::
        \mathrm{CE}(z, y)
        + \lambda \tau^2\, \mathrm{KL}(\mathrm{softmax}(z_{\mathrm{past}} / \tau)\, \|\, \mathrm{softmax}(z / \tau))

    with the logits :math:`z`, and :math:`z_{\mathrm{past}}` those of ``epochs_back`` epochs ago.

    Any optimizer can minimise it. In train mode, the logits of a sample are stored the first time it is seen in an
    epoch. Of the passes of a sharpness-aware step, only the first one stores logits: these are at :math:`w`, except
    MSAM's. With ``SAM(ascent=...)``, they are those of the share of the batch. Non-finite logits are not stored. In
    eval mode, the loss is the cross-entropy alone. The table of stored logits is part of ``state_dict``.

    With DDP, each rank stores the logits of the samples that it sees, and a sample that the rank did not see
    ``epochs_back`` epochs ago contributes no second term. Use a sampler that gives each rank the same samples in every
    epoch, and save one ``state_dict`` per rank.

    Args:
        samples: the size of the training set.
        classes: the number of logits per sample.
        lam: :math:`\lambda`, the weight of the second term.
        tau: :math:`\tau`, the temperature.
        start_epoch: the second term begins in epoch ``start_epoch + 1``, counted from 0.
        epochs_back: the age of the past logits, in epochs.
        label_smoothing: the label smoothing of the cross-entropy.
        reduction: ``"mean"``, or ``"none"`` for one loss per sample.
        half: store the logits in float16 instead of float32. The table of ImageNet, 20 GB, then takes 10, and the loss
            changes by about 1e-4.

    Example:
        >>> loss = SAF(samples=4, classes=3, start_epoch=0, epochs_back=1)
        >>> z, y, indices = torch.eye(3), torch.tensor([0, 1, 2]), torch.tensor([3, 0, 1])
        >>> first = loss(z, y, indices=indices)
        >>> loss.set_epoch(1)
        >>> torch.allclose(loss(z, y, indices=indices), first)
        True
        >>> bool(loss(2 * z, y, indices=indices) > torch.nn.functional.cross_entropy(2 * z, y))
        True

    Reference:
        Du, Zhou, Feng, Tan, Zhou, "Sharpness-Aware Training for Free", NeurIPS 2022.

    Differences from the paper:
        A sample that was not seen ``epochs_back`` epochs ago contributes no second term; the released code uses zeros
        as its past logits.
    """

    title = "SAF"
    reference = "Du et al., NeurIPS 2022"
    arxiv = "2205.14083"
    purpose = "A loss that keeps logits close to those stored in earlier epochs."
    memory = 0
    needs = (Need.SAMPLE_IDS, Need.EPOCHS)
    capturable = True
    set_by_training = ("samples", "classes", "label_smoothing", "reduction")
    single_process = "remembers each sample's logits, so it needs a single process: use mesa with several"

    table: Tensor
    stamp: Tensor
    now: Tensor

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
        half: bool = False,
    ) -> None:
        if isinstance(samples, (Optimizer, nn.Module)):
            raise BsamTypeError(
                "SAF is a loss, for any optimizer: write loss_fn = bsam.SAF(samples=len(dataset), classes=10)"
            )
        super().__init__(
            lam=lam, tau=tau, start_epoch=start_epoch, label_smoothing=label_smoothing, reduction=reduction
        )
        self.epochs_back = check_count("epochs_back", epochs_back)
        slots = self.epochs_back + 1  # one is read while this epoch's is written
        shape = slots, check_count("samples", samples), check_count("classes", classes)
        dtype = torch.half if check_flag("half", half) else torch.float
        self.register_buffer("table", torch.zeros(shape, dtype=dtype))
        # the epoch in which an entry was filled
        self.register_buffer("stamp", torch.full((slots, samples), NEVER, dtype=torch.int32))
        # the epoch, for CUDA graphs: indexing with a 0-dim tensor would synchronize
        self.register_buffer("now", torch.zeros(1, dtype=torch.int64), persistent=False)

    def forward(
        self, outputs: Tensor, targets: Tensor, *, inputs: Tensor | None = None, indices: Tensor | None = None
    ) -> Tensor:
        if not self.training or indices is None:
            return super().forward(outputs, targets)
        self.check(outputs, indices)
        indices = indices.to(self.table.device, torch.long)
        loss = super().forward(outputs, targets, indices=indices)
        if not in_later_pass():
            self.store(outputs.detach(), indices)
        return loss

    def _apply(self, fn: Any, recurse: bool = True) -> SAF:
        table = self.table
        super()._apply(fn, recurse)
        if self.table.dtype != table.dtype:  # a cast of the module leaves the stored logits as they are
            self.table = table.to(self.table.device)
        return self

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        self.now.fill_(epoch)

    def past_logits(self, inputs: Any, indices: Any) -> tuple[Tensor, Tensor]:
        epoch = self.now - self.epochs_back
        slot = epoch % len(self.table)
        return self.table[slot, indices], self.stamp[slot, indices] == epoch

    def store(self, logits: Tensor, indices: Tensor) -> None:
        """Store the logits of samples that were not seen in this epoch yet."""
        slot = self.now % len(self.table)
        new = (self.stamp[slot, indices] != self.now) & logits.isfinite().all(1).to(indices.device)
        finite = logits.to(self.table).nan_to_num()
        self.table[slot, indices] = torch.where(new.unsqueeze(1), finite, self.table[slot, indices])
        self.stamp[slot, indices] = torch.where(new, self.now, self.stamp[slot, indices]).int()

    def check(self, logits: Tensor, indices: Tensor) -> None:
        """Raise unless the table has room for these logits and indices."""
        n, (_, samples, classes) = len(logits), self.table.shape
        if logits.shape[1:] != (classes,):
            raise BsamValueError(
                f"outputs must have the shape (batch, {classes}), got {tuple(logits.shape)}: set classes= to the "
                "number of logits per sample"
            )
        integers = not (indices.is_floating_point() or indices.is_complex() or indices.dtype == torch.bool)
        if not integers or indices.shape != (n,):
            raise BsamValueError(
                f"indices must hold one integer for each of the {n} samples, got {indices.dtype} with the shape "
                f"{tuple(indices.shape)}: pass the third value of bsam.methods.saf.Indexed"
            )
        if n and not capturing() and not (int(indices.min()) >= 0 and int(indices.max()) < samples):
            raise BsamValueError(
                f"indices must be between 0 and {samples - 1}, got {int(indices.min())} to {int(indices.max())}: set "
                "samples= to the size of the whole training set"
            )


class Indexed(Dataset[Any]):
    """Wrap a dataset of ``(x, y)`` so that it yields ``(x, y, index)``, as :class:`bsam.SAF` needs.

    Args:
        dataset: has ``__len__`` and ``__getitem__``; its samples are tuples or lists.

    Example:
        >>> from torch.utils.data import DataLoader, TensorDataset
        >>> pairs = Indexed(TensorDataset(torch.arange(6.0), torch.arange(6) % 2))
        >>> x, y, index = next(iter(DataLoader(pairs, batch_size=3)))
        >>> index
        tensor([0, 1, 2])
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        index = range(len(self))[index]  # negative indices count from the end; also checks the range
        sample = self.dataset[index]
        if not isinstance(sample, (tuple, list)):
            raise BsamTypeError(
                f"Indexed needs samples that are tuples (x, y), got {type(sample).__name__}: convert them to tuples"
            )
        return (*sample, index)
