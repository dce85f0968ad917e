"""The interface between the training loop and a task."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ...flatness.dataset_loss import Batches
from ..config import Run, TaskSettings
from .shares import WHOLE, Shares

TaskBatch: TypeAlias = tuple[Tensor, ...]  # inputs, then targets, and last the samples' indices in the training set
# The split "holdout" takes a fifth of the training samples and at least 200, but never more than half of them. An
# accuracy of 90 % on 200 samples has a standard error of 2 points.
HOLDOUT = 0.2
MIN_HOLDOUT = 200
MAX_HOLDOUT = 0.5
_HOLDOUT_STREAM = 0x401D  # makes this random choice independent of that of the label noise


def holdout_size(samples: int) -> int:
    """Return how many training samples are held out.

    Example:
        >>> [holdout_size(samples) for samples in (20, 300, 640, 50_000)]
        [10, 150, 200, 10000]
    """
    return max(1, min(max(round(HOLDOUT * samples), MIN_HOLDOUT), int(MAX_HOLDOUT * samples)))


def holdout_mask(samples: int, seed: int) -> Tensor:
    """Return a random mask of the training samples that are held out.

    Example:
        >>> mask = holdout_mask(640, seed=0)
        >>> int(mask.sum())
        200
    """
    mask = torch.zeros(samples, dtype=torch.bool)
    mask[np.random.default_rng((seed, _HOLDOUT_STREAM)).permutation(samples)[: holdout_size(samples)]] = True
    return mask


@dataclass(frozen=True)
class Score:
    """The metric by which tables compare trained networks.

    Args:
        name: name of the metric, without the split.
        title: its title in tables, with the unit.
        factor: the factor that converts the metric to this unit.
        higher: whether more is better; False for losses and errors.

    Example:
        >>> Score("accuracy", "accuracy in %", 100).shown({"test_accuracy": 0.75}, "test")
        75.0
    """

    name: str
    title: str
    factor: float = 1.0
    higher: bool = True

    def metric(self, split: str) -> str:
        """Return the name of the metric on a split."""
        return f"{split}_{self.name}"

    def shown(self, metrics: Mapping[str, Any], split: str) -> float:
        """Return the number in the unit of the tables."""
        return self.factor * metrics[self.metric(split)]


class BaseTask(ABC):
    """Defines how samples become batches, outputs become losses, and a trained network is evaluated.

    Args:
        run: settings of the run.
        device: the device to train on, which also holds the batches.
        data_dir: folder with the data, if it is read from files.
    """

    score: ClassVar[Score]
    settings_type: ClassVar[type[TaskSettings]] = TaskSettings  #: the class of ``run.task`` in its runs
    loss_title: ClassVar[str] = "loss"  #: what :meth:`loss` computes, for labels of flatness measurements
    logits: ClassVar[bool] = False  #: whether outputs are logits and the first target the class, as SAF and MESA need
    samples: int  #: number of training samples
    eval_samples: int | None = None  #: number of samples that :meth:`evaluate` uses, if it is known
    classes: int  #: number of outputs per sample
    image_size: int | None = None  #: side of the network's inputs in pixels, if they are square images
    smoothing: float = 0.0  #: torch's label_smoothing, for SAF and MESA, which compute the cross-entropy themselves
    shares: Shares = WHOLE  #: how the processes of torchrun may divide the batches of :meth:`evaluate`

    @abstractmethod
    def __init__(self, run: Run, device: torch.device, data_dir: Path | None = None) -> None: ...

    @abstractmethod
    def network(self) -> nn.Module:
        """Return a new network on the device; its weights are a function of the run's seed."""

    def initialise(self, network: nn.Module, init: Path | None = None) -> Sequence[str]:
        """Load the initial weights, if they are not random. Return sentences for the user.

        Args:
            network: from :meth:`network`.
            init: file with the trained network of the run that ``run.init`` names.
        """
        return ()

    def set_train_mode(self, network: nn.Module) -> None:
        """Set the network to training mode."""
        network.train()

    def begin_epoch(self, epoch: int) -> None:  # noqa: B027 - most tasks draw something, some do not
        """Draw the random numbers of an epoch (counted from 0).

        They must depend only on the seed and the epoch, so that a resumed run draws the same ones.
        """

    @abstractmethod
    def batch(self, index: Tensor) -> TaskBatch:
        """Return the training samples with these indices, augmented.

        Random numbers come from :meth:`begin_epoch` or from torch's generators, and not from other calls of this
        method, because a run may be continued in the middle of an epoch.
        """

    def batches(self, indices: Tensor) -> Iterator[TaskBatch]:
        """Return a batch for each row of indices, in order. A task that reads from host memory may read ahead."""
        return map(self.batch, indices)

    @abstractmethod
    def losses(self, outputs: Any, *targets: Any) -> Tensor:
        """Return the training loss of each sample."""

    def batch_losses(self, outputs: Any, batch: TaskBatch) -> Tensor:
        """Return the training loss of each sample in a batch."""
        return self.losses(outputs, *batch[1:-1])

    @abstractmethod
    def evaluate(self, network: nn.Module) -> dict[str, float]:
        """Return metrics of the network, in eval mode. Their names begin with the run's ``eval_split``.

        Classification adds ``memorised``, which is measured on training samples. With ``torchrun``, all processes call
        this method, and the result of the first one counts.
        """

    @abstractmethod
    def examples(self, limit: int | None = None) -> Batches:
        """Return training samples as batches ``(x, y)`` for flatness measurements.

        They are not augmented, and have the targets used in training.
        """

    @abstractmethod
    def loss(self, outputs: Any, y: Any) -> Tensor:
        """Return the mean loss of a batch from :meth:`examples`."""

    @abstractmethod
    def fingerprint(self) -> str:
        """Return a digest of the data; a run is resumed only with the same data."""

    def predictions(self, network: nn.Module) -> Mapping[str, NDArray[Any]]:
        """Return arrays by name for the report: predictions of the trained network for some samples, in eval mode."""
        return {}

    def notes(self) -> Mapping[str, Any]:
        """Return other plain values to write into the run directory, by file name without ``.json``."""
        return {}
