"""Classification of images."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from ...common.errors import BsamValueError
from ..common.files import MAX_TEXT, read_bytes, reading
from ..config import ClassificationSettings, Run
from ..data import dataset_entry
from ..data.arrays import Dataset, Examples, flip_labels
from ..data.augment import Augment, ResizedCrop, TimmAugment, augmentation, is_timm
from ..data.images import duplicate_warnings
from ..models import model_entry
from ..quantization import calibrate
from .classifiers import build_float_network, build_network, class_predictions, quantize_network
from .image_inputs import Inputs, inputs_of, load_data
from .image_task import ImageTask, limit_samples
from .shares import WHOLE, Shares
from .task import Score, TaskBatch, holdout_mask

EVALUATION_BATCH = {"cpu": 320, "cuda": 2500}  # larger ones exceed the cache of a CPU core and are slower
LARGE_IMAGE = 64  # the side, in pixels, above which images are evaluated in smaller batches
LARGE_IMAGE_BATCH = 64
CALIBRATION_SAMPLES = 256  # for the initial input scales of a quantized network; fewer if the first batch is smaller
MEMORISED_SAMPLES = 5000  # wrong labels to check after an epoch, at most; half the size of CIFAR's test set


class Classification(ImageTask):
    """Classification of images with cross-entropy and label smoothing, measured by accuracy.

    Args:
        run: settings of the run.
        device: where to train.
        data_dir: folder with the data, if it is read from files.
        data: images and labels to use instead of those that the run names.
        cache_dir: folder for decoded image files; by default a folder next to the files.

    Example:
        >>> task = Classification(
        ...     Run.of("sgd", label_noise=0.25, eval_split="validation"),
        ...     torch.device("cpu"),
        ... )
        >>> task.samples, task.classes, len(task.notes()["flipped"])
        (640, 10, 144)
    """

    score = Score("accuracy", "accuracy in %", 100)
    loss_title: ClassVar[str] = "cross-entropy"
    logits: ClassVar[bool] = True
    settings_type = ClassificationSettings
    eval_samples: int

    def __init__(
        self,
        run: Run,
        device: torch.device,
        data_dir: Path | None = None,
        data: Dataset | None = None,
        cache_dir: Path | None = None,
    ) -> None:
        entry = dataset_entry(run.data).resolve(data_dir)
        if entry.task != "classification":
            raise BsamValueError(f"{run.data} has joints and no classes: use --task {entry.task}, or other data")
        if (backbone := model_entry(run.model).backbone) is not None:
            raise BsamValueError(f"{run.model} finds joints and has no classes: use --model {backbone}")
        self.settings = run.task_settings(ClassificationSettings)
        if is_timm(run.augment) and TimmAugment.named(str(run.augment)).mixes and run.batch % 2:
            raise BsamValueError(f"mixup and cutmix need an even batch, got {run.batch}")
        data, left_out = load_data(run, data_dir, cache_dir) if data is None else (data, [])
        super().__init__(run, device, data_dir, left_out, in_files=data.digest is not None)
        self.inputs, self.pixels = inputs_of(run, data), data.pixels
        self.image_size = self.inputs.size
        self._split, self._digest = data.split, data.digest
        self._duplicates = data.duplicates
        train = limit_samples(data.train, "limit_train", run.limit_train)
        noisy, flipped = flip_labels(
            train.y, self.settings.label_noise, data.classes, run.seed, self.settings.noise_labels
        )
        self._flipped = flipped if run.limit_train is None else data.train.balanced_indices(run.limit_train)[flipped]
        labelled, self._true_holdout = Examples(train.x, noisy), None
        if run.eval_split == "holdout":
            held_out = holdout_mask(len(train), run.seed)
            eval_split = labelled.at(held_out)
            if self.settings.label_noise:
                self._true_holdout = train.at(held_out).to(self._host)
            labelled, flipped = labelled.at(~held_out), (noisy != train.y)[~held_out].nonzero().flatten()
        elif (split := getattr(data, run.eval_split)) is not None:
            eval_split = split
        else:
            raise BsamValueError(
                f"{run.data} has no {run.eval_split} set: set eval_split to test or holdout, or add one (for "
                "image files, a folder val next to train and test)"
            )
        self.classes, self.samples = data.classes, len(labelled)
        self._original_splits = train, eval_split
        self._train, self._labels = labelled.to(self._host), labelled.y.to(device)
        self._x = self._train.x
        self._eval_split = limit_samples(eval_split, "limit_test", run.limit_test).to(self._host)
        if self._true_holdout is not None and run.limit_test is not None:
            self._true_holdout = self._true_holdout.at(eval_split.balanced_indices(run.limit_test))
        self.eval_samples = len(self._eval_split)
        checked = flipped[:: max(1, math.ceil(len(flipped) / MEMORISED_SAMPLES))].to(self._host)
        self._memorised = Examples(self._train.x[checked], self._train.y[checked])
        self._augment = _augmentation(run.augment or entry.augmentation, self.inputs, run.data)
        # torch spreads it over all classes
        self.smoothing = self.settings.label_smoothing * data.classes / (data.classes - 1)
        large = self.inputs.size > LARGE_IMAGE
        self._eval_batch_size = LARGE_IMAGE_BATCH if large else EVALUATION_BATCH[device.type]
        self.begin_epoch(0)

    def network(self) -> nn.Module:
        """Return the run's network for images of this size, quantized if the run says so."""
        return build_network(self.run, self.inputs, self.classes).train().to(self.device)

    def initialise(self, network: nn.Module, init: Path | None = None) -> Sequence[str]:
        """Load the initial weights. A quantized network gets the weights of the float network, and its input scales
        from some training images. Raise if the classes of the initial run have other names, or if only one of the two
        has names.
        """
        if init is not None:
            file, ours = init.with_name("inputs.json"), self.inputs.class_names
            with reading(file, "start from another run, or use --weights"):
                stored = json.loads(read_bytes(file, MAX_TEXT)) if file.exists() else None
                theirs = () if stored is None else Inputs.from_json(stored).class_names
            if theirs != ours:
                names = [", ".join(classes) or "without names" for classes in (theirs, ours)]
                raise BsamValueError(
                    f"the run in {init.parent} learned other classes ({names[0]}) than this data has ({names[1]}): "
                    "start from another run, or use --weights"
                )
        warnings = duplicate_warnings(self._duplicates)
        if self.settings.weight_bits is None:
            return [*warnings, *super().initialise(network, init)]
        latent = build_float_network(self.run, self.inputs, self.classes).train().to(self.device)
        messages = super().initialise(latent, init)
        network.load_state_dict(quantize_network(latent, self.settings).state_dict())
        calibrate(network, self.examples(CALIBRATION_SAMPLES)[0][0])
        return [*warnings, *messages]

    def begin_epoch(self, epoch: int) -> None:
        """Draw the random numbers of the augmentation."""
        self._epoch = epoch
        draws = self._augment.draws(self.samples, self.run.seed, epoch, self._train.x.shape[-1])
        self._draws = draws if isinstance(self._augment, TimmAugment) else draws.to(self.device)

    def _batch(self, x: Tensor, index: Tensor, on_host: Tensor) -> TaskBatch:
        """Return augmented images, classes and indices; if images are mixed, the shares of all classes."""
        draws = self._draws[on_host if isinstance(self._augment, TimmAugment) else index]
        augmented = self.inputs.resize(self._augment(x, draws))
        labels = self._labels[index]
        if isinstance(self._augment, TimmAugment) and self._augment.mixes:
            key = self.run.seed, self._epoch, int(on_host[0])
            augmented, labels = self._augment.mix(augmented, labels, self.classes, *key)
        return augmented, labels, index

    def losses(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the cross-entropy of each sample, with label smoothing."""
        return F.cross_entropy(outputs.float(), y, reduction="none", label_smoothing=self.smoothing)

    @torch.no_grad()
    def evaluate(self, network: nn.Module) -> dict[str, float]:
        """Return cross-entropy without label smoothing, and accuracy.

        With label noise, ``memorised`` is the share of the wrong training labels that the network predicts; it is
        measured without augmentation on at most :data:`MEMORISED_SAMPLES` evenly spaced samples. Held-out training
        samples have wrong labels, too; ``holdout_clean_accuracy`` is measured with their true labels.
        """
        split = self.run.eval_split
        loss, accuracy = self._loss_and_accuracy(network, self._eval_split)
        metrics = {f"{split}_loss": loss, f"{split}_accuracy": accuracy}
        if self._true_holdout is not None:
            metrics["holdout_clean_accuracy"] = self._loss_and_accuracy(network, self._true_holdout)[1]
        if len(self._memorised):
            metrics["memorised"] = self._loss_and_accuracy(network, self._memorised)[1]
        return metrics

    def _loss_and_accuracy(self, network: nn.Module, examples: Examples) -> tuple[float, float]:
        results = []
        for x, y in self._inputs_of(examples, self.shares):
            logits = network(x).float()
            loss, correct = F.cross_entropy(logits, y, reduction="sum"), (logits.argmax(1) == y).sum()
            results.append(torch.stack([loss.double(), correct.double()]))
        total, right = 0.0, 0.0
        for loss_sum, count in torch.stack(self.shares.in_order(results)).tolist():  # the order determines the rounding
            total += loss_sum
            right += count
        return total / len(examples), right / len(examples)

    def examples(self, limit: int | None = None) -> list[tuple[Tensor, Tensor]]:
        """Return training images with the labels used in training, wrong ones included; balanced if limited."""
        return list(self._inputs_of(self._train if limit is None else self._train.some(min(limit, self.samples))))

    def eval_examples(self, limit: int | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """Return the images and labels that the network is evaluated on, in batches; balanced if limited."""
        return ((self.inputs(x), y) for x, y in self.eval_images(limit))

    def eval_images(self, limit: int | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """Return the stored images of :meth:`eval_examples` instead of the network's inputs."""
        split = self._eval_split
        return self._stored(split if limit is None else split.some(min(limit, len(split))))

    def pixel_range(self) -> tuple[float, float]:
        """Return the smallest and the largest pixel: of bytes 0 and 255, of other training images those that occur."""
        if self.inputs.in_bytes:
            return 0.0, 255.0
        x = self._original_splits[0].x
        return (float(x.min()), float(x.max())) if self.pixels is None else (self.pixels.low, self.pixels.high)

    def _inputs_of(self, examples: Examples, shares: Shares = WHOLE) -> Iterator[tuple[Tensor, Tensor]]:
        """Return inputs of the network and labels, in batches, on the device; perhaps only a share of the batches."""
        return ((self.inputs(x), y) for x, y in self._stored(examples, shares))

    def _stored(self, examples: Examples, shares: Shares = WHOLE) -> Iterator[tuple[Tensor, Tensor]]:
        """Return stored images and labels, in batches, on the device; perhaps only a share of the batches.

        Of images for random crops, it is the centre.
        """
        size = self._eval_batch_size
        images: Iterable[Tensor] = shares.of(examples.x.split(size))
        if self._host != self.device:
            images = self._read(examples.x, shares.of(torch.arange(len(examples)).split(size)))
        images = map(self.inputs.centre, images)
        return zip(images, (y.to(self.device) for y in shares.of(examples.y.split(size))), strict=True)

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the mean cross-entropy, without label smoothing."""
        return F.cross_entropy(outputs, y)

    def predictions(self, network: nn.Module) -> dict[str, NDArray[Any]]:
        """Return :func:`~bsam.lab.tasks.classifiers.class_predictions` of the evaluation set, with ``pixels``
        (n, side, side, channels) as bytes instead of inputs, and ``class_names``, which may be numbers.
        """
        predicted = class_predictions(network, self.eval_examples(), self.classes)
        mean, std = (
            torch.tensor(values, device=self.device).view(-1, 1, 1) for values in (self.inputs.mean, self.inputs.std)
        )
        pixels = predicted.pop("inputs") * std + mean
        if self._eval_split.x.is_floating_point() and len(pixels):  # bytes were scaled to [0, 1], floats were not
            pixels = (pixels - pixels.min()) / (pixels.max() - pixels.min()).clamp(min=1e-12)
        predicted["pixels"] = (255 * pixels).round().clamp(0, 255).byte().permute(0, 2, 3, 1)
        names = np.array(self.inputs.class_names or [str(number) for number in range(self.classes)])
        return {"class_names": names, **{name: tensor.cpu().numpy() for name, tensor in predicted.items()}}

    def fingerprint(self) -> str:
        """Return a digest of pixels and labels, in their order."""
        if self._digest is not None:
            return self._digest
        digest = hashlib.sha256()
        for tensor in (t for part in self._original_splits for t in (part.x, part.y)):
            digest.update(repr((tuple(tensor.shape), tensor.dtype)).encode())
            digest.update(tensor.contiguous().numpy().data)
        return digest.hexdigest()

    def notes(self) -> Mapping[str, Any]:
        """Return ``flipped``, the indices of the wrong labels in the whole training set; ``labels``, their share
        (both only with label noise); ``data``, how image files were split and which were left out; ``inputs``, how
        images become inputs (only if the classes have names); and ``weights``, where the initial weights came from. In
        ``data``, ``duplicates`` are numbers of files with the same content in two sets or in two classes.
        """
        notes: dict[str, Any] = {}
        if self.settings.label_noise:
            notes["flipped"] = self._flipped.tolist()
            notes["labels"] = {"wrong": len(self._flipped) / len(self._original_splits[0])}
        if self._digest is not None:
            sizes = {"train": self.samples, self.run.eval_split: len(self._eval_split)}
            duplicates = {"duplicates": dict(self._duplicates)} if self._duplicates else {}
            notes["data"] = {"split": self._split, "images": sizes, "left_out": self.left_out, **duplicates}
        if self.inputs.class_names:
            notes["inputs"] = asdict(self.inputs)
        return {**notes, **super().notes()}


def _augmentation(name: str, inputs: Inputs, data: str) -> Augment | ResizedCrop:
    if is_timm(name):
        timm = replace(TimmAugment.named(name), mean=inputs.mean, std=inputs.std)
        if timm.aa and not inputs.in_bytes:
            raise BsamValueError(
                f"RandAugment needs pixels in bytes, but those of {data} are floating-point numbers: leave aa out of "
                f"augment {name}"
            )
        return timm
    augment = augmentation(name, inputs.mean, inputs.std)
    if isinstance(augment, ResizedCrop):
        return replace(augment, size=inputs.size, cubic=inputs.mode == "bicubic")
    return augment
