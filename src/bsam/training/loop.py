"""One run, from the first step to the last epoch."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR

from ..core.optimizer import SharpnessAware
from ..data.digits import Digits, Examples
from ..data.label_noise import flip_labels
from ..flatness.sharpness import Sharpness, sharpness
from ..methods import METHODS
from ..models.digits_net import DigitsNet
from .config import Run

CLASSES = 10
EVALUATION_BATCH = 320  # larger ones leave the cache of one core and are slower


@dataclass(frozen=True)
class Epoch:
    """What is known after an epoch. ``sharpness`` is of the training data with the labels as trained on, and holds the training loss."""

    accuracy: float
    sharpness: Sharpness | None


@dataclass(frozen=True)
class Result:
    """A finished run."""

    run: Run
    epochs: tuple[Epoch, ...]
    seconds_per_step: float  # the median

    @property
    def last(self) -> Epoch:
        """The epoch that is reported: the last one, never the best one."""
        return self.epochs[-1]


def fit(run: Run, data: Digits, each_epoch: Callable[[int], None] | None = None) -> Result:
    """Train one network.

    Args:
        run: the settings.
        data: the three sets; only the training labels are ever flipped.
        each_epoch: called with the number of epochs done; what it raises ends the run.

    Example:
        >>> from bsam.data.digits import digits
        >>> result = fit(Run("bsam", {"rho_max": 0.02, "rho_min": 0.02}, epochs=1, held_out="validation"), digits())
        >>> result.last.accuracy > 0.5
        True
    """
    noisy, _ = flip_labels(data.train.y, run.label_noise, CLASSES, run.seed)
    train = data.train.labelled(noisy)
    held_out = data.validation if run.held_out == "validation" else data.test
    with torch.random.fork_rng(devices=[]):  # the caller's random numbers stay as they were
        torch.manual_seed(run.seed)
        model = DigitsNet(CLASSES)
    optimizer = optimizer_of(run, model)
    order = torch.Generator().manual_seed(run.seed)
    schedule = CosineAnnealingLR(optimizer, T_max=run.epochs * (len(train) // run.batch))
    seconds: list[float] = []
    epochs: list[Epoch] = []
    for epoch in range(run.epochs):
        model.train()
        for batch in torch.randperm(len(train), generator=order).split(run.batch):
            if len(batch) < run.batch:
                continue
            start = time.perf_counter()
            step(optimizer, model, train.x[batch], train.y[batch])
            seconds.append(time.perf_counter() - start)
            schedule.step()
        measured = None
        if run.radius is not None:
            measured = sharpness(model, F.cross_entropy, train.batches(EVALUATION_BATCH), rho_max=run.radius, rho_min=run.radius)
        epochs.append(Epoch(accuracy(model, held_out), measured))
        if each_epoch is not None:
            each_epoch(epoch + 1)
    return Result(run, tuple(epochs), statistics.median(seconds))


def optimizer_of(run: Run, model: nn.Module) -> Optimizer:
    """The optimizer that the settings name, on all parameters of ``model``."""
    base = SGD(model.parameters(), lr=run.lr, momentum=run.momentum, weight_decay=run.weight_decay)
    if run.method == "sgd":
        return base
    cls = METHODS[run.method].cls
    assert issubclass(cls, SharpnessAware)
    return cls(base, model, **run.arguments)


def step(optimizer: Optimizer, model: nn.Module, x: Tensor, y: Tensor) -> None:
    """One step on one batch, with the closure that every optimizer of torch understands."""

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    optimizer.step(closure)  # type: ignore[arg-type]  # torch's stubs want a float; its optimizers take the tensor


@torch.no_grad()
def accuracy(model: nn.Module, examples: Examples) -> float:
    """The share of ``examples`` that the network, in eval mode from here on, gets right."""
    model.eval()
    right = sum(int((model(x).argmax(1) == y).sum()) for x, y in examples.batches(EVALUATION_BATCH))
    return right / len(examples)
