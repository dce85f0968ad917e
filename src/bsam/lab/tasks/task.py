"""A task: what is learned. Tasks of the user derive from :class:`Task`, as ours do.

The laboratory owns splits, limits, order, devices, batches, digests and files. A task owns data, network, loss and
score, and answers what others ask about them, so that nothing else depends on which task it is.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import Field, asdict, dataclass, fields
from pathlib import Path
from types import NoneType
from typing import Any, ClassVar, NamedTuple, TypeAlias, get_type_hints

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ...common.checks import is_number
from ...common.errors import BsamError, BsamRuntimeError, BsamTypeError, BsamValueError
from ...flatness.dataset_loss import Batches
from ..common.files import load_tensors, read_bytes, reading
from ..common.names import call_with, describe_error, find_function, name_of
from ..config import KINDS, TASK_SETTINGS, Preset, Run, TaskSettings, kind_of, to_json_value
from ..data import DatasetEntry, Examples, TaskData
from ..data.images import DecodeError
from ..models import check_network
from ..quantization import OnnxNetwork, export_onnx
from .exported import Comparison, Network, Progress, WithInputs, compare_scores, precision_text
from .found import FoundValues, NoteReader, Prediction, Shown, drawn_pictures, read_batches
from .splits import WHOLE, Arrays, Shares, Splits, holdout_mask, load_splits

TaskBatch: TypeAlias = tuple[Tensor, ...]  # inputs, then targets, and last the samples' indices in the training set
Notes: TypeAlias = Callable[[str], Mapping[str, Any]]  # returns a JSON file of a run directory by name, {} without it
UNUSED = ("augment", "skip_corrupt", "weights", "freeze_backbone", "head_lr", "layer_decay")
EVALUATION_BATCH = 64
CHECKED = 2  # samples for which the outputs are checked before training
DRAWN = 6  # samples whose pictures are drawn after training
OTHER = "choose another run"


@dataclass(frozen=True)
class Score:
    """The metric by which tables compare trained networks.

    Args:
        name: name of the metric, without the split.
        title: its title in tables, with the unit.
        factor: the factor that converts the metric to this unit.
        higher: whether more is better; False for losses and errors.
        share: whether it is the share of samples that are right, so that its standard error follows from their number.

    Example:
        >>> Score("accuracy", "accuracy in %", 100).shown({"test_accuracy": 0.75}, "test")
        75.0
    """

    name: str
    title: str
    factor: float = 1.0
    higher: bool = True
    share: bool = False

    def metric(self, split: str) -> str:
        """Return the name of the metric on a split."""
        return f"{split}_{self.name}"

    def shown(self, metrics: Mapping[str, Any], split: str) -> float:
        """Return the number in the unit of the tables."""
        return self.factor * metrics[self.metric(split)]


class Failure(NamedTuple):
    """Why a run did not learn.

    Args:
        text: a sentence.
        diverged: whether the loss is so high that the network has not merely failed to learn.
    """

    text: str
    diverged: bool = False


class Task:
    """What is learned: data, networks, a loss and a score.

    A subclass gives ``score``, ``datasets``, ``networks``, :meth:`losses` and :meth:`sums`; everything else has a
    default. There is one object per run. Methods may use ``run``, ``settings``, ``device``, ``facts`` (with
    ``input_shape``) and, except for predictions, the tensors ``train`` and ``evaluation``, ``(x, *targets)``.

    Args:
        run: settings of the run.
        device: the device to train on, which also holds the data.
        data_dir: folder with the data, if it is read from files.
        cache_dir: folder for files that can be made again.
        facts: those of a trained run; the data is then not read.
    """

    # ---- what a task gives

    score: ClassVar[Score]
    datasets: ClassVar[Mapping[str, Callable[..., Splits]]] = {}  #: functions that return the data; the default first
    networks: ClassVar[Mapping[str, Callable[..., nn.Module]]] = {}  #: functions or classes; the default first

    def losses(self, outputs: Any, *targets: Any) -> Tensor:
        """Return the training loss of each sample, a tensor (n,)."""
        raise NotImplementedError

    def sums(self, outputs: Any, *targets: Any) -> Mapping[str, Tensor]:
        """Return statistics of each sample, tensors (n,) or (n, k), whose means determine the scores."""
        raise NotImplementedError

    # ---- what it may give

    settings_type: ClassVar[type[TaskSettings]] = TaskSettings  #: the class of ``run.task`` in its runs
    presets: ClassVar[Sequence[Preset]] = ()  #: defaults of its runs
    uses: ClassVar[frozenset[str]] = frozenset()  #: settings of a run that most tasks ignore, such as ``augment``
    groups: ClassVar[Sequence[Score]] = ()  #: parts of the score with columns of their own in tables
    identity: ClassVar[str] = ""  #: its name in ``identity.json``, if that is not the one of its settings
    loss_title: ClassVar[str] = "loss"  #: what :meth:`loss` computes, for labels of flatness measurements
    logits: ClassVar[bool] = False  #: whether outputs are logits and the first target the class, as SAF and MESA need

    def scores(self, means: Mapping[str, Tensor]) -> Mapping[str, float]:
        """Return scores from the means of :meth:`sums` over the samples; by default, these means."""
        return {name: float(mean) for name, mean in means.items()}

    def chance(self) -> float | None:
        """Return the score of the best constant answer; None if it is not known."""
        return None

    def augment(self, x: Tensor, *targets: Tensor, generator: torch.Generator) -> Arrays:
        """Return changed copies of training samples. Draw random numbers only from the generator, on the CPU."""
        return (x, *targets)

    def inputs(self, x: Tensor) -> Tensor:
        """Return the inputs of the network: bytes from 0 to 1, other numbers unchanged."""
        return x.float() / 255 if x.dtype == torch.uint8 else x

    def read(self, path: Path) -> Tensor:
        """Return one x from a file, for ``bsam predict``."""
        raise NotImplementedError

    def values(self, outputs: Any) -> list[dict[str, Any]]:
        """Return plain values for each sample, for ``bsam predict``."""
        raise NotImplementedError

    def draw(self, x: Tensor, outputs: Any, *targets: Tensor) -> NDArray[np.uint8]:
        """Return a picture for each sample, bytes (n, height, width, 3), for ``bsam predict`` and the page."""
        raise NotImplementedError

    # ---- what a trained network is used for: predictions, the page, export

    predict_heading: ClassVar[str] = ""  #: the heading of its flags of ``bsam predict``
    predict_flags: ClassVar[Mapping[str, Mapping[str, Any]]] = {}  #: options of :meth:`predict`, as argparse has them

    @classmethod
    def trained(cls, run: Run, device: torch.device, note: NoteReader) -> Task:
        """Return the task of a trained run without its data.

        Args:
            run: the settings.
            device: where the network runs.
            note: ``note(name, parse)`` parses a note in the run directory; it returns None if there is none.
        """
        return cls(run, device, facts=note("task", lambda task: task["facts"]))

    def predict(
        self,
        network: nn.Module,
        files: Mapping[Path, bool],
        on_message: Callable[[str], None],
        pictures: bool = False,
    ) -> Sequence[Prediction]:
        """Return what a trained network finds in files.

        Args:
            network: in eval mode.
            files: paths, with True for those that the user named directly.
            on_message: called with a sentence about files that are left out.
            pictures: whether pictures will be asked for.
        """
        needed = {"read": "read(path)", "values": "values(outputs)"}
        if pictures:
            needed["draw"] = "draw(x, outputs)"
        for member, signature in needed.items():
            if not self.has(member):
                raise BsamValueError(f"{self.run.task.name} has no {signature}, which bsam predict needs: add it")
        found = []
        for batch in read_batches(files, self._sample_of, 1, on_message, f"read by {self.run.task.name}"):
            ((path, sample),) = batch
            found.append(self._found(network, path, sample[None].to(self.device), pictures))
        return found

    def _found(self, network: nn.Module, path: Path, x: Tensor, pictures: bool) -> FoundValues:
        name = self.run.task.name
        outputs = _as_float(self._ask(f"the network {self.run.model}", lambda: network(self.inputs(x))))
        values = self._ask(f"values of {name}", lambda: self.values(outputs))
        if not isinstance(values, Sequence) or len(values) != 1 or not isinstance(values[0], dict):
            raise BsamTypeError(f"values of {name} must return a list with a dictionary per sample")
        drawn = self._ask(f"draw of {name}", lambda: np.asarray(self.draw(x, outputs))[0]) if pictures else None
        return FoundValues(path, to_json_value(values[0]), drawn)

    def _sample_of(self, path: Path) -> Tensor:
        """Return one x from a file; any error means that it is no sample."""
        try:
            return torch.as_tensor(self.read(path))
        except Exception as error:
            described = describe_error(error, type(self).__module__)
            raise DecodeError(f"{self.run.task.name} cannot read {path}: {described}") from error

    @staticmethod
    def pictures(arrays: Mapping[str, NDArray[Any]], note: NoteReader) -> Shown | None:
        """Return what the page shows of the stored result of :meth:`predictions`."""
        return drawn_pictures(arrays, note)

    @classmethod
    def is_quantized(cls, run: Run) -> bool:
        """Return whether the network of a run has integer weights, which a safetensors file stores."""
        return False

    def float_network(self) -> nn.Module:
        """Return a new network, before quantization."""
        return self.network()

    def export(self, network: nn.Module, path: Path, suffix: str) -> dict[str, str]:
        """Write a trained network to a file of the format with this suffix; return its metadata, with ``input``."""
        x = self.evaluation[0][:1]
        shape = ", ".join(["n", *map(str, x.shape[1:])])
        about = {
            "task": self.run.task.name,
            "model": self.run.model,
            "input": f"{str(x.dtype).removeprefix('torch.')} ({shape}), samples as they are in the data; the file "
            "makes the network's inputs",
            "facts": json.dumps(self.facts),
            "precision": precision_text(self.run.precision),
        }
        # a function, since a bound method would be copied with the data of its task
        export_onnx(WithInputs(lambda x: self.inputs(x), network), path, x, metadata=about)
        return about

    def compare(self, network: Network, path: Path, suffix: str, progress: Progress | None = None) -> Comparison:
        """Compare a trained network with that of an exported file, on the evaluation samples."""
        of_samples = copy.copy(self)
        of_samples.inputs = lambda x: x  # type: ignore[method-assign]
        return compare_scores(of_samples, lambda x: network(self.inputs(x)), OnnxNetwork(path))

    # ---- what follows

    facts: Mapping[str, Any]
    train: Arrays
    evaluation: Arrays
    samples: int  #: number of training samples
    eval_samples: int | None = None  #: number of samples that :meth:`evaluate` uses, if it is known
    classes: int  #: number of outputs per sample, if the facts have it
    image_size: int | None = None  #: side of the network's inputs in pixels, if they are square images
    smoothing: float = 0.0  #: torch's label_smoothing, for SAF and MESA, which compute the cross-entropy themselves
    shares: Shares = WHOLE  #: how the processes of torchrun may divide the batches of :meth:`evaluate`

    def __init_subclass__(cls, stored: bool = False, **options: Any) -> None:
        """Make the settings of the task, which carry its name, its presets and the names of its data and networks.

        Our tasks have theirs in ``bsam.lab.config``.

        Args:
            stored: whether ``settings_type`` is complete, as that of a task that only files describe.
            options: for other base classes.
        """
        super().__init_subclass__(**options)
        given = cls.__dict__.get("settings_type", cls.settings_type)
        if stored or given in TASK_SETTINGS.values():
            return
        settings = next(kind for kind in given.__mro__ if not kind.__dict__.get("_of_task"))
        first: dict[str, Any] = {"data": next(iter(cls.datasets), None), "model": next(iter(cls.networks), None)}
        values: dict[str, Any] = {
            "__module__": cls.__module__,
            "__qualname__": f"{cls.__qualname__}.settings_type",  # where pickle finds it
            "_of_task": True,
            "presets": (Preset(**{name: value for name, value in first.items() if value is not None}), *cls.presets),
            "datasets": tuple(cls.datasets),
            "networks": tuple(cls.networks),
            "unused": tuple(name for name in UNUSED if name not in cls.uses),
        }
        if cls.__qualname__.isidentifier():  # others cannot be found again by their name
            values["name"] = name_of(cls, "task")
        cls.settings_type = type("settings_type", (settings,), values)

    def __init__(
        self,
        run: Run,
        device: torch.device,
        data_dir: Path | None = None,
        cache_dir: Path | None = None,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        check_members(type(self))
        self.run = run
        self.settings = run.task
        self.device = device
        self.data_dir = data_dir
        self._epoch = 0
        if facts is None:
            facts = self._load(run, data_dir, cache_dir)
        self.facts = facts
        self.classes = int(facts.get("classes", 1))

    def _load(self, run: Run, data_dir: Path | None, cache_dir: Path | None) -> Mapping[str, Any]:
        """Read the data, and return its facts."""
        splits = self.splits(run, data_dir, cache_dir)
        train = splits["train"]
        evaluation = splits.get(run.eval_split)
        self._digest = _digest((*train, *(evaluation or ())))
        train = _at(train, _limited(train, "limit_train", run.limit_train))
        if run.eval_split == "holdout":
            mask = holdout_mask(len(train[0]), run.seed)
            train, evaluation = _at(train, ~mask), _at(train, mask)
        elif evaluation is None:
            raise BsamValueError(
                f"{run.data} of {run.task.name} has no {run.eval_split} samples: set eval_split to holdout, or return "
                f"Splits(train, {run.eval_split}=...)"
            )
        evaluation = _at(evaluation, _limited(evaluation, "limit_test", run.limit_test))
        self.train = tuple(array.to(self.device) for array in train)
        self.evaluation = tuple(array.to(self.device) for array in evaluation)
        self.samples = len(train[0])
        self.eval_samples = len(evaluation[0])
        return splits["facts"]

    @classmethod
    def splits(cls, run: Run, data_dir: Path | None = None, cache_dir: Path | None = None) -> dict[str, Any]:
        """Return the checked splits of a run's data that exist, by name, as tuples of tensors, and its ``facts``."""
        read = cls.datasets[run.data] if run.data in cls.datasets else find_function(run.data, "data set")
        name = run.data if ":" in run.data else f"{run.data} of {run.task.name}"
        given = {"data_dir": data_dir, "cache_dir": cache_dir, "image_size": run.image_size}
        return load_splits(read, name, given, _values(run.task))

    def has(self, member: str) -> bool:
        """Return whether the subclass gives a method."""
        return getattr(type(self), member) is not getattr(Task, member)

    def network(self) -> nn.Module:
        """Return a new network on the device; its weights are a function of the run's seed."""
        run = self.run
        shape = self.facts["input_shape"]
        build = self.networks[run.model] if run.model in self.networks else find_function(run.model, "model")
        of_images = {"channels": shape[0], "image_size": shape[-1]} if len(shape) == 3 else {}
        offered = {**of_images, "pretrained": False, **self.facts, **_values(self.settings)}
        name = run.model if ":" in run.model else f"{run.model} of {run.task.name}"
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.default_generator.manual_seed(run.seed)
            network = self._ask(name, lambda: call_with(build, offered, name))
        check_network(network, name)
        return network.to(self.device)

    def initialise(self, network: nn.Module, init: Path | None = None) -> Sequence[str]:
        """Load the initial weights, if they are not random, and check the outputs for two samples. Return sentences for
        the user.

        Args:
            network: from :meth:`network`.
            init: file with the trained network of the run that ``run.init`` names.
        """
        messages = []
        if init is not None:
            with reading(init, OTHER):
                network.load_state_dict(load_tensors(read_bytes(init))[0])
            messages.append(f"Training begins with the network of {self.run.init}.")
        self.check_outputs(network)
        return messages

    @torch.no_grad()
    def check_outputs(self, network: nn.Module) -> None:
        """Raise if what the task computes from two training samples has a wrong shape."""
        x, *targets = (array[:CHECKED] for array in self.train)
        n = len(x)
        name = self.run.task.name
        network.eval()
        outputs = self._ask(f"the network {self.run.model}", lambda: network(self.inputs(x)))
        if self.logits and _shape(outputs) != str((n, self.classes)):
            raise BsamValueError(
                f"{self.run.model} returns outputs {_shape(outputs)} for {self.classes} classes: use its argument "
                "classes"
            )
        losses = self._ask(f"losses of {name}", lambda: self.losses(outputs, *targets))
        if not isinstance(losses, Tensor) or tuple(losses.shape) != (n,):
            raise BsamValueError(
                f"losses of {name} must return a loss per sample, shape ({n},) for {n} samples; got {_shape(losses)}"
            )
        if not self.has("evaluate"):
            sums = self._ask(f"sums of {name}", lambda: self.sums(outputs, *targets))
            if not isinstance(sums, Mapping):
                raise BsamTypeError(f"sums of {name} must return a dictionary of tensors, got {type(sums).__name__}")
            for key, value in sums.items():
                if not isinstance(value, Tensor) or value.ndim not in (1, 2) or len(value) != n:
                    raise BsamValueError(
                        f"sums of {name} must return a row per sample for {key!r}, shape ({n},) or ({n}, k) for {n} "
                        f"samples; got {_shape(value)}"
                    )
            means = {key: value.double().mean(0) for key, value in sums.items()}
            scores = self._ask(f"scores of {name}", lambda: self.scores(means))
            if not isinstance(scores, Mapping) or self.score.name not in scores:
                got = ", ".join(scores) if isinstance(scores, Mapping) else type(scores).__name__
                raise BsamValueError(
                    f"scores of {name} must return a dictionary with {self.score.name!r}, as its score says; got {got}"
                )
        if self.has("augment"):
            generator = torch.Generator().manual_seed(self.run.seed)
            changed = self._ask(f"augment of {name}", lambda: self.augment(x, *targets, generator=generator))
            if not isinstance(changed, (tuple, list)) or len(changed) != 1 + len(targets):
                raise BsamValueError(f"augment of {name} must return (x, *targets), got {type(changed).__name__}")

    def _ask(self, what: str, function: Callable[[], Any]) -> Any:
        try:
            return function()
        except BsamError:
            raise
        except Exception as error:
            described = describe_error(error, type(self).__module__)
            raise BsamRuntimeError(f"{what} raised {described}: correct it") from error

    @classmethod
    def parameter_groups(cls, run: Run, network: nn.Module) -> list[dict[str, Any]] | None:
        """Return the groups of trained parameters; None if they follow from the run's learning rates."""
        return None

    def set_train_mode(self, network: nn.Module) -> None:
        """Set the network to training mode."""
        network.train()

    def begin_epoch(self, epoch: int) -> None:
        """Note the epoch (counted from 0), or draw its random numbers.

        They must depend only on the seed and the epoch, so that a resumed run draws the same ones.
        """
        self._epoch = epoch

    def batch(self, index: Tensor) -> TaskBatch:
        """Return the training samples with these indices, augmented: inputs, targets and indices.

        Random numbers follow from the epoch and the indices, and not from other calls of this method, because a run may
        be continued in the middle of an epoch.
        """
        seed = int(np.random.default_rng((self.run.seed, self._epoch, int(index[0]))).integers(2**62))
        x, *targets = self.augment(*_at(self.train, index), generator=torch.Generator().manual_seed(seed))
        return self.inputs(x), *targets, index

    def batches(self, indices: Tensor) -> Iterator[TaskBatch]:
        """Return a batch for each row of indices, in order. A task that reads from host memory may read ahead."""
        return map(self.batch, indices)

    def batch_losses(self, outputs: Any, batch: TaskBatch) -> Tensor:
        """Return the training loss of each sample in a batch, from outputs in single precision."""
        return self.losses(_as_float(outputs), *batch[1:-1])

    @torch.no_grad()
    def evaluate(self, network: nn.Module) -> dict[str, float]:
        """Return the mean loss and the scores of the network, in eval mode. The names of metrics begin with the run's
        ``eval_split``.

        With ``torchrun``, all processes call this method, and the result of the first one counts.
        """
        totals: dict[str, Tensor] = {}
        for x, *targets in zip(*(array.split(EVALUATION_BATCH) for array in self.evaluation), strict=True):
            outputs = _as_float(network(self.inputs(x)))
            rows = {"loss": self.losses(outputs, *targets), **self.sums(outputs, *targets)}
            for name, values in rows.items():
                totals[name] = totals.get(name, 0.0) + values.double().sum(0)
        means = {name: total / len(self.evaluation[0]) for name, total in totals.items()}
        metrics = {"loss": float(means.pop("loss"))}
        metrics |= {name: float(score) for name, score in self.scores(means).items()}
        return {f"{self.run.eval_split}_{name}": value for name, value in metrics.items()}

    def examples(self, limit: int | None = None) -> Batches:
        """Return training samples as batches ``(x, y)`` for flatness measurements.

        They are not augmented, and have the targets used in training; balanced over classes if limited.
        """
        limit = None if limit is None else min(limit, self.samples)
        parts = _at(self.train, _limited(self.train, "limit", limit).to(self.device))
        batches = []
        for x, *targets in zip(*(array.split(EVALUATION_BATCH) for array in parts), strict=True):
            batches.append((self.inputs(x), targets[0] if len(targets) == 1 else tuple(targets)))
        return batches

    def loss(self, outputs: Any, y: Any) -> Tensor:
        """Return the mean loss of a batch from :meth:`examples`."""
        return self.losses(_as_float(outputs), *(y if isinstance(y, tuple) else (y,))).mean()

    def measured_network(self, network: nn.Module) -> nn.Module:
        """Return the network whose flatness is measured: the trained one, or a copy if it must be changed."""
        return network

    def fingerprint(self) -> str:
        """Return a digest of the training and the evaluation samples; a run is resumed only with the same data."""
        return self._digest

    @torch.no_grad()
    def predictions(self, network: nn.Module) -> Mapping[str, NDArray[Any]]:
        """Return arrays by name for the report, from the trained network in eval mode: pictures of the first evaluation
        samples, if the task draws them.
        """
        if not self.has("draw"):
            return {}
        x, *targets = (array[:DRAWN] for array in self.evaluation)
        outputs = _as_float(network(self.inputs(x)))
        drawn = self._ask(f"draw of {self.run.task.name}", lambda: np.asarray(self.draw(x, outputs, *targets)))
        return {"pictures": drawn}

    def notes(self) -> Mapping[str, Any]:
        """Return plain values to write into the run directory, by file name without ``.json``.

        ``task`` is what tables and predictions need of the task, so that they work without its module.
        """
        described = {
            item.name: {"default": to_json_value(item.default), "help": item.metadata["help"]}
            for item in fields(self.settings)
        }
        chance = self._ask(f"chance of {self.run.task.name}", self.chance)
        if not (chance is None or is_number(chance) or isinstance(chance, (Tensor, np.generic))):
            raise BsamTypeError(f"chance of {self.run.task.name} must return a number or None, got {chance!r}")
        about = {
            "name": self.run.task.name,
            "score": asdict(self.score),
            "groups": [asdict(group) for group in self.groups],
            "loss_title": self.loss_title,
            "chance": None if chance is None else float(chance),
            "facts": self.facts,
            "settings": described,
            "presets": [preset.to_json() for preset in type(self.settings).presets],
        }
        return {"task": about}

    # ---- what others ask about a run, without its data; `note` reads a file of its directory

    worded: ClassVar[Sequence[str]] = ()  #: the settings that :meth:`data_words` and :meth:`network_words` speak of

    @classmethod
    def titles(cls, run: Run) -> tuple[str, str]:
        """Return the titles of network and data."""
        return run.model, run.data

    @classmethod
    def data_words(cls, run: Run, wrong: float | None = None) -> str:
        """Say how the data was changed; empty if it was not.

        Args:
            run: the run.
            wrong: from :meth:`wrong_labels`, if it is known.
        """
        return ""

    @classmethod
    def network_words(cls, run: Run) -> str:
        """Say how the network was changed, for titles; empty if it was not."""
        return ""

    @classmethod
    def network_details(cls, run: Run) -> str:
        """Say in full how the network was changed; empty if it was not."""
        return cls.network_words(run)

    @classmethod
    def table_notes(cls, runs: Iterable[tuple[Run, float | None]]) -> list[str]:
        """Return lines below the table of these runs, each with its share of wrong labels, if it is known."""
        return []

    @classmethod
    def wrong_labels(cls, run: Run, note: Notes | None = None) -> float | None:
        """Return the share of the training labels that were made wrong; None if there are none, or it is unknown."""
        return None

    @classmethod
    def clean_score(cls, run: Run) -> Score | None:
        """Return the score on the true labels, if some of the labels that the run is scored on are wrong."""
        return None

    @classmethod
    def guess(cls, run: Run, note: Notes) -> float | None:
        """Return the score of the best constant answer, as the files of a run know it; None if they do not."""
        return note("task").get("chance")

    @classmethod
    def untrained(cls, note: Notes) -> tuple[str, Mapping[str, float]]:
        """Return a row for tables that needs no training: its title and its scores by name; empty by default."""
        return "", {}

    @classmethod
    def failure(cls, run: Run, epochs: Sequence[Mapping[str, Any]], note: Notes) -> Failure | None:
        """Return why a finished run did not learn; None if it did.

        By default, a score must be better than chance and, if training began with random weights, the last training
        loss lower than that of the first epoch.
        """
        return cls.chance_failure(run, epochs[-1], note) or _loss_failure(run, epochs)

    @classmethod
    def chance_failure(cls, run: Run, last: Mapping[str, Any], note: Notes) -> Failure | None:
        """Return that a run is no better than the best constant answer, if that is known.

        Args:
            run: the run.
            last: the metrics of the last epoch.
            note: reads a file of the run directory.
        """
        chance = cls.guess(run, note)
        if chance is None:
            return None
        reached = last[cls.score.metric(run.eval_split)]
        if reached is not None and (reached > chance if cls.score.higher else reached < chance):
            return None
        numbers = (reached or math.nan, chance)
        shown = " and ".join(f"{cls.score.factor * number:.4g}" for number in numbers)
        return Failure(f"The network is no better than the best constant answer: {cls.score.title} {shown}.")

    @classmethod
    def not_initial(cls, run: Run) -> str:
        """Return why no other run can start from the network of a run; empty if it can."""
        return ""

    # ---- what others ask about settings that are not yet those of a run, or about a run that has not begun

    @classmethod
    def complete(cls, given: Mapping[str, Any], data_dir: Path | None = None) -> dict[str, Any]:
        """Return given settings with the defaults that depend on files; presets are applied by
        :class:`bsam.lab.training.Run`."""
        return dict(given)

    @classmethod
    def check_start(cls, run: Run, data_dir: Path | None = None) -> None:
        """Raise if a run cannot start, before its data is read; a network of the user is imported."""
        if ":" in run.model:
            find_function(run.model, "model")

    @classmethod
    def data_entry(cls, run: Run) -> DatasetEntry:
        """Return the entry of a run's data."""
        return TaskData(run.data, run.data, None)

    @classmethod
    def has_validation(cls, run: Run, data_dir: Path | None = None) -> bool:
        """Return whether a run's data has a validation set."""
        return "validation" in cls.splits(run, data_dir)

    @classmethod
    def functions(cls, run: Run) -> set[str]:
        """Return which of ``task``, ``data`` and ``model`` are code, ``MODULE:NAME``, that runs when they are used."""
        return {name for name, value in {"data": run.data, "model": run.model}.items() if ":" in value} | {"task"}


