"""Classification of images."""

from __future__ import annotations

import copy
import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from ...common.checks import check_count
from ...common.errors import BsamTypeError, BsamValueError
from .. import quantization
from ..common.files import MAX_TEXT, read_bytes, reading
from ..config import ClassificationSettings, Run
from ..data import dataset_entry
from ..data.arrays import Dataset, Examples, duplicate_warnings, flip_labels, wrong_share
from ..data.augment import ResizedCrop, TimmAugment, augmentation
from ..data.images import decode
from ..models import build, model_entry
from ..quantization import (
    OnnxNetwork,
    calibrate,
    convert,
    export_onnx,
    freeze_scales,
    load_quantized,
    quantize,
    save_quantized,
)
from .classifier_files import Preprocessing, compare_classes, example, metadata
from .exported import ONNX, Comparison, Network, Progress
from .found import FoundClasses, NoteReader, Picture, Prediction, Shown, read_batches
from .images import ImageTask, Inputs, freeze_backbone, inputs_of, limit_samples, load_data, stream
from .splits import WHOLE, Shares, holdout_mask
from .task import EVALUATION_BATCH, Failure, Notes, Score, TaskBatch

SMALL_IMAGE_BATCHES = {"cpu": 320, "cuda": 2500}  # larger ones exceed the cache of a CPU core and are slower
SMALL_IMAGE = 64  # the side, in pixels, up to which images are evaluated in such batches
CALIBRATION_SAMPLES = 256  # for the initial input scales of a quantized network; fewer if the first batch is smaller
TOP = 3  # classes in a prediction
MISTAKES_ON_PAGE = 8
# relative to the loss of guessing, ln(classes): below the first the run learned something, above the second it diverged
GUESSING = 0.99
DIVERGED_LOSS = 1.05
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

    score = Score("accuracy", "accuracy in %", 100, share=True)
    identity: ClassVar[str] = "bsam.tasks.classification.Classification"  # of the class in the first version
    loss_title: ClassVar[str] = "cross-entropy"
    logits: ClassVar[bool] = True
    settings_type = ClassificationSettings
    settings: ClassificationSettings
    inputs: Inputs
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
        augment = augmentation(run.augment or entry.augmentation)
        if isinstance(augment, TimmAugment) and augment.mixes and run.batch % 2:
            raise BsamValueError(f"mixup and cutmix need an even batch, got {run.batch}")
        data, left_out = load_data(run, data_dir, cache_dir) if data is None else (data, [])
        super().__init__(run, device, data_dir, left_out, in_files=data.digest is not None)
        self.inputs = inputs_of(run, data)
        self.pixels = data.pixels
        self.classes = data.classes
        self.image_size = self.inputs.size
        # torch spreads it over all classes
        self.smoothing = self.settings.label_smoothing * data.classes / (data.classes - 1)
        self._split = data.split
        self._file_digest = data.digest
        self._duplicates = data.duplicates
        self._set_samples(data)
        if isinstance(augment, TimmAugment) and augment.aa and not self.inputs.in_bytes:
            raise BsamValueError(
                f"RandAugment needs pixels in bytes, but those of {run.data} are floating-point numbers: leave aa out "
                f"of augment {run.augment}"
            )
        if isinstance(augment, ResizedCrop):
            augment = replace(augment, size=self.inputs.size, cubic=self.inputs.interpolation != "bilinear")
        self._augment = replace(augment, mean=self.inputs.mean, std=self.inputs.std)
        is_small = self.inputs.size <= SMALL_IMAGE
        self._eval_batch_size = SMALL_IMAGE_BATCHES[device.type] if is_small else EVALUATION_BATCH
        self.begin_epoch(0)

    def _set_samples(self, data: Dataset) -> None:
        """Limit the training samples, flip labels, and hold samples out, in this order; then limit the evaluation."""
        run = self.run
        noise = self.settings.label_noise
        original = limit_samples(data.train, "limit_train", run.limit_train)
        noisy = original.y
        wrong = torch.zeros(0, dtype=torch.int64)
        if noise:
            noisy, wrong = flip_labels(original.y, noise, data.classes, run.seed, self.settings.noise_labels)
        # indices in the whole training set
        self._flipped = wrong if run.limit_train is None else data.train.balanced_indices(run.limit_train)[wrong]
        train = Examples(original.x, noisy)
        clean = None
        if run.eval_split == "holdout":
            held_out = holdout_mask(len(original), run.seed)
            wrong = (noisy != original.y)[~held_out].nonzero().flatten()
            clean = original.at(held_out) if noise else None  # some labels in the evaluation are wrong
            train, evaluation = train.at(~held_out), train.at(held_out)
        elif (split := getattr(data, run.eval_split)) is not None:
            evaluation = split
        else:
            raise BsamValueError(
                f"{run.data} has no {run.eval_split} set: set eval_split to test or holdout, or add one (for image "
                "files, a folder val next to train and test)"
            )
        scored = limit_samples(evaluation, "limit_test", run.limit_test)
        if clean is not None and run.limit_test is not None:
            clean = clean.at(evaluation.balanced_indices(run.limit_test))
        self._original_splits = original, evaluation
        self.samples = len(train)
        self.eval_samples = len(scored)
        self._train = train.to(self._host)
        self._labels = train.y.to(self.device)
        self._x = self._train.x
        self._eval_split = scored.to(self._host)
        self._true_holdout = None if clean is None else clean.to(self._host)
        checked = wrong[:: max(1, math.ceil(len(wrong) / MEMORISED_SAMPLES))].to(self._host)
        self._memorised = Examples(self._train.x[checked], self._train.y[checked])

    def network(self) -> nn.Module:
        """Return the run's network for images of this size, quantized if the run says so."""
        network = build_float_network(self.run, self.inputs, self.classes)
        if self.settings.weight_bits is not None:
            network = quantize_network(network, self.settings)
        return network.train().to(self.device)

    def initialise(self, network: nn.Module, init: Path | None = None) -> Sequence[str]:
        """Load the initial weights. A quantized network gets the weights of the float network, and its input scales
        from some training images. Raise if the classes of the initial run have other names, or if only one of the two
        has names.
        """
        if init is not None:
            file = init.with_name("inputs.json")
            ours = self.inputs.class_names
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

    @classmethod
    def parameter_groups(cls, run: Run, network: nn.Module) -> list[dict[str, Any]] | None:
        """Return the groups of a quantized network: its weights, and its learned scales, which have no weight decay."""
        settings = run.task_settings(ClassificationSettings)
        if settings.weight_bits is None:
            return None
        return quantization.parameter_groups(network, perturb_scales=settings.perturb_scales, weight_decay=0.0)

    def begin_epoch(self, epoch: int) -> None:
        """Draw the random numbers of the augmentation."""
        self._epoch = epoch
        draws = self._augment.draws(self.samples, self.run.seed, epoch, self._train.x.shape[-1])
        self._draws = draws if isinstance(self._augment, TimmAugment) else draws.to(self.device)

    def _batch(self, x: Tensor, index: Tensor, on_host: Tensor) -> TaskBatch:
        """Return augmented images, classes and indices; if images are mixed, the shares of all classes."""
        draws = self._draws[on_host if isinstance(self._augment, TimmAugment) else index]
        augmented = self.inputs.resize(self._augment(x, draws), self.inputs.size)
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
        for x, y in self._stored(examples, self.shares):
            logits = network(self.inputs(x)).float()
            loss = F.cross_entropy(logits, y, reduction="sum")
            correct = (logits.argmax(1) == y).sum()
            results.append(torch.stack([loss.double(), correct.double()]))
        total = 0.0
        right = 0.0
        for loss_sum, count in torch.stack(self.shares.in_order(results)).tolist():  # the order determines the rounding
            total += loss_sum
            right += count
        return total / len(examples), right / len(examples)

    def examples(self, limit: int | None = None) -> list[tuple[Tensor, Tensor]]:
        """Return training images with the labels used in training, wrong ones included; balanced if limited."""
        examples = self._train if limit is None else self._train.some(min(limit, self.samples))
        return [(self.inputs(x), y) for x, y in self._stored(examples)]

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

    def _stored(self, examples: Examples, shares: Shares = WHOLE) -> Iterator[tuple[Tensor, Tensor]]:
        """Return stored images and labels, in batches, on the device; perhaps only a share of the batches.

        Files are stored larger for random crops; of these, it is the centre.
        """
        size = self._eval_batch_size
        images: Iterable[Tensor] = shares.of(examples.x.split(size))
        if self._host != self.device:
            images = stream(examples.x, shares.of(torch.arange(len(examples)).split(size)), self.device)
        if self._in_files:
            images = map(self.inputs.centre, images)
        return zip(images, (y.to(self.device) for y in shares.of(examples.y.split(size))), strict=True)

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the mean cross-entropy, without label smoothing."""
        return F.cross_entropy(outputs, y)

    def measured_network(self, network: nn.Module) -> nn.Module:
        """Return the network; if it is quantized, a copy with fixed scales."""
        if self.settings.weight_bits is None:
            return network
        network = copy.deepcopy(network)
        freeze_scales(network)
        return network

    def chance(self) -> float:
        """Return the accuracy of guessing."""
        return 1 / self.classes

    def predictions(self, network: nn.Module) -> dict[str, NDArray[Any]]:
        """Return :func:`class_predictions` of the evaluation set, with ``pixels``
        (n, side, side, channels) as bytes instead of inputs, and ``class_names``, which may be numbers.
        """
        batches = ((self.inputs(x), y) for x, y in self._stored(self._eval_split))
        predicted = class_predictions(network, batches, self.classes)
        mean, std = (
            torch.tensor(values, device=self.device).view(-1, 1, 1) for values in (self.inputs.mean, self.inputs.std)
        )
        pixels = predicted.pop("inputs") * std + mean
        if self._eval_split.x.is_floating_point() and len(pixels):  # bytes were scaled to [0, 1], floats were not
            pixels = (pixels - pixels.min()) / (pixels.max() - pixels.min()).clamp(min=1e-12)
        predicted["pixels"] = (255 * pixels).round().clamp(0, 255).byte().permute(0, 2, 3, 1)
        names = np.array(self.inputs.class_names or [str(number) for number in range(self.classes)])
        return {"class_names": names, **{name: tensor.cpu().numpy() for name, tensor in predicted.items()}}

    # ---- what a trained network is used for: predictions, the page, export

    predict_heading: ClassVar[str] = "classes"
    predict_flags: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "top": {"type": int, "help": f"number of classes to print (default: {TOP})", "metavar": "N"}
    }

    @classmethod
    def trained(cls, run: Run, device: torch.device, note: NoteReader) -> Classification:
        """Return the task of a trained run without its data."""
        inputs = note("inputs", Inputs.from_json)
        if inputs is None or not inputs.takes_files:
            raise BsamValueError(
                f"the network of this run (task {run.task.name}, data {run.data}) does not take image files: give a "
                "classification run on image files, or on your own uint8 images with 1 or 3 channels"
            )
        task = cls.__new__(cls)
        task.run = run
        task.settings = run.task_settings(ClassificationSettings)
        task.device = device
        task.inputs = inputs
        task.classes = len(inputs.class_names)
        return task

    def predict(
        self,
        network: nn.Module,
        files: Mapping[Path, bool],
        on_message: Callable[[str], None],
        pictures: bool = False,
        top: int = TOP,
    ) -> Sequence[Prediction]:
        """Return the ``top`` most probable classes of each image."""
        inputs = self.inputs
        names = inputs.class_names
        top = min(check_count("top", top), len(names))
        found = []
        for batch in read_batches(files, lambda path: decode(path, inputs.decoding), EVALUATION_BATCH, on_message):
            x = torch.from_numpy(np.stack([inputs.stored(pixels) for _, pixels in batch])).permute(0, 3, 1, 2)
            likely = network(inputs(x.to(self.device))).float().softmax(1).cpu().topk(top)
            for (path, _), values, indices in zip(batch, likely.values.tolist(), likely.indices.tolist(), strict=True):
                classes = tuple(names[index] for index in indices)
                found.append(FoundClasses(path, inputs.decoding, classes, tuple(values)))
        return found

    @staticmethod
    def pictures(arrays: Mapping[str, NDArray[Any]], note: NoteReader) -> Shown | None:
        """Return the most confident mistakes."""
        caption = "Predicted class with its probability, and true class; networks of {seeds}."
        return Shown("Most confident mistakes", caption, mistakes(arrays)[:MISTAKES_ON_PAGE])

    @classmethod
    def is_quantized(cls, run: Run) -> bool:
        """Return whether the network of a run has integer weights, which a safetensors file stores."""
        return run.task_settings(ClassificationSettings).weight_bits is not None

    def float_network(self) -> nn.Module:
        """Return a new network, before quantization."""
        return build_float_network(self.run, self.inputs, self.classes)

    def export(self, network: nn.Module, path: Path, suffix: str) -> dict[str, str]:
        """Write a trained network to an ONNX file, or a quantized one to a safetensors file."""
        about = metadata(self, suffix == ONNX)
        if suffix == ONNX:
            export_onnx(nn.Sequential(Preprocessing(self), network), path, example(self), metadata=about)
        else:
            save_quantized(convert(network), path, metadata=about)
        return about

    def compare(self, network: Network, path: Path, suffix: str, progress: Progress | None = None) -> Comparison:
        """Compare a trained network with that of an exported file, on the evaluation images."""
        if suffix == ONNX:
            return compare_classes(self, network, OnnxNetwork(path), True, progress)
        written = load_quantized(path, self.float_network()).to(self.device)
        return compare_classes(self, network, written, False, progress)

    def fingerprint(self) -> str:
        """Return a digest of pixels and labels, in their order."""
        if self._file_digest is not None:
            return self._file_digest
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
        if self._file_digest is not None:
            sizes = {"train": self.samples, self.run.eval_split: len(self._eval_split)}
            duplicates = {"duplicates": dict(self._duplicates)} if self._duplicates else {}
            notes["data"] = {"split": self._split, "images": sizes, "left_out": self.left_out, **duplicates}
        if self.inputs.class_names:
            notes["inputs"] = asdict(self.inputs)
        return {**notes, **super().notes()}

    # ---- what others ask about a run

    worded = ("label_noise", "noise_labels", "weight_bits")

    @classmethod
    def data_words(cls, run: Run, wrong: float | None = None) -> str:
        """Describe the label noise; empty if there is none.

        Args:
            run: the settings.
            wrong: the share of the training labels that are wrong, if it is known; None computes it.

        Example:
            >>> Classification.data_words(Run.of("sam", data="cifar10", label_noise=0.4))
            '40 % of labels drawn from all classes: 36.0 % wrong'
        """
        settings = run.task_settings(ClassificationSettings)
        if not settings.label_noise:
            return ""
        wrong = cls.wrong_labels(run) if wrong is None else wrong
        text = f"{100 * settings.label_noise:g} % of labels drawn from {settings.noise_labels} classes"
        return text if wrong is None else f"{text}: {100 * wrong:.1f} % wrong"

    @classmethod
    def network_words(cls, run: Run) -> str:
        """Return the number of bits of a quantized network in words; empty without quantization."""
        bits = run.task_settings(ClassificationSettings).weight_bits
        return "" if bits is None else f"{bits} bits"

    @classmethod
    def network_details(cls, run: Run) -> str:
        """Say what has how many bits; empty without quantization.

        Example:
            >>> Classification.network_details(Run.of("sam", weight_bits=4, activation_bits=8))
            'weights 4 bits, activations 8 bits'
        """
        settings = run.task_settings(ClassificationSettings)
        bits = settings.weight_bits
        return "" if bits is None else f"weights {bits} bits, activations {settings.activation_bits or bits} bits"

    @classmethod
    def table_notes(cls, runs: Iterable[tuple[Run, float | None]]) -> list[str]:
        """Return a line with the label noise of the runs, one share of wrong labels for each data set and noise."""
        known: dict[tuple[str, float, str], tuple[Run, float | None]] = {}
        for run, wrong in runs:
            settings = run.task_settings(ClassificationSettings)
            key = (run.data, settings.label_noise, settings.noise_labels)
            if key not in known or known[key][1] is None:
                known[key] = run, wrong
        texts = dict.fromkeys(cls.data_words(run, wrong) for run, wrong in known.values())
        noise = "; ".join(text for text in texts if text)
        return [f"Label noise: {noise}."] if noise else []

    @classmethod
    def wrong_labels(cls, run: Run, note: Notes | None = None) -> float | None:
        """Return the share of the training labels that are wrong: as counted in a run directory, or as it follows from
        the number of classes, if it is known before the data is read. None without label noise.
        """
        settings = run.task_settings(ClassificationSettings)
        if not settings.label_noise:
            return None
        counted = {} if note is None else note("labels")
        if "wrong" in counted:
            return float(counted["wrong"])
        classes = _known_classes(run)
        return None if classes is None else round(wrong_share(settings.label_noise, settings.noise_labels, classes), 6)

    @classmethod
    def clean_score(cls, run: Run) -> Score | None:
        """Return the accuracy on the true labels of held-out samples with label noise."""
        has_noise = run.task_settings(ClassificationSettings).label_noise
        return Score("clean_accuracy", "accuracy in %", 100) if has_noise and run.eval_split == "holdout" else None

    @classmethod
    def guess(cls, run: Run, note: Notes) -> float | None:
        """Return the accuracy of guessing."""
        classes = _known_classes(run) or len(note("inputs").get("class_names", ()))
        return 1 / classes if classes else None

    @classmethod
    def failure(cls, run: Run, epochs: Sequence[Mapping[str, Any]], note: Notes) -> Failure | None:
        """Return that a classifier is at chance: neither its training nor its evaluation loss is below the loss of
        guessing, and its accuracy is at most twice the accuracy of guessing.
        """
        last = epochs[-1]
        split = run.eval_split
        losses = [last[name] for name in ("train_loss", f"{split}_loss") if last.get(name) is not None]
        accuracy = last.get(f"{split}_clean_accuracy", last.get(f"{split}_accuracy"))  # on the true labels
        if accuracy is None:
            return super().failure(run, epochs, note)
        chance = cls.guess(run, note)
        if chance is None or not losses:
            return None
        lowest = min(losses)
        guessing = -math.log(chance)
        if lowest < GUESSING * guessing or accuracy > 2 * chance:
            return None
        text = (
            f"The network is no better than chance: accuracy {accuracy:.4f}, {round(1 / chance)} classes, loss "
            f"{lowest:.4g} ({guessing:.4g} by guessing)."
        )
        return Failure(text, diverged=lowest > DIVERGED_LOSS * guessing)

    @classmethod
    def not_initial(cls, run: Run) -> str:
        """Return why no other run can start from a quantized network."""
        is_quantized = run.task_settings(ClassificationSettings).weight_bits is not None
        return "trained a quantized network: start from a run of a float network" if is_quantized else ""


def _known_classes(run: Run) -> int | None:
    """Return the number of classes of a run's data, if it is known before the data is read."""
    try:
        return dataset_entry(run.data).classes
    except BsamValueError:  # a data set that this version does not have
        return None


