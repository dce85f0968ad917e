"""Classification of images."""

from __future__ import annotations

import functools
import hashlib
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
from .config import Run
from .task import Batch, Measure, Task

EVALUATION_BATCH = {"cpu": 320, "cuda": 2500}  # on a CPU larger ones leave the cache of a core and are slower

_load = functools.lru_cache(maxsize=1)(load)  # runs that follow one another share a data set


class Classification(Task):
    """Images in, classes out: cross-entropy with label smoothing, judged by accuracy.

    Args:
        run: the settings.
        device: where to train.
        data_dir: the folder with the data, for data that is read from files.
        data: images at hand, in place of those that the run names.

    Example:
        >>> task = Classification(Run("sgd", label_noise=0.25, eval_split="validation"), torch.device("cpu"))
        >>> task.samples, task.classes, len(task.notes()["flipped"])
        (640, 10, 160)
    """

    measure = Measure("accuracy", "accuracy in %", 100)
    logits: ClassVar[bool] = True

    def __init__(
        self, run: Run, device: torch.device, data_dir: Path | None = None, data: Dataset | None = None
    ) -> None:
        data = data or _load(run.data, data_dir)
        eval_split: Examples | None = getattr(data, run.eval_split)
        if eval_split is None:
            raise BsamValueError(f"{run.data} has no {run.eval_split} set: set eval_split to test")
        train = data.train if run.limit_train is None else _limited(data.train, "limit_train", run.limit_train)
        noisy, flipped = flip_labels(train.y, run.label_noise, data.classes, run.seed)
        self._flipped = flipped if run.limit_train is None else data.train.places(run.limit_train)[flipped]
        self.run, self.device, self.classes, self.samples = run, device, data.classes, len(train)
        self._mean, self._std = data.mean, data.std
        self._sets = train, eval_split  # as they were read
        self._train = train.labelled(noisy).to(device)
        self._held_out = (
            eval_split if run.limit_test is None else _limited(eval_split, "limit_test", run.limit_test)
        ).to(device)
        self._augment = augmentation(run.augment or DATASETS[run.data].augmentation, data)
        self.smoothing = label_smoothing(run.label_smoothing, data.classes)
        self._size = EVALUATION_BATCH[device.type]
        self.begin_epoch(0)

    def network(self) -> nn.Module:
        """The run's network, for images of this size."""
        image = self._train.x[:1]
        network = build(self.run.model, self.classes, image.shape[1], self.run.seed)
        try:
            with torch.no_grad():
                network.eval()(torch.zeros(image.shape))
        except RuntimeError as error:
            raise BsamValueError(
                f"{self.run.model} does not take images of {'x'.join(map(str, image.shape[1:]))}, as {self.run.data} "
                "has them"
            ) from error
        return network.train().to(self.device)

    def begin_epoch(self, epoch: int) -> None:
        """Draw crops, flips and holes."""
        self._draws = self._augment.draws(self.samples, self.run.seed, epoch, self._train.x.shape[-1]).to(self.device)

    def batch(self, index: Tensor) -> Batch:
        """Images, classes, places."""
        return self._augment(self._train.x[index], self._draws[index]), self._train.y[index], index

    def losses(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Cross-entropy with label smoothing."""
        return F.cross_entropy(outputs.float(), batch[1], reduction="none", label_smoothing=self.smoothing)

    @torch.no_grad()
    def evaluate(self, network: nn.Module) -> dict[str, float]:
        """Cross-entropy, without label smoothing, and the share of images that the network gets right."""
        loss = torch.zeros((), device=self.device, dtype=torch.float64)
        right = torch.zeros((), device=self.device, dtype=torch.int64)
        for x, y in self._held_out.batches(self._size):
            logits = network(self._normalised(x)).float()
            loss += F.cross_entropy(logits, y, reduction="sum")
            right += (logits.argmax(1) == y).sum()
        part, n = self.run.eval_split, len(self._held_out)
        return {f"{part}_loss": float(loss) / n, f"{part}_accuracy": int(right) / n}

    def examples(self, limit: int | None = None) -> list[tuple[Tensor, Tensor]]:
        """Training images in their order, labels as trained on; fewer of them from all classes alike."""
        chosen = self._train if limit is None else self._train.some(min(limit, self.samples))
        return [(self._normalised(x), y) for x, y in chosen.batches(self._size)]

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Cross-entropy, without label smoothing."""
        return F.cross_entropy(outputs, y)

    def fingerprint(self) -> str:
        """Of pixels and true labels, in their order."""
        digest = hashlib.sha256()
        for tensor in (t for part in self._sets for t in (part.x, part.y)):
            digest.update(repr((tuple(tensor.shape), tensor.dtype)).encode())
            digest.update(tensor.contiguous().numpy().data)
        return digest.hexdigest()

    def notes(self) -> Mapping[str, Any]:
        """The places of the flipped labels, in the training set of the data set."""
        return {"flipped": self._flipped.tolist()} if self.run.label_noise else {}

    def _normalised(self, x: Tensor) -> Tensor:
        return normalise(x, self._mean, self._std)


def label_smoothing(others: float, classes: int) -> float:
    """Torch's ``label_smoothing``, which the true class has a share of, too, for the probability that the other classes
    are to have together.

    Example:
        >>> torch_s = label_smoothing(0.1, classes=10)
        >>> round(torch_s * 9 / 10, 6)
        0.1
    """
    most = (classes - 1) / classes  # what the other classes have when all have the same
    if others > most:
        raise BsamValueError(
            f"label_smoothing must be at most {most:g}, or the true class would be the least likely of {classes}; got "
            f"{others}"
        )
    return others * classes / (classes - 1)


def _limited(examples: Examples, name: str, n: int) -> Examples:
    if n > len(examples):
        raise BsamValueError(f"{name} must be at most {len(examples)}, the size of the set; got {n}")
    return examples.some(n)
