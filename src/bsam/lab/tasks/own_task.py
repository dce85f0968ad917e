"""Tasks of the user: data, networks, a loss and a score, to which the base class adds everything else."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.data import default_collate

from ...common.errors import BsamError, BsamRuntimeError, BsamTypeError, BsamValueError
from ...flatness.dataset_loss import Batches
from ..common.files import load_tensors, read_bytes, reading
from ..common.names import call_with, describe_error, find_function, name_of
from ..config import Preset, Run, TaskSettings, to_json_value
from ..data import Examples
from .task import BaseTask, Score, TaskBatch, holdout_mask

Arrays = tuple[Tensor, ...]
UNUSED = ("augment", "skip_corrupt", "weights", "freeze_backbone", "head_lr", "layer_decay")
EVALUATION_BATCH = 64
CHECKED = 2  # samples for which the outputs are checked before training
DRAWN = 6  # samples whose pictures are drawn after training
OTHER = "choose another run"


@dataclass(frozen=True)
class Splits:
    """The data of a task.

    Each split is a tuple ``(x, *targets)`` of equally long arrays, tensors or memory maps, or a map-style dataset of
    such tuples, which is read into memory. Numbers with 64 bits after the point become 32-bit ones.

    Args:
        train: the training samples.
        test: the test samples.
        validation: the validation samples; without them, tuning holds out training samples.
        facts: plain values that networks and predictions need, such as the number of classes.
    """

    train: Any
    test: Any = None
    validation: Any = None
    facts: Mapping[str, Any] = field(default_factory=dict)


class Task(BaseTask):
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

    datasets: ClassVar[Mapping[str, Callable[..., Splits]]] = {}  #: functions that return the data; the default first
    networks: ClassVar[Mapping[str, Callable[..., nn.Module]]] = {}  #: functions or classes; the default first
    presets: ClassVar[Sequence[Preset]] = ()  #: defaults of its runs
    uses: ClassVar[frozenset[str]] = frozenset()  #: settings of a run that most tasks ignore, such as ``augment``
    groups: ClassVar[Sequence[Score]] = ()  #: parts of the score with columns of their own in tables
    facts: Mapping[str, Any]
    train: Arrays
    evaluation: Arrays

    def __init_subclass__(cls, **options: Any) -> None:
        """Make the settings of the task, which carry its name, its presets and the names of its data and networks."""
        super().__init_subclass__(**options)
        given = cls.__dict__.get("settings_type", cls.settings_type)
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
        self.run, self.settings = run, run.task
        self.device, self.data_dir = device, data_dir
        self._epoch = 0
        if facts is not None:
            self.facts = facts
            return
        splits = load_splits(run, data_dir, cache_dir)
        train, evaluation = splits["train"], splits.get(run.eval_split)
        self.facts = splits["facts"]
        digest = hashlib.sha256()
        for array in (*train, *(evaluation or ())):
            digest.update(repr((tuple(array.shape), array.dtype)).encode())
            digest.update(array.contiguous().numpy().data)
        self._digest = digest.hexdigest()
        train = _at(train, self._limited(train, "limit_train", run.limit_train))
        if run.eval_split == "holdout":
            mask = holdout_mask(len(train[0]), run.seed)
            train, evaluation = _at(train, ~mask), _at(train, mask)
        elif evaluation is None:
            raise BsamValueError(
                f"{run.data} of {run.task.name} has no {run.eval_split} samples: set eval_split to holdout, or return "
                f"Splits(train, {run.eval_split}=...)"
            )
        evaluation = _at(evaluation, self._limited(evaluation, "limit_test", run.limit_test))
        self.train, self.evaluation = (tuple(array.to(device) for array in part) for part in (train, evaluation))
        self.samples, self.eval_samples = len(train[0]), len(evaluation[0])

    # ---- what a task gives

    def losses(self, outputs: Any, *targets: Any) -> Tensor:
        """Return the training loss of each sample, a tensor (n,)."""
        raise NotImplementedError

    def sums(self, outputs: Any, *targets: Any) -> Mapping[str, Tensor]:
        """Return statistics of each sample, tensors (n,) or (n, k), whose means determine the scores."""
        raise NotImplementedError

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

    # ---- what follows

    @property
    def classes(self) -> int:  # type: ignore[override]
        """The number of outputs per sample, if the facts have it."""
        return int(self.facts.get("classes", 1))

    def has(self, member: str) -> bool:
        """Return whether the subclass gives a method."""
        return getattr(type(self), member) is not getattr(Task, member)

    def network(self) -> nn.Module:
        """Return a new network, with weights that depend on the seed of the run."""
        run, shape = self.run, self.facts["input_shape"]
        build = self.networks[run.model] if run.model in self.networks else find_function(run.model, "model")
        of_images = {"channels": shape[0], "image_size": shape[-1]} if len(shape) == 3 else {}
        offered = {**of_images, "pretrained": False, **self.facts, **_values(self.settings)}
        name = run.model if ":" in run.model else f"{run.model} of {run.task.name}"
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.default_generator.manual_seed(run.seed)
            network = self._ask(name, lambda: call_with(build, offered, name))
        if not isinstance(network, nn.Module):
            raise BsamTypeError(f"{name} must return a torch.nn.Module, got {type(network).__name__}")
        return network.to(self.device)

    def initialise(self, network: nn.Module, init: Path | None = None) -> Sequence[str]:
        """Load the network of the initial run, if there is one, and check the outputs for two samples."""
        messages = []
        if init is not None:
            with reading(init, OTHER):
                network.load_state_dict(load_tensors(read_bytes(init))[0])
            messages.append(f"Training begins with the network of {self.run.init}.")
        self.check_outputs(network)
        return messages

    @torch.no_grad()
    def check_outputs(self, network: nn.Module) -> None:
        """Raise if the losses or the sums of two training samples have a wrong shape."""
        x, *targets = (array[:CHECKED] for array in self.train)
        n, name = len(x), self.run.task.name
        network.eval()
        outputs = self._ask(f"the network {self.run.model}", lambda: network(self.inputs(x)))
        if self.logits and tuple(outputs.shape) != (n, self.classes):
            raise BsamValueError(
                f"{self.run.model} returns outputs {tuple(outputs.shape)} for {self.classes} classes: use its argument "
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

    def _ask(self, what: str, function: Callable[[], Any]) -> Any:
        try:
            return function()
        except BsamError:
            raise
        except Exception as error:
            described = describe_error(error, type(self).__module__)
            raise BsamRuntimeError(f"{what} raised {described}: correct it") from error

    def begin_epoch(self, epoch: int) -> None:
        """Note the epoch, which determines the random numbers of the augmentation."""
        self._epoch = epoch

    def batch(self, index: Tensor) -> TaskBatch:
        """Return augmented inputs, targets and indices."""
        seed = int(np.random.default_rng((self.run.seed, self._epoch, int(index[0]))).integers(2**62))
        x, *targets = self.augment(*_at(self.train, index), generator=torch.Generator().manual_seed(seed))
        return self.inputs(x), *targets, index

    def batch_losses(self, outputs: Any, batch: TaskBatch) -> Tensor:
        """Return the training loss of each sample in a batch, from outputs in single precision."""
        return self.losses(_as_float(outputs), *batch[1:-1])

    def loss(self, outputs: Any, y: Any) -> Tensor:
        """Return the mean of :meth:`losses`."""
        return self.losses(_as_float(outputs), *(y if isinstance(y, tuple) else (y,))).mean()

    def examples(self, limit: int | None = None) -> Batches:
        """Return training samples that are not augmented; balanced over classes if limited."""
        limit = None if limit is None else min(limit, self.samples)
        parts = _at(self.train, self._limited(self.train, "limit", limit).to(self.device))
        batches = []
        for x, *targets in zip(*(array.split(EVALUATION_BATCH) for array in parts), strict=True):
            batches.append((self.inputs(x), targets[0] if len(targets) == 1 else tuple(targets)))
        return batches

    @torch.no_grad()
    def evaluate(self, network: nn.Module) -> dict[str, float]:
        """Return the mean loss and the scores."""
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

    def fingerprint(self) -> str:
        """Return a digest of the training and the evaluation samples."""
        return self._digest

    @torch.no_grad()
    def predictions(self, network: nn.Module) -> Mapping[str, NDArray[Any]]:
        """Return pictures of the first evaluation samples, if the task draws them."""
        if not self.has("draw"):
            return {}
        x, *targets = (array[:DRAWN] for array in self.evaluation)
        return {"pictures": np.asarray(self.draw(x, _as_float(network(self.inputs(x))), *targets))}

    def notes(self) -> Mapping[str, Any]:
        """Return ``task``: what tables and predictions need of the task, so that they work without its module."""
        described = {
            item.name: {"default": to_json_value(item.default), "help": item.metadata["help"]}
            for item in fields(self.settings)
        }
        chance = self.chance()
        about = {
            "name": self.run.task.name,
            "score": asdict(self.score),
            "groups": [asdict(group) for group in self.groups],
            "loss_title": self.loss_title,
            "chance": None if chance is None else float(chance),
            "facts": self.facts,
            "settings": described,
        }
        return {"task": about}

    def _limited(self, arrays: Arrays, name: str, n: int | None) -> Tensor:
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


def check_members(task: type) -> None:
    """Raise unless a class is a task with all that it must give."""
    if not (isinstance(task, type) and issubclass(task, Task)):
        got = f"the class {task.__name__}" if isinstance(task, type) else f"a {type(task).__name__}"
        raise BsamTypeError(f"a task must be a class derived from bsam.lab.Task, got {got}: check the name")
    missing = [name for name in ("datasets", "networks") if not getattr(task, name)]
    missing += ["score"] if not isinstance(getattr(task, "score", None), Score) else []
    missing += ["losses(outputs, *targets)"] if task.losses is Task.losses else []
    missing += ["sums(outputs, *targets)"] if task.sums is Task.sums and task.evaluate is Task.evaluate else []
    if missing:
        raise BsamTypeError(f"the task {task.__name__} has no {missing[0]}: add it to the class")


_LAST: dict[str, dict[str, Any]] = {}  # consecutive runs share the data


def load_splits(run: Run, data_dir: Path | None = None, cache_dir: Path | None = None) -> dict[str, Any]:
    """Return the checked splits of a run's data that exist, by name, as tuples of tensors, and its ``facts``."""
    task = _task_of(run)
    read = task.datasets[run.data] if run.data in task.datasets else find_function(run.data, "data set")
    name = run.data if ":" in run.data else f"{run.data} of {run.task.name}"
    named = inspect.signature(read).parameters
    if run.image_size is not None and "image_size" not in named:
        raise BsamValueError(f"{name} does not use image_size: leave it out")
    if data_dir is None and "data_dir" in named and named["data_dir"].default is inspect.Parameter.empty:
        raise BsamRuntimeError(f"{name} is read from files: give their folder with --data-dir (data_dir)")
    given = {"data_dir": data_dir, "cache_dir": cache_dir, "image_size": run.image_size}
    offered = {**_values(run.task), **{key: value for key, value in given.items() if value is not None}}
    key = repr((name, id(read), offered))
    if key not in _LAST:
        _LAST.clear()
        try:
            splits = call_with(read, offered, name)
        except BsamError:
            raise
        except Exception as error:
            described = describe_error(error, getattr(read, "__module__", None))
            raise BsamRuntimeError(f"{name} raised {described}: correct the function, or the folder") from error
        if not isinstance(splits, Splits):
            raise BsamTypeError(f"{name} must return bsam.lab.Splits, got {type(splits).__name__}")
        parts = {part: getattr(splits, part) for part in ("train", "test", "validation")}
        loaded: dict[str, Any] = {
            part: _tensors(value, f"{part} of {name}") for part, value in parts.items() if value is not None
        }
        facts = {"input_shape": list(loaded["train"][0].shape[1:]), **splits.facts}
        try:
            loaded["facts"] = json.loads(json.dumps(to_json_value(facts)))  # as predictions will read them
        except TypeError as error:
            raise BsamTypeError(f"facts of {name} must be plain values: {error}") from error
        _LAST[key] = loaded
    return _LAST[key]