MISTAKES = 16  # mistakes that are kept


def build_float_network(run: Run, inputs: Inputs, classes: int) -> nn.Module:
    """Return a run's network before quantization, with random weights, in eval mode; raise if it cannot take the
    inputs.

    Some networks take images of a single size, and are built for another one if the images have it.
    """
    size = {"image_size": inputs.size} if model_entry(run.model).needs_size else {}
    network = build(run.model, classes, inputs.channels, run.seed, **size).eval()
    error = why_refused(network, inputs)
    if error is not None and model_entry(run.model).resizable:
        network = build(run.model, classes, inputs.channels, run.seed, image_size=inputs.size).eval()
        error = why_refused(network, inputs) or _why_cut(network, inputs.size)
    if error is not None:
        shape = "x".join(map(str, (inputs.channels, inputs.size, inputs.size)))
        fits = "set another --image-size, for transformers a multiple of the side of their patches, or "
        other = fits if model_entry(run.model).resizable else ""
        raise BsamValueError(
            f"{run.model} does not take images of {shape} ({run.data}): {other}choose another network from `bsam list "
            "models`"
        ) from error
    with torch.no_grad():
        outputs = network(torch.zeros(2, inputs.channels, inputs.size, inputs.size))
    if not isinstance(outputs, Tensor):
        raise BsamTypeError(f"{run.model} must return a tensor of logits, got {type(outputs).__name__}")
    if outputs.shape != (2, classes):
        raise BsamValueError(
            f"{run.model} returns outputs of shape {tuple(outputs.shape)} for 2 samples and {classes} classes: use its "
            "argument classes for the last layer"
        )
    if run.freeze_backbone:
        freeze_backbone(network, classes)
    return network


