"""MESA."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer

from ..common.checks import check_number
from ..common.errors import BsamTypeError
from ..common.method_info import Need
from .distillation import Distillation


class MESA(Distillation):
    r"""Memory-Efficient Sharpness-Aware training: a loss that keeps the logits close to those of an averaged model.

    .. math::
        \mathrm{CE}(z, y)
        + \lambda \tau^2\, \mathrm{KL}(\mathrm{softmax}(\bar z / \tau)\, \|\, \mathrm{softmax}(z / \tau))

    with the logits :math:`z`, and :math:`\bar z` those of a moving average of the model.

    Any optimizer can minimise it. The moving average is updated after each step of ``optimizer``, is part of
    ``state_dict``, and is evaluated in eval mode without gradients. If the loss itself is in eval mode, it is the
    cross-entropy alone. With DDP, all ranks have the same averaged weights, but each rank averages its own buffers
    (such as batch norm statistics).

    Args:
        model: the network that is trained, or its DDP or compiled wrapper.
        optimizer: the optimizer that trains it; its steps update the average.
        decay: the decay of the average.
        lam, tau, start_epoch, label_smoothing, reduction: as in :class:`SAF`.

    Example:
        >>> model = nn.Linear(2, 3)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> loss = MESA(model, optimizer, start_epoch=0)
        >>> x, y = torch.randn(4, 2), torch.tensor([0, 1, 2, 0])
        >>> loss.set_epoch(1)
        >>> loss(model(x), y, inputs=x).backward()
        >>> optimizer.step()
        >>> bool(loss(model(x), y, inputs=x) > nn.functional.cross_entropy(model(x), y))
        True

    Reference:
        Du, Zhou, Feng, Tan, Zhou, "Sharpness-Aware Training for Free", NeurIPS 2022.

    Differences from the paper:
        None known.
    """

    title = "MESA"
    reference = "Du et al., NeurIPS 2022"
    arxiv = "2205.14083"
    purpose = "A loss that keeps logits close to an averaged model's."
    memory_kept = 1
    needs = (Need.INPUTS, Need.EPOCHS, Need.FORWARD_PASS)
    capturable = True
    set_by_training = ("model", "optimizer", "label_smoothing", "reduction")

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        decay: float = 0.9998,
        lam: float = 0.8,
        tau: float = 5.0,
        start_epoch: int = 5,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
    ) -> None:
        if not isinstance(model, nn.Module) or not isinstance(optimizer, Optimizer):
            raise BsamTypeError(
                "MESA is a loss, for any optimizer: write loss_fn = bsam.MESA(model, optimizer); got "
                f"{type(model).__name__} and {type(optimizer).__name__}"
            )
        super().__init__(
            lam=lam, tau=tau, start_epoch=start_epoch, label_smoothing=label_smoothing, reduction=reduction
        )
        self.decay = check_number("decay", decay, low=0, high=1)
        self._model_and_optimizer = unwrap(model), optimizer  # a tuple, so that the model does not become a submodule
        self.average = copy.deepcopy(self._model_and_optimizer[0]).requires_grad_(False)
        self._wide = any(p.dtype in (torch.half, torch.bfloat16) for p in model.parameters())
        if self._wide:  # in half precision, such small updates of the average would be rounded away
            self.average.float()
        optimizer.register_step_post_hook(self.update)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._model_and_optimizer[1].register_step_post_hook(self.update)  # copies of optimizers have no hooks

    @torch.no_grad()
    def update(self, optimizer: Optimizer | None = None, *_: Any) -> None:
        """Update the average; the optimizer calls it after each step."""
        found_inf = getattr(optimizer, "found_inf", None)  # GradScaler sets it on fused optimizers, which skip the step
        share = 1 - self.decay if found_inf is None else (1 - self.decay) * (found_inf == 0)
        networks = (self.average, self._model_and_optimizer[0])
        tensors = ([*network.parameters(), *network.buffers()] for network in networks)  # tied weights once
        for average, new in zip(*tensors, strict=True):
            if average.is_floating_point() or average.is_complex():
                average.add_((new - average) * share)
            else:
                average.copy_(new)

    @torch.no_grad()
    def past_logits(self, inputs: Any, indices: Any) -> tuple[Tensor, Tensor]:
        past = self.average.eval()(inputs.float() if self._wide and inputs.is_floating_point() else inputs)
        return past, torch.ones_like(past[:, 0], dtype=torch.bool)


def unwrap(model: nn.Module) -> nn.Module:
    """Return the network inside the wrappers of DDP and ``torch.compile``."""
    if isinstance(model, (DataParallel, DistributedDataParallel)):
        return unwrap(model.module)
    inside = getattr(model, "_orig_mod", None)
    return unwrap(inside) if isinstance(inside, nn.Module) else model