def check_members(task: type) -> None:
    """Raise unless a class is a task with all that it must give."""
    if not (isinstance(task, type) and issubclass(task, Task)):
        got = f"the class {task.__name__}" if isinstance(task, type) else f"a {type(task).__name__}"
        raise BsamTypeError(f"a task must be a class derived from bsam.lab.Task, got {got}: check the name")
    for name in ("datasets", "networks"):
        if not isinstance(given := getattr(task, name), Mapping):
            raise BsamTypeError(f"{name} of {task.__name__} must map names to functions, got {type(given).__name__}")
    score = getattr(task, "score", None)
    if score is not None and not isinstance(score, Score):
        raise BsamTypeError(f"score of {task.__name__} must be a bsam.lab.Score, got {type(score).__name__}")
    missing = [name for name in ("datasets", "networks") if not getattr(task, name)]
    missing += ["score"] if score is None else []
    missing += ["losses(outputs, *targets)"] if task.losses is Task.losses else []
    missing += ["sums(outputs, *targets)"] if task.sums is Task.sums and task.evaluate is Task.evaluate else []
    if missing:
        raise BsamTypeError(f"the task {task.__name__} has no {missing[0]}: add it to the class")
    settings = task.settings_type
    if any(isinstance(value, Field) for kind in settings.__mro__ for value in vars(kind).values()):
        raise BsamTypeError(f"the settings of {task.__name__} are no dataclass: write @dataclass above the class")
    for item in fields(settings):
        if "help" not in item.metadata:
            raise BsamTypeError(f"{item.name} of {task.__name__} must be declared with setting(default, help)")
        default = to_json_value(item.default)
        if kind_of(get_type_hints(settings)[item.name]) is None or type(default) not in (NoneType, *KINDS):
            raise BsamTypeError(
                f"{item.name} of {task.__name__} must be a str, int, float, bool or Literal, or one of them or None, "
                f"got {item.type if isinstance(item.type, str) else getattr(item.type, '__name__', item.type)} with "
                f"the default {item.default!r}: choose another type"
            )


