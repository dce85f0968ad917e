"""One training step of a network, with any method of METHODS or the base optimizer alone."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from ..core.optimizer import SharpnessAware
from ..methods import METHODS
from ..methods.distillation import Distillation
from ..tasks.task import TaskBatch

Criterion: TypeAlias = Callable[[Any, TaskBatch], Tensor]


def cross_entropy(logits: Tensor, batch: TaskBatch) -> Tensor:
    """One per sample; the classes are the batch's second tensor."""
    return F.cross_entropy(logits, batch[1], reduction="none")


@dataclass(frozen=True)
class TrainStep:
    """A network, the optimizer that updates its weights, and the loss that is minimised.

    Args:
        model: the network, or a function that calls it.
        optimizer: sharpness-aware or any other.
        criterion: maps outputs and a batch to one loss per sample.
        loss: SAF or MESA, in place of the criterion.
    """

    model: Callable[[Tensor], Any]
    optimizer: Optimizer
    criterion: Criterion = cross_entropy
    loss: Distillation | None = None

    def begin_epoch(self, epoch: int) -> None:
        """Begin an epoch, counted from 0."""
        if self.loss is not None:
            self.loss.set_epoch(epoch)

    def losses(self, *batch: Tensor) -> Tensor:
        """Return the loss of each sample of a batch: inputs, targets, indices in the training set."""
        outputs = self.model(batch[0])
        if self.loss is None:
            return self.criterion(outputs, batch)
        return self.loss(outputs, batch[1], inputs=batch[0], indices=batch[-1])

    def backward(self, *batch: Tensor) -> Tensor:
        """Add the optimizer's direction on this batch to ``p.grad``. Return the mean loss."""

        def closure(chosen: Tensor | slice = slice(None)) -> Tensor:
            return self.losses(*(t[chosen] for t in batch))

        if isinstance(self.optimizer, SharpnessAware):
            return self.optimizer.backward(closure)
        loss = closure().mean()
        loss.backward()
        return loss.detach()

    def step(self, *batch: Tensor) -> Tensor:
        """Take one step on one batch. Return the mean loss before it."""
        self.optimizer.zero_grad()
        loss = self.backward(*batch)
        self.optimizer.step()
        return loss


def build_optimizer(
    method: str,
    arguments: Mapping[str, Any],
    base: Optimizer,
    model: nn.Module,
    forward: Callable[[Tensor], Any] | None = None,
    criterion: Criterion = cross_entropy,
    **known: Any,
) -> TrainStep:
    """Build the training step of a network: with ``base`` alone for the method ``"base"``, else with one of METHODS.

    Args:
        method: its name.
        arguments: of the method, by name.
        base: the optimizer that takes the step.
        model: the network, or its DDP or compiled wrapper.
        forward: a function that calls it, under autocast for example; None: the model itself.
        criterion: maps outputs and a batch to one loss per sample.
        known: what the run knows and some methods have as an argument, by name: ``seed``, ``total_steps``,
            ``samples``, ``classes``. ``arguments`` take precedence.
    """
    forward = forward or model
    if method == "base":
        return TrainStep(forward, base, criterion)
    cls: Any = METHODS[method]
    known = {"base": base, "optimizer": base, "model": model, "reduction": "none", **known}
    own = cls(**{**{name: known[name] for name in inspect.signature(cls).parameters if name in known}, **arguments})
    if METHODS[method].is_loss:
        return TrainStep(forward, base, criterion, own.to(next(model.parameters()).device))
    return TrainStep(forward, own, criterion)
