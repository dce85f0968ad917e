"""Human pose estimation with SimCC: where the joints of a person are in an image."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ...common.errors import BsamValueError
from ..common.progress import ProgressLine
from ..config import PoseSettings, Run
from ..data import DATASETS, DrawnPersonData, KnownData, PersonData, dataset_entry
from ..data.images import check_box
from ..data.persons import MARGIN, Persons, PoseData, Skeleton, cut_out, load_persons
from ..data.pose_augment import POSE_AUGMENTATIONS, PoseAugment, apply, inverse
from ..models import MODELS, build, input_config, model_entry
from ..quantization import OnnxNetwork, export_onnx
from . import pose_outputs
from .exported import Comparison, Network, Progress, Standardise, compare_scores, precision_text
from .found import FoundJoints, NoteReader, Prediction, Shown, read_batches, skeletons
from .images import IMAGENET, ImageTask, freeze_backbone, limit_samples, stream
from .pose_outputs import decode, flip_merge, simcc_losses
from .splits import WHOLE, Shares, holdout_size
from .task import EVALUATION_BATCH, Failure, Notes, Score, TaskBatch

GROUPS = tuple(pose_outputs.LSP_SCORE.groups)
SHOWN = 8  # persons of the evaluation set in the report


class Pose(ImageTask):
    """Pose estimation with SimCC's loss, measured by PCK for each group of joints and on average.

    Args:
        run, device, data_dir, cache_dir: as in :class:`~bsam.lab.tasks.classification.Classification`.
        data: persons to use instead of those that the run names.
    """

    score = Score("pck", "PCK in %", 100, share=True)
    loss_title: ClassVar[str] = "SimCC loss"
    settings_type = PoseSettings
    settings: PoseSettings
    inputs: PoseInputs  # type: ignore[assignment]
    eval_samples: int
    groups: ClassVar[tuple[Score, ...]] = tuple(Score(f"pck_{name}", name.capitalize(), 100) for name in GROUPS)

    def __init__(
        self,
        run: Run,
        device: torch.device,
        data_dir: Path | None = None,
        data: PoseData | None = None,
        cache_dir: Path | None = None,
    ) -> None:
        entry = dataset_entry(run.data).resolve(data_dir)
        if entry.task != "pose":
            names = ", ".join(known.name for known in DATASETS.values() if known.task == "pose")
            raise BsamValueError(f"{run.data} has no joints: use --task {entry.task}, or --data with one of {names}")
        _check_settings(run)
        self.settings = run.task_settings(PoseSettings)
        config = input_config(run.model) or IMAGENET
        side = run.image_size or (model_entry(run.model).images if data is None else data.side)
        with torch.device("meta"):
            build(run.model, classes=1, side=side, k=self.settings.simcc_k)  # raises before images are decoded
        data, left_out = _load(run, entry, side, data_dir, cache_dir) if data is None else (data, [])
        if data.side != side:
            raise BsamValueError(f"{data.name} is stored for inputs of {data.side} pixels: leave image_size={side} out")
        super().__init__(run, device, data_dir, left_out, in_files=bool(data.train.images))
        self.inputs = PoseInputs(data.side, self.settings.simcc_k, config.mean, config.std, data.skeleton)
        self.classes = len(data.skeleton.joints)
        self.image_size = data.side
        self._split = data.split
        self._digest = data.digest
        self._train = limit_samples(data.train, "limit_train", run.limit_train)
        test = data.test
        if run.eval_split == "holdout":
            end = len(self._train) - holdout_size(len(self._train))
            test = self._train.part(slice(end, None))
            self._train = self._train.part(slice(0, end))
        self._test = limit_samples(test, "limit_test", run.limit_test)
        self._stored_train = self._train.to(self._host, device)
        self._stored_test = self._test.to(self._host, device)
        self._x = self._stored_train.x
        self.samples = len(self._train)
        self.eval_samples = len(self._test)
        y = self._test.y.double()
        self._truth = torch.cat([apply(self._test.to_image, y[:, :, :2]), y[:, :, 2:]], dim=2)  # in the images
        self.rule, self._sizes = _score_and_sizes(data, self._test.head_sizes, self._truth)
        self.baseline()  # raises before training if there is nothing to score
        self._augment = self.inputs.augment(**POSE_AUGMENTATIONS[run.augment or entry.augmentation])
        self.begin_epoch(0)

    def network(self) -> nn.Module:
        """Return the run's network."""
        return self.inputs.network(self.run).train().to(self.device)

    def begin_epoch(self, epoch: int) -> None:
        """Draw scales, rotations and flips."""
        self._draws = self._augment.draws(self.samples, self.run.seed, epoch).to(self.device)

    def _batch(self, x: Tensor, index: Tensor, on_host: Tensor) -> TaskBatch:
        """Return augmented images, joints and indices."""
        persons = self._stored_train
        images, y, _ = self._augment(x, persons.y[index], persons.to_image[index], self._draws[index])
        return images, y, index

    def losses(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the loss of each sample: the mean divergence over its labelled joints."""
        return simcc_losses(outputs, y, self.settings.simcc_k, self.settings.simcc_sigma)

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the mean of :meth:`losses`."""
        return simcc_losses(outputs, y, self.settings.simcc_k, self.settings.simcc_sigma).mean()

    @torch.no_grad()
    def evaluate(self, network: nn.Module) -> dict[str, float]:
        """Return the loss, the mean PCK, and the PCK of each group of joints."""
        split = self.run.eval_split
        losses = []
        joints = []
        for x, y, to_image in self._plain_batches(self._stored_test, shares=self.shares):
            logits = network(x)
            losses.append(simcc_losses(logits, y, self.settings.simcc_k, self.settings.simcc_sigma).sum())
            joints.append(apply(to_image, self.inputs.joints(network, x, self.settings.flip_test, logits).double()))
        total = 0.0
        for loss in torch.stack(self.shares.in_order(losses)).tolist():  # the order determines the rounding
            total += loss
        scores = self._scores(torch.cat(self.shares.in_order(joints)).cpu())
        return {f"{split}_loss": total / len(self._test), **{f"{split}_{n}": v for n, v in scores.items()}}

    def _scores(self, joints: Tensor) -> dict[str, float]:
        """Return the PCK scores of joints (n, J, 2), which are in pixels of the images of the test set."""
        truth = self._truth[:, :, :2]
        labelled = self._truth[:, :, 2]
        counts = pose_outputs.pck(joints, truth, labelled, self._sizes, self.rule.threshold)
        scores = pose_outputs.group_scores(*counts, self.rule)
        return {"pck": scores.pop(pose_outputs.MEAN), **{f"pck_{name}": value for name, value in scores.items()}}

    def baseline(self) -> dict[str, float]:
        """Return the PCK scores of the mean pose of the training set, placed into each box of the test set.

        The names are those of :meth:`evaluate` without the split.
        """
        pose = pose_outputs.mean_pose(self._train.y)
        return self._scores(apply(self._test.to_image, pose.double().expand(len(self._test), -1, -1)))

    def chance(self) -> float:
        """Return the PCK of the mean pose."""
        return self.baseline()[self.score.name]

    @classmethod
    def _model_with(cls, in_file: str | None, default: str | None) -> str | None:
        """Return the pose network that takes the weights of this backbone, or the default."""
        networks = {entry.backbone: entry.name for entry in MODELS.values() if entry.backbone}
        return in_file if in_file in networks.values() else networks.get(in_file or "", default)

    @classmethod
    def untrained(cls, note: Notes) -> tuple[str, Mapping[str, float]]:
        """Return the title and the scores of the mean pose."""
        baseline = note("baseline")
        return baseline.get("title", ""), baseline.get("scores", {})

    @classmethod
    def guess(cls, run: Run, note: Notes) -> float | None:
        """Return the score of the mean pose."""
        return cls.untrained(note)[1].get(cls.score.name)

    @classmethod
    def chance_failure(cls, run: Run, last: Mapping[str, Any], note: Notes) -> Failure | None:
        """Return that a run is no better than the mean pose."""
        chance = cls.guess(run, note)
        reached = last[cls.score.metric(run.eval_split)]
        if chance is None or reached > chance:
            return None
        title, _ = cls.untrained(note)
        name = cls.score.name
        return Failure(f"The network is no better than the baseline ({title}): {name} {reached:.4g} and {chance:.4g}.")

    def examples(self, limit: int | None = None) -> list[tuple[Tensor, Tensor]]:
        """Return training images with their joints, not augmented; evenly spaced ones if limited."""
        return [(x, y) for x, y, _ in self._plain_batches(self._stored_train, limit)]

    # ---- what a trained network is used for: predictions, the page, export

    predict_heading: ClassVar[str] = "joints"
    predict_flags: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "box": {
            "nargs": 4,
            "type": float,
            "help": "bounding box of the person in pixels, for a single image; the centre of the first pixel is (0, 0) "
            "(default: the whole image)",
            "metavar": ("LEFT", "TOP", "RIGHT", "BOTTOM"),
        },
        "flip_test": {
            "action": argparse.BooleanOptionalAction,
            "help": "average the probabilities of an image and its mirror image (default: as the run was evaluated)",
        },
    }

    @classmethod
    def trained(cls, run: Run, device: torch.device, note: NoteReader) -> Pose:
        """Return the task of a trained run without its data."""
        inputs = note("pose", PoseInputs.from_json)
        if inputs is None:
            raise BsamValueError("the run has no pose.json, which describes the network's inputs: give another run")
        task = cls.__new__(cls)
        task.run = run
        task.settings = run.task_settings(PoseSettings)
        task.device = device
        task.inputs = inputs
        return task

    def predict(
        self,
        network: nn.Module,
        files: Mapping[Path, bool],
        on_message: Callable[[str], None],
        pictures: bool = False,
        box: Sequence[float] | None = None,
        flip_test: bool | None = None,
    ) -> Sequence[Prediction]:
        """Return the joints of the person in each image.

        The person is cut out as in training: a square around the centre of the box, 1.25 times as wide as its longer
        side.

        Args:
            box: left, top, right and bottom of the person, for a single image; by default the whole image.
            flip_test: whether to average the probabilities of an image and its mirror image; by default as in the
                run's evaluation.
        """
        person = None if box is None else check_box(box)
        if person is not None and len(files) != 1:
            raise BsamValueError(f"a box is for one image, and there are {len(files)}: give the images one at a time")
        inputs = self.inputs
        skeleton = inputs.skeleton
        augment = inputs.augment()
        flips = self.settings.flip_test if flip_test is None else flip_test
        found = []
        for batch in read_batches(files, lambda path: cut_out(path, person, inputs.side), EVALUATION_BATCH, on_message):
            boxes, crops, maps = zip(*(cut for _, cut in batch), strict=True)
            x = torch.from_numpy(np.stack(crops)).permute(0, 3, 1, 2).to(self.device)
            unknown = torch.zeros(len(batch), len(skeleton.joints), 3, device=self.device)
            x, _, to_image = augment(x, unknown, inverse(torch.cat(maps)).to(self.device))
            joints = apply(to_image, inputs.joints(network, x, flips).double()).cpu().numpy()
            for (path, _), places, cut_box in zip(batch, joints, boxes, strict=True):
                found.append(FoundJoints(path, places, cut_box, skeleton, is_whole=person is None))
        return found

    @staticmethod
    def pictures(arrays: Mapping[str, NDArray[Any]], note: NoteReader) -> Shown | None:
        """Return persons with the joints that the network found, and with those that are labelled."""
        inputs = note("pose", PoseInputs.from_json)
        if inputs is None or "found" not in arrays:
            return None
        truth = np.where(arrays["truth"][..., 2:] > 0, arrays["truth"][..., :2], np.nan)  # only labelled joints
        caption = (
            "Joints that the networks of {seeds} found. The person's right side is orange, the left side light blue."
        )
        found = skeletons(inputs.skeleton, arrays["pixels"], arrays["found"])
        labels = skeletons(inputs.skeleton, arrays["pixels"], truth)
        return Shown("Skeletons", caption, found, labels)

    def export(self, network: nn.Module, path: Path, suffix: str) -> dict[str, str]:
        """Write a trained network to an ONNX file that takes the pixels of the box."""
        inputs = self.inputs
        shape = len(inputs.mean), inputs.side, inputs.side
        about = {
            "task": "pose",
            "model": self.run.model,
            "input": f"float32 (n, {', '.join(map(str, shape))}), RGB pixels from 0 to 255 of the square around the "
            "box; the file standardises them",
            "input_range": json.dumps([0.0, 255.0]),
            "input_size": json.dumps(shape),
            "mean": json.dumps([255 * value for value in inputs.mean]),
            "std": json.dumps([255 * value for value in inputs.std]),
            "preprocessing": "in the file: (pixels - mean) / std",
            "square": json.dumps({"margin": MARGIN}),
            "joints": json.dumps(inputs.skeleton.joints),
            "bins_per_pixel": json.dumps(inputs.k),
            "output": "logits (n, joints, 2, bins) of x and of y; bin b is the coordinate b / bins_per_pixel",
            "precision": precision_text(self.run.precision),
        }
        module = nn.Sequential(Standardise(inputs.mean, inputs.std), network)
        export_onnx(module, path, torch.zeros(1, *shape), metadata=about)
        return about

    def compare(self, network: Network, path: Path, suffix: str, progress: Progress | None = None) -> Comparison:
        """Compare a trained network with that of an exported file, on the evaluation images."""
        standardise = Standardise(self.inputs.mean, self.inputs.std).to(self.device)
        file = OnnxNetwork(path)
        return compare_scores(self, network, lambda x: file(standardise.pixels(x)))

    def fingerprint(self) -> str:
        """Return a digest of pixels and joints, in their order."""
        return self._digest

    def notes(self) -> Mapping[str, Any]:
        """Return ``data``, the split and the images that were left out; ``pose``, the network's inputs and outputs;
        ``baseline``, the scores of the mean pose; and ``weights``, where the initial weights came from.
        """
        sizes = {"train": self.samples, self.run.eval_split: len(self._test)}
        scored = f"{int((self._sizes > 0).sum())} persons of known size are scored"
        return {
            "data": {"split": f"{self._split}; {scored}", "images": sizes, "left_out": self.left_out},
            "pose": asdict(self.inputs),
            "baseline": {"title": "mean pose, no network", "scores": self.baseline()},
            **super().notes(),
        }

    @torch.no_grad()
    def predictions(self, network: nn.Module) -> dict[str, NDArray[Any]]:
        """Return the joints that the network finds in some images of the evaluation set.

        Returns:
            ``pixels`` (n, side, side, 3), the inputs as bytes; ``found`` (n, J, 2), the predicted joints; and ``truth``
            (n, J, 3), the labelled ones. Both are in pixels of the inputs.
        """
        ((x, y, _),) = self._plain_batches(self._stored_test, SHOWN)
        mean, std = (
            torch.tensor(values, device=self.device).view(-1, 1, 1) for values in (self.inputs.mean, self.inputs.std)
        )
        pixels = (255 * (x * std + mean)).round().clamp(0, 255).byte().permute(0, 2, 3, 1)
        arrays = {"pixels": pixels, "found": self.inputs.joints(network, x, self.settings.flip_test), "truth": y}
        return {name: tensor.cpu().numpy() for name, tensor in arrays.items()}

    def _plain_batches(
        self, persons: Persons, limit: int | None = None, shares: Shares = WHOLE
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield inputs that are not augmented, their joints, and the maps to pixels of the images, in batches; those of
        evenly spaced persons if limited, and perhaps only a share of the batches.
        """
        step = 1 if limit is None else max(1, len(persons) // limit)
        rows = shares.of(torch.arange(len(persons), device=self._host)[::step][:limit].split(EVALUATION_BATCH))
        stored: Iterable[Tensor] = (persons.x[index] for index in rows)
        if self._host != self.device:
            stored = stream(persons.x, rows, self.device)
        for images, index in zip(stored, rows, strict=True):
            where = index.to(self.device)
            yield self._augment(images, persons.y[where], persons.to_image[where])


def _check_settings(run: Run) -> None:
    """Raise if the network is not a pose network, or a setting has a value that pose does not take."""
    if model_entry(run.model).backbone is None:
        names = ", ".join(f"{entry.name} (on {entry.backbone})" for entry in MODELS.values() if entry.backbone)
        raise BsamValueError(f"{run.model} is not a pose network: set --model to one of {names}")
    if run.eval_split == "validation":
        raise BsamValueError(f"{run.data} has no {run.eval_split} set: set eval_split to test or holdout")
    if run.augment is not None and run.augment not in POSE_AUGMENTATIONS:
        raise BsamValueError(f"augment must be one of {', '.join(POSE_AUGMENTATIONS)} for pose; got {run.augment!r}")


def _score_and_sizes(data: PoseData, head_sizes: Tensor | None, truth: Tensor) -> tuple[pose_outputs.PoseScore, Tensor]:
    """Return how the joints of a data set are scored, and the sizes of the persons, the unit of distance."""
    if data.skeleton not in pose_outputs.SCORES:
        raise BsamValueError(
            f"there is no score for the joints of {data.name}: use LSP or MPII from bsam.lab.data.persons"
        )
    score = pose_outputs.SCORES[data.skeleton]
    if score is not pose_outputs.MPII_SCORE:
        return score, pose_outputs.torso_sizes(truth)
    if head_sizes is None:
        raise BsamValueError(f"{data.name} has no head_sizes, the unit of distance for {score.title}: add them")
    return score, head_sizes


def _load(
    run: Run, entry: KnownData, side: int, data_dir: Path | None, cache_dir: Path | None
) -> tuple[PoseData, list[str]]:
    if isinstance(entry, DrawnPersonData):
        return entry.draw(side), []
    assert isinstance(entry, PersonData), entry
    files = entry.person_files(data_dir)
    with ProgressLine() as line:
        progress = partial(line.reach, f"Cutting out the persons of {files.name}")
        return load_persons(files, side, cache_dir=cache_dir, skip_corrupt=run.skip_corrupt, progress=progress)


@dataclass(frozen=True)
class PoseInputs:
    """The inputs and outputs of a network that finds joints.

    Args:
        side: side of the inputs, in pixels.
        k: bins per pixel, for each coordinate.
        mean, std: mean and standard deviation per channel, of bytes divided by 255.
        skeleton: joints that the network finds.
    """

    side: int
    k: float
    mean: tuple[float, ...]
    std: tuple[float, ...]
    skeleton: Skeleton

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> PoseInputs:
        """Return the inputs from JSON values of ``dataclasses.asdict``; raise if one has another type."""
        lists = values["skeleton"]
        pairs = _joint_pairs(lists["pairs"])
        edges = _joint_pairs(lists["edges"])
        if not all(isinstance(joint, str) for joint in lists["joints"]):
            raise TypeError
        skeleton = Skeleton(tuple(lists["joints"]), pairs, edges)
        mean = tuple(map(float, values["mean"]))
        std = tuple(map(float, values["std"]))
        return cls(int(values["side"]), float(values["k"]), mean, std, skeleton)

    def augment(self, **settings: Any) -> PoseAugment:
        """Return the function that cuts inputs out of stored crops, with these settings of the augmentation."""
        return PoseAugment(self.side, self.skeleton.mirrored, mean=self.mean, std=self.std, **settings)

    def network(self, run: Run) -> nn.Module:
        """Return a run's network with random weights, drawn with its seed."""
        joints = len(self.skeleton.joints)
        network = build(run.model, joints, len(self.mean), run.seed, side=self.side, k=self.k)
        if run.freeze_backbone:
            freeze_backbone(network, joints)
        return network

    def joints(self, network: nn.Module, x: Tensor, flip_test: bool, logits: Tensor | None = None) -> Tensor:
        """Return the positions of the joints (n, J, 2), in pixels of the inputs.

        Args:
            network: the network, in eval mode.
            x: its inputs.
            flip_test: whether to average the probabilities of an image and its mirror image.
            logits: outputs of the network for ``x``, if they are known.
        """
        logits = network(x) if logits is None else logits
        if flip_test:
            logits = flip_merge(logits, network(x.flip(-1)), self.skeleton.mirrored, self.k)
        return decode(logits, self.k)


def _joint_pairs(values: Sequence[Sequence[Any]]) -> tuple[tuple[int, int], ...]:
    return tuple((int(first), int(second)) for first, second in values)
