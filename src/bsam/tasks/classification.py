"""Classification of images."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.errors import BsamValueError
from ..data import DATASETS, load
from ..data.augment import augmentation, normalise
from ..data.examples import Dataset, Examples
from ..data.label_noise import flip_labels
from ..models import build
from .settings import TaskSettings
from .task import Measure, Task, TaskBatch

EVALUATION_BATCH = {"cpu": 320, "cuda": 2500}  # on a CPU larger ones exceed the cache of a core and are slower
MEMORISED_SAMPLES = 5000  # the most flipped labels that are compared after an epoch: half as many as CIFAR's test set

_load_cached = functools.lru_cache(maxsize=1)(load)  # consecutive runs share a data set


class Classification(Task):
    """Classify images: cross-entropy with label smoothing, measured by accuracy.

    Args:
        run: the settings of the run.
        device: where to train.
        data_dir: the folder with the data, for data that is read from files.
        data: the images and labels, in place of those that the run names.

    Example:
        >>> task = Classification(TaskSettings(label_noise=0.25, eval_split="validation"), torch.device("cpu"))
        >>> task.samples, task.classes, len(task.notes()["flipped"])
        (640, 10, 160)
    """

    measure = Measure("accuracy", "accuracy in %", 100)
    logits: ClassVar[bool] = True

    def __init__(
        self, run: TaskSettings, device: torch.device, data_dir: Path | None = None, data: Dataset | None = None
    ) -> None:
        data = data or _load_cached(run.data, data_dir)
        eval_split: Examples | None = getattr(data, run.eval_split)
        if eval_split is None:
            raise BsamValueError(f"{run.data} has no {run.eval_split} set: set eval_split to test")
        train = _limited(data.train, "limit_train", run.limit_train)
        noisy, flipped = flip_labels(train.y, run.label_noise, data.classes, run.seed)
        self._flipped = flipped if run.limit_train is None else data.train.balanced_indices(run.limit_train)[flipped]
        self.run, self.device, self.classes, self.samples = run, device, data.classes, len(train)
        self._mean, self._std = data.mean, data.std
        self._original_splits = train, eval_split
        self._train = train.labelled(noisy).to(device)
        self._eval_split = _limited(eval_split, "limit_test", run.limit_test).to(device)
        seen = flipped[:: max(1, math.ceil(len(flipped) / MEMORISED_SAMPLES))].to(device)  # all, or evenly spaced ones
        self._memorised = Examples(self._train.x[seen], self._train.y[seen])
        self._augment = augmentation(run.augment or DATASETS[run.data].augmentation, data)
        self.smoothing = torch_label_smoothing(run.label_smoothing, data.classes)
        self._eval_batch_size = EVALUATION_BATCH[device.type]
        self.begin_epoch(0)

    def network(self) -> nn.Module:
        """Return the run's network, for images of this size."""
        image = self._train.x[:1]
        network = build(self.run.model, self.classes, image.shape[1], self.run.seed)
        try:
            with torch.no_grad():
                network.eval()(torch.zeros(image.shape))
        except (RuntimeError, AssertionError) as error:  # the latter from networks of timm for one size only
            size = "x".join(map(str, image.shape[1:]))
            raise BsamValueError(f"{self.run.model} does not take images of {size}, as {self.run.data} has") from error
        return network.train().to(self.device)

    def begin_epoch(self, epoch: int) -> None:
        """Draw crops, flips and holes."""
        self._draws = self._augment.draws(self.samples, self.run.seed, epoch, self._train.x.shape[-1]).to(self.device)

    def batch(self, index: Tensor) -> TaskBatch:
        """Return augmented images, classes and indices."""
        return self._augment(self._train.x[index], self._draws[index]), self._train.y[index], index

    def losses(self, outputs: Tensor, batch: TaskBatch) -> Tensor:
        """Return the cross-entropy of each sample, with label smoothing."""
        return F.cross_entropy(outputs.float(), batch[1], reduction="none", label_smoothing=self.smoothing)

    @torch.no_grad()
    def evaluate(self, network: nn.Module) -> dict[str, float]:
        """Return cross-entropy, without label smoothing, and accuracy.

        Where training labels are flipped, also ``memorised``: the share of flipped training samples, not augmented, for
        which the network predicts the flipped label. Of more than :data:`MEMORISED_SAMPLES`, evenly spaced ones count.
        """
        split = self.run.eval_split
        loss, accuracy = self._loss_and_accuracy(network, self._eval_split)
        found = {f"{split}_loss": loss, f"{split}_accuracy": accuracy}
        if len(self._memorised):
            found["memorised"] = self._loss_and_accuracy(network, self._memorised)[1]
        return found

    def _loss_and_accuracy(self, network: nn.Module, examples: Examples) -> tuple[float, float]:
        loss = torch.zeros((), device=self.device, dtype=torch.float64)
        right = torch.zeros((), device=self.device, dtype=torch.int64)
        for x, y in examples.batches(self._eval_batch_size):
            logits = network(self._normalised(x)).float()
            loss += F.cross_entropy(logits, y, reduction="sum")
            right += (logits.argmax(1) == y).sum()
        return float(loss) / len(examples), int(right) / len(examples)

    def examples(self, limit: int | None = None) -> list[tuple[Tensor, Tensor]]:
        """Return training images with the labels used in training (including flipped ones), balanced if limited."""
        chosen = self._train if limit is None else self._train.some(min(limit, self.samples))
        return [(self._normalised(x), y) for x, y in chosen.batches(self._eval_batch_size)]

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the mean cross-entropy, without label smoothing."""
        return F.cross_entropy(outputs, y)

    def fingerprint(self) -> str:
        """Return a digest of pixels and true labels, in their order."""
        digest = hashlib.sha256()
        for tensor in (t for part in self._original_splits for t in (part.x, part.y)):
            digest.update(repr((tuple(tensor.shape), tensor.dtype)).encode())
            digest.update(tensor.contiguous().numpy().data)
        return digest.hexdigest()

    def notes(self) -> Mapping[str, Any]:
        """Return the indices of the flipped labels, in the whole training set."""
        return {"flipped": self._flipped.tolist()} if self.run.label_noise else {}

    def _normalised(self, x: Tensor) -> Tensor:
        return normalise(x, self._mean, self._std)


def torch_label_smoothing(prob_others: float, num_classes: int) -> float:
    """Return torch's ``label_smoothing``, which includes the true class, for the probability of the other classes.

    Example:
        >>> torch_s = torch_label_smoothing(0.1, num_classes=10)
        >>> round(torch_s * 9 / 10, 6)
        0.1
    """
    most = (num_classes - 1) / num_classes  # a uniform distribution
    if prob_others > most:
        raise BsamValueError(
            f"label_smoothing must be at most {most:g} for {num_classes} classes, or the true class would get the "
            f"lowest probability; got {prob_others}"
        )
    return prob_others * num_classes / (num_classes - 1)


def _limited(examples: Examples, name: str, n: int | None) -> Examples:
    if n is not None and n > len(examples):
        raise BsamValueError(f"{name} must be at most {len(examples)}, the size of the set; got {n}")
    return examples if n is None else examples.some(n)
