"""What is particular to a kind of training: everything that the loop does not know."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor, nn

from ..flatness.dataset_loss import Batches
from .config import Run

Batch: TypeAlias = tuple[
    Tensor, ...
]  # the inputs first, then targets, and last each sample's place in the training set


@dataclass(frozen=True)
class Measure:
    """The number that a table shows of a trained network.

    Args:
        name: of the metric, without the set that it was taken on.
        title: what it is and in which unit, once it is multiplied.
        factor: by which.

    Example:
        >>> Measure("accuracy", "accuracy in %", 100).shown({"test_accuracy": 0.75}, "test")
        75.0
    """

    name: str
    title: str
    factor: float = 1.0

    def shown(self, metrics: Mapping[str, Any], part: str) -> float:
        """As the table shows it."""
        return self.factor * metrics[f"{part}_{self.name}"]


class Task(ABC):
    """How samples become batches, outputs losses, and a trained network numbers.

    A task is built from the settings of a run, on the device of the run; its data lives there.

    Args:
        run: the settings.
        device: where to train.
        data_dir: the folder with the data, for data that is read from files.
    """

    measure: ClassVar[Measure]  # what a table shows
    logits: ClassVar[bool] = (
        False  # whether outputs are the logits of classes and the first target is the class: what SAF and MESA need
    )
    samples: int  # to train on
    classes: int  # outputs of a sample
    smoothing: float = 0.0  # of the labels, as torch's cross-entropy counts it: for SAF and MESA, which bring their own

    @abstractmethod
    def __init__(self, run: Run, device: torch.device, data_dir: Path | None = None) -> None: ...

    @abstractmethod
    def network(self) -> nn.Module:
        """A new network on the device, its weights a function of the run's seed."""

    def begin_epoch(self, epoch: int) -> None:  # noqa: B027 - most tasks draw something, some do not
        """What chance decides in an epoch, counted from 0, is drawn here: a function of seed and epoch, so that a
        resumed run draws the same.
        """

    @abstractmethod
    def batch(self, index: Tensor) -> Batch:
        """The samples at these places of the training set, augmented."""

    @abstractmethod
    def losses(self, outputs: Any, batch: Batch) -> Tensor:
        """One loss per sample, to train by."""

    @abstractmethod
    def evaluate(self, network: nn.Module) -> dict[str, float]:
        """The network, in eval mode, on the set that the run holds out: numbers by name."""

    @abstractmethod
    def examples(self, limit: int | None = None) -> Batches:
        """Training samples as batches ``(x, y)``, not augmented, targets as trained on: what flatness is measured on."""

    @abstractmethod
    def loss(self, outputs: Any, y: Any) -> Tensor:
        """The mean loss of one of these batches."""

    @abstractmethod
    def fingerprint(self) -> str:
        """A digest of the data, training samples and those held out: a run goes on with the same data, or not at all."""

    def notes(self) -> Mapping[str, Any]:
        """What else to write down beside the settings, by name: plain values."""
        return {}
