"""One run, from the first step to the last epoch."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR

from ..core.refusal import Refusal
from ..data.digits import Digits, Examples
from ..data.label_noise import flip_labels
from ..flatness.hessian import HessianOperator
from ..flatness.landscape import landscape
from ..flatness.sharpness import Sharpness, sharpness
from ..flatness.spectrum import top_eigenvalues
from ..models.digits_net import DigitsNet
from .config import Run
from .learner import Learner, equip

CLASSES = 10
EVALUATION_BATCH = 320  # larger ones leave the cache of one core and are slower
CURVATURE_SAMPLES = 256  # of the training data, the first ones: Hessian products take their time


@dataclass(frozen=True)
class Epoch:
    """What is known after an epoch. ``sharpness`` is of the training data with the labels as trained on, and holds the training loss."""

    accuracy: float
    sharpness: Sharpness | None


@dataclass(frozen=True)
class Relief:
    """The loss on a plane through the network, as plain numbers: a row for each place along the first direction. The network is at the centre."""

    axis: tuple[float, ...]
    loss: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Result:
    """A finished run. The eigenvalue and the relief are of the network after the last epoch, on some of the training data, labels as trained on."""

    run: Run
    epochs: tuple[Epoch, ...]
    seconds_per_step: float  # the mean over an epoch, whose steps may differ; of these the median
    top_eigenvalue: float | None = None  # the largest of the Hessian; NaN where that is not finite
    relief: Relief | None = None

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
    steps = len(train) // run.batch
    learner = learner_of(run, model, len(train), run.epochs * steps)
    order = torch.Generator().manual_seed(run.seed)
    schedule = CosineAnnealingLR(learner.optimizer, T_max=run.epochs * steps)
    seconds: list[float] = []
    epochs: list[Epoch] = []
    for epoch in range(run.epochs):
        model.train()
        learner.begin_epoch(epoch)
        spent = 0.0
        for batch in torch.randperm(len(train), generator=order).split(run.batch)[:steps]:
            start = time.perf_counter()
            learner.step(train.x[batch], train.y[batch], batch)
            spent += time.perf_counter() - start
            schedule.step()
        seconds.append(spent / steps)
        measured = None
        if run.radius is not None:
            measured = sharpness(model, F.cross_entropy, train.batches(EVALUATION_BATCH), rho_max=run.radius, rho_min=run.radius)
        epochs.append(Epoch(accuracy(model, held_out), measured))
        if each_epoch is not None:
            each_epoch(epoch + 1)
    some = Examples(train.x[:CURVATURE_SAMPLES], train.y[:CURVATURE_SAMPLES])
    top = _top_eigenvalue(model, some) if run.curvature else None
    relief = _relief(model, some, run.relief) if run.relief is not None else None
    return Result(run, tuple(epochs), statistics.median(seconds), top, relief)


def _top_eigenvalue(model: nn.Module, examples: Examples) -> float:
    try:
        return float(top_eigenvalues(HessianOperator(model, F.cross_entropy, examples.batches(EVALUATION_BATCH)), k=1, tol=1e-3).values[0])
    except Refusal:  # a product was not finite: a run that diverged is a result, too
        return math.nan


def _relief(model: nn.Module, examples: Examples, points: int) -> Relief:
    found = landscape(model, F.cross_entropy, examples.batches(EVALUATION_BATCH), points=points)
    return Relief(tuple(found.axes[0].tolist()), tuple(map(tuple, found.loss.tolist())))


def learner_of(run: Run, model: nn.Module, samples: int, steps: int) -> Learner:
    """The network with what the settings name to train it, on ``samples`` samples for ``steps`` steps."""
    base = SGD(model.parameters(), lr=run.lr, momentum=run.momentum, weight_decay=run.weight_decay)
    return equip(run.method, run.arguments, base, model, seed=run.seed, total_steps=steps, samples=samples, classes=CLASSES)


@torch.no_grad()
def accuracy(model: nn.Module, examples: Examples) -> float:
    """The share of ``examples`` that the network, in eval mode from here on, gets right."""
    model.eval()
    right = sum(int((model(x).argmax(1) == y).sum()) for x, y in examples.batches(EVALUATION_BATCH))
    return right / len(examples)