def why_refused(network: nn.Module, inputs: Inputs) -> Exception | None:
    """Return the error if a network does not take images of this size."""
    try:
        with torch.no_grad():
            network(torch.zeros(1, inputs.channels, inputs.size, inputs.size))
    except (RuntimeError, AssertionError) as error:  # networks of timm assert the size of an image
        return error
    return None


def _why_cut(network: nn.Module, size: int) -> Exception | None:
    """Return an error if the patches of a vision transformer do not cover the image."""
    patch = getattr(getattr(network, "patch_embed", None), "patch_size", (1,))[0]
    return ValueError(f"{size} is not a multiple of the patches' side, {patch}") if size % patch else None


def quantize_network(network: nn.Module, settings: ClassificationSettings) -> nn.Module:
    """Return a quantized copy of a network, with the settings of classification.

    Example:
        >>> settings = ClassificationSettings(weight_bits=4)
        >>> [
        ...     type(layer).__name__
        ...     for layer in quantize_network(build("digits_net"), settings)
        ... ][::3]
        ['QuantConv2d', 'QuantConv2d', 'Flatten']
    """
    assert settings.weight_bits is not None
    return quantize(
        network,
        settings.weight_bits,
        settings.activation_bits or settings.weight_bits,
        scheme=settings.quantizer,
        first_last_bits=settings.first_last_bits,
        fold_batch_norm=settings.fold_batch_norm,
    )