def _loss_failure(run: Run, epochs: Sequence[Mapping[str, Any]]) -> Failure | None:
    """Return that the last training loss of a run is not below that of the first epoch."""
    first, last = (metrics.get("train_loss") for metrics in (epochs[0], epochs[-1]))
    if first is None or last is None or len(epochs) < 2 or run.init is not None or run.weights is not None:
        return None
    if not last >= first:
        return None
    text = f"The training loss, {last:.4g}, is not below that of the first epoch, {first:.4g}."
    return Failure(text, diverged=True)


def _digest(arrays: Iterable[Tensor]) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(repr((tuple(array.shape), array.dtype)).encode())
        digest.update(array.contiguous().numpy().data)
    return digest.hexdigest()


def _limited(arrays: Arrays, name: str, n: int | None) -> Tensor:
    """Return the indices of ``n`` samples: balanced if the first target is a class, else evenly spaced."""
    samples = len(arrays[0])
    if n is None or n == samples:
        return torch.arange(samples)
    if n > samples:
        raise BsamValueError(f"{name} must be at most {samples}, the size of the set; got {n}")
    labels = arrays[1] if len(arrays) > 1 else None
    if labels is not None and labels.ndim == 1 and not labels.is_floating_point():
        return Examples(arrays[0], labels).balanced_indices(n)
    return torch.linspace(0, samples - 1, n, dtype=torch.float64).round().long()


def _at(arrays: Arrays, index: Tensor) -> Arrays:
    return tuple(array[index] for array in arrays)


def _as_float(outputs: Any) -> Any:
    """Return outputs in single precision, if autocast made them shorter."""
    short = (torch.float16, torch.bfloat16)
    return tree_map(lambda t: t.float() if isinstance(t, Tensor) and t.dtype in short else t, outputs)


def _values(settings: TaskSettings) -> dict[str, Any]:
    return {item.name: getattr(settings, item.name) for item in fields(settings)}


def _shape(value: Any) -> str:
    return str(tuple(value.shape)) if isinstance(value, Tensor) else type(value).__name__