def _task_of(run: Run) -> type[Task]:
    from . import task_class

    task = task_class(run.task.name)
    assert isinstance(task, type)
    assert issubclass(task, Task)
    return task


def _tensors(part: Any, name: str) -> Arrays:
    """Return a split as tensors in host memory."""
    if not isinstance(part, (tuple, list)):
        if not (hasattr(part, "__getitem__") and hasattr(part, "__len__")) or isinstance(part, (np.ndarray, Tensor)):
            raise BsamTypeError(f"{name} must be a tuple (x, *targets) or a dataset, got {type(part).__name__}")
        part = default_collate([part[i] for i in range(len(part))])
    tensors = tuple(_tensor(array) for array in part)
    if not tensors or len({len(array) for array in tensors}) > 1 or not len(tensors[0]):
        lengths = ", ".join(str(len(array)) for array in tensors)
        raise BsamValueError(f"{name} must have arrays of the same length, at least 1; got lengths {lengths}")
    return tensors


def _tensor(array: Any) -> Tensor:
    if isinstance(array, np.ndarray) and not array.flags.writeable:
        array = np.array(array)  # torch warns of those that cannot be changed
    tensor = torch.as_tensor(array).cpu()
    return tensor.float() if tensor.dtype == torch.float64 else tensor


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