@torch.no_grad()
def class_predictions(network: nn.Module, batches: Iterable[tuple[Tensor, Tensor]], classes: int) -> dict[str, Tensor]:
    """Return the confusion matrix and the :data:`MISTAKES` most confident mistakes of a network.

    Args:
        network: returns logits; in eval mode.
        batches: inputs and classes.
        classes: number of classes.

    Returns:
        ``confusion`` (classes, classes), how many samples of each class (row) were classified as each class (column);
        and for the mistakes, the most confident first, ``inputs``, ``truth``, ``found`` (the predicted class) and
        ``confidence`` (its probability).
    """
    total: Tensor | int = 0
    worst: list[Tensor] = []
    for x, truth in batches:
        confidence, predicted = network(x).float().softmax(1).max(1)
        total = total + torch.bincount(truth * classes + predicted, minlength=classes**2).view(classes, classes)
        wrong = predicted != truth
        mistakes = [tensor[wrong] for tensor in (x, truth, predicted, confidence)]
        merged = [torch.cat(pair) for pair in zip(worst, mistakes, strict=True)] if worst else mistakes
        first = merged[-1].argsort(descending=True, stable=True)[:MISTAKES]
        worst = [tensor[first] for tensor in merged]
    arrays = dict(zip(("inputs", "truth", "found", "confidence"), worst, strict=True))
    return {"confusion": torch.as_tensor(total), **arrays}


def mistakes(arrays: Mapping[str, NDArray[Any]], form: str = ".0%") -> list[Picture]:
    """Return the most confident mistakes of a classifier, the most confident first.

    Args:
        arrays: from :meth:`Classification.predictions`.
        form: the format of probabilities.
    """
    if "confidence" not in arrays:
        return []
    names = arrays["class_names"].tolist()
    columns = (arrays[name] for name in ("pixels", "found", "confidence", "truth"))
    return [
        Picture(pixels, f"{names[predicted]}, {confidence:{form}}", (f"true: {names[truth]}",))
        for pixels, predicted, confidence, truth in zip(*columns, strict=True)
    ]
