"""One training step, with any method of METHODS or with the base optimizer alone."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from ...core.optimizer import SharpnessAware
from ...methods import METHODS
from ...methods.distillation import Distillation
from ..tasks.task import TaskBatch
from .config import BASE

Criterion: TypeAlias = Callable[[Any, TaskBatch], Tensor]


def cross_entropy(logits: Tensor, batch: TaskBatch) -> Tensor:
    """Return the loss of each sample; the classes are the batch's second tensor."""
    return F.cross_entropy(logits, batch[1], reduction="none")


@dataclass(frozen=True)
class TrainStep:
    """A network with its optimizer and loss.

    Args:
        model: the network, or a function that calls it.
        optimizer: a sharpness-aware or any other optimizer.
        criterion: maps outputs and a batch to one loss per sample.
        loss: SAF or MESA, used instead of the criterion.
        accumulate: the number of micro-batches that a batch is split into.
        clip_norm: the largest norm of the direction; None does not clip it.
        scaler: scales the loss, for float16.
        no_sync: returns the context of micro-batches whose gradients are not averaged over processes yet; a
            sharpness-aware optimizer does not need it.
    """

    model: Callable[[Tensor], Any]
    optimizer: Optimizer
    criterion: Criterion = cross_entropy
    loss: Distillation | None = None
    accumulate: int = 1
    clip_norm: float | None = None
    scaler: torch.amp.GradScaler | None = None
    no_sync: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext

    def begin_epoch(self, epoch: int) -> None:
        """Begin an epoch, counted from 0."""
        if self.loss is not None:
            self.loss.set_epoch(epoch)

    def losses(self, *batch: Tensor) -> Tensor:
        """Return the loss of each sample in a batch: inputs, targets, indices in the training set."""
        outputs = self.model(batch[0])
        if self.loss is None:
            return self.criterion(outputs, batch)
        return self.loss(outputs, batch[1], inputs=batch[0], indices=batch[-1])

    def backward(self, *batch: Tensor) -> Tensor:
        """Add the optimizer's direction for this batch to ``p.grad``, and return the mean loss.

        With a scaler, the direction is scaled.
        """
        size = len(batch[0]) // self.accumulate

        def closure(chosen: Tensor | slice = slice(None)) -> Tensor | Iterator[Tensor]:
            samples = [t[chosen] for t in batch]
            if self.accumulate == 1:
                return self.losses(*samples)
            return (self.losses(*part) for part in zip(*(t.split(size) for t in samples), strict=True))

        if isinstance(self.optimizer, SharpnessAware):
            return self.optimizer.backward(closure, self.scaler)
        means = []
        for i, part in enumerate(zip(*(t.split(size) for t in batch), strict=True), start=1):
            with contextlib.nullcontext() if i == self.accumulate else self.no_sync():
                mean = self.losses(*part).mean() / self.accumulate
                (mean if self.scaler is None else self.scaler.scale(mean)).backward()
            means.append(mean.detach())
        return means[0] if self.accumulate == 1 else torch.stack(means).sum()

    def step(self, *batch: Tensor) -> Tensor:
        """Take one step on a batch, and return the mean loss before it."""
        self.optimizer.zero_grad()
        loss = self.backward(*batch)
        if self.clip_norm is not None:
            if self.scaler is not None:
                self.scaler.unscale_(self.optimizer)
            params = [p for group in self.optimizer.param_groups for p in group["params"]]
            nn.utils.clip_grad_norm_(params, self.clip_norm)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)  # skips the step if the direction is not finite
            self.scaler.update()
        return loss


def build_train_step(
    method: str,
    arguments: Mapping[str, Any],
    base: Optimizer,
    model: nn.Module,
    forward: Callable[[Tensor], Any] | None = None,
    criterion: Criterion = cross_entropy,
    **known: Any,
) -> TrainStep:
    """Return the training step of a method.

    Args:
        method: a name in METHODS, or :data:`~bsam.lab.training.config.BASE` for the base optimizer alone.
        arguments: the method's arguments, by name.
        base: the base optimizer.
        model: the network, or its DDP or compiled wrapper.
        forward: a function that calls the network, for instance under autocast; None calls the model itself.
        criterion: maps outputs and a batch to one loss per sample.
        known: values for the methods that take them as arguments: ``seed``, ``total_steps``, ``samples``,
            ``classes``, ``label_smoothing``. ``arguments`` take precedence.
    """
    forward = forward or model
    if method == BASE:
        return TrainStep(forward, base, criterion)
    cls: Any = METHODS[method]
    known = {"base": base, "optimizer": base, "model": model, "reduction": "none", **known}
    accepted = {name: known[name] for name in inspect.signature(cls).parameters if name in known}
    optimizer_or_loss = cls(**{**accepted, **arguments})
    if cls.is_loss:
        return TrainStep(forward, base, criterion, optimizer_or_loss.to(next(model.parameters()).device))
    return TrainStep(forward, optimizer_or_loss, criterion)
