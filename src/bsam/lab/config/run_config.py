"""Settings of one training run."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, MISSING, Field, dataclass, field, fields, replace
from functools import partial
from typing import Any, Literal, TypeVar

from ...common.checks import check_count, check_radius, is_number
from ...common.errors import BsamValueError
from ...methods import METHODS
from ..common.methods import Method, is_own, known_method, method_class, title_of_method
from ..common.names import find_name, name_of
from .bases import BASES, CAPTURABLE, check_base_arguments, find_base, parameters_of
from .presets import SHARED, RecordsGiven, given_values
from .settings import MAX_SEED, NOT_NEGATIVE, SHARE, Split, check_name, check_positive, check_values, one_of, setting
from .settings import to_json_value as to_json_value
from .task_settings import TASK_SETTINGS, ClassificationSettings, TaskSettings, is_own_task, settings_of_task

Schedule = Literal["cosine", "constant"]
Precision = Literal["fp32", "bf16", "fp16"]
Decay = Literal["all", "weights"]
TaskSettingsT = TypeVar("TaskSettingsT", bound=TaskSettings)
BASE = "base"  # the method name for the base optimizer alone
SGD = "sgd"  # another one, if the base optimizer is SGD
RADIUS_SCHEDULE = ("rho_warmup", "rho_start")  # settings of a run that only methods with a radius take


def arguments_of(method: str) -> tuple[str, ...]:
    """Return the arguments of a method that a run can set; training supplies the others, such as base and model."""
    cls = method_class(method)
    return tuple(name for name in inspect.signature(cls).parameters if name not in cls.set_by_training)


def _check_decay(name: str, value: object) -> None:
    if not is_number(value) or not 0 < value < 1:  # type: ignore[operator]
        raise BsamValueError(f"{name} must be a number above 0 and below 1, got {value!r}")


def _check_surface(name: str, value: object) -> None:
    count = check_count(name, value)
    if count < 3 or count % 2 == 0:
        raise BsamValueError(f"{name} must be at least 3, and odd so that the network is at the centre; got {count}")


def _check_task(name: str, value: object) -> None:
    if not isinstance(value, TaskSettings) or not hasattr(value, "name"):
        raise BsamValueError(
            f"{name} must be the settings of a task with a name, such as ClassificationSettings(), got {value!r}: to "
            "give the name alone, use Run.of"
        )
    if both := {item.name for item in fields(value)} & {item.name for item in fields(Run)}:
        raise BsamValueError(f"{min(both)} of {type(value).__name__} is also a setting of Run: choose another name")


@dataclass(frozen=True)
class Run(RecordsGiven):
    """Settings of one training run. Those of the task are in ``task``; :meth:`of` takes all of them side by side.

    The defaults are the paper's for CIFAR-10, except the network (digits_net) and the data (digits). Presets replace
    the defaults for AdamW, pose, quantization and pretrained weights; a value that you give always wins. On the same
    CPU, equal settings give equal numbers. The method ``"base"`` is the base optimizer alone; ``"sgd"`` is another name
    for it when the base is SGD. ``bsam train --help`` explains each setting.

    Example:
        >>> Run("sam", {"rho": 0.05}, lr=0.1, seed=3).method
        'sam'
        >>> Run("sgd") == Run("base", base="sgd")
        True
        >>> run = Run("sam", task=ClassificationSettings(label_noise=0.4), lr=0.1)
        >>> run == Run.of("sam", label_noise=0.4, lr=0.1)
        True
        >>> Run("sma")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        bsam.common.errors.BsamValueError: method must be ... 'sma'. Did you mean 'sam'?
    """

    method: str = field(
        metadata={
            "help": "a method from `bsam list methods`, case-insensitive; base or sgd for the base optimizer alone",
            "heading": "Method",
        }
    )
    arguments: Mapping[str, Any] = field(
        default_factory=dict,
        hash=False,
        metadata={
            "help": "arguments of the method, for example rho_max=0.1 passes=2 beta=[1,1,1]",
            "heading": "Method",
            "flag": "--set",
        },
    )
    _: KW_ONLY
    rho_warmup: float = setting(
        0.0,
        "epochs over which the radii rise linearly from 0, which forgives radii that are too large",
        "Method",
        NOT_NEGATIVE,
    )
    rho_start: float = setting(
        0.0,
        "epochs of the base optimizer alone before the method starts, with one pass per step",
        "Method",
        NOT_NEGATIVE,
    )
    task: TaskSettings = setting(
        ClassificationSettings(),
        f"the task, one of {', '.join(TASK_SETTINGS)}, or MODULE:CLASS for one of your own",
        "Model",
        _check_task,
    )
    model: str = setting("digits_net", "a network from `bsam list models`, or timm:NAME for one from timm", "Model")
    weights: str | None = setting(
        None,
        "initial weights: a file (safetensors or a state dict), which may be in the data folder, or `pretrained`, "
        "which timm downloads. The last layers (the classification layer, or the pose head) always begin with random "
        "weights",
        "Model",
        check_name,
    )
    init: str | None = setting(
        None,
        "the folder of a finished run with the same network; training begins with its weights, including the last "
        "layers",
        "Model",
        check_name,
    )
    freeze_backbone: bool = setting(
        False, "train only the last layers (see --weights); batch norm before them is in eval mode", "Model"
    )
    data: str = setting(
        "digits",
        "a data set from `bsam list data`; folder:PATH for your own images, with one folder per class; or "
        "MODULE:FUNCTION for your own function that returns the data, in a module that is installed or in the current "
        "folder",
        "Data",
    )
    image_size: int | None = setting(
        None,
        "the side to resize images to, in pixels; default: the size that the network was pretrained with, if any",
        "Data",
        check_count,
        timm=["--img-size"],
    )
    skip_corrupt: bool = setting(
        False,
        "leave out image files that cannot be decoded, and persons whose box is outside the image, and list them in "
        "data.json, instead of raising an error",
        "Data",
    )
    augment: str | None = setting(
        None,
        "none, crop-flip, crop-flip-cutout, resized-crop-flip; for pose none, scale-rotate, scale-rotate-flip; "
        "timm:aa=rand-m9-mstd0.5-inc1,mixup=0.8,cutmix=1, or some of these three, for crops and flips followed by "
        "timm's RandAugment, Mixup and CutMix. resized-crop-flip is RandomResizedCrop and flips, for photographs; "
        "crop-flip shifts by at most 4 pixels, for small images",
        "Data",
        check_name,
    )
    limit_train: int | None = setting(
        None,
        "train on this many samples, balanced over the classes, or evenly spaced for pose; default: all",
        "Data",
        check_count,
    )
    limit_test: int | None = setting(
        None,
        "evaluate on this many samples, balanced over the classes, or evenly spaced for pose; default: all",
        "Data",
        check_count,
    )
    eval_split: Split = setting(
        "test",
        "the data to evaluate on. holdout is a fifth of the training samples, at least 200 but at most half of them, "
        "which are then not used for training; with --label-noise, some of their labels are wrong, too. Choose "
        "settings on validation or holdout, not on test",
        "Data",
        one_of(Split),
    )
    base: str = setting(
        "sgd",
        f"the base optimizer, which takes the step, from torch.optim: {', '.join(BASES)}",
        "Optimization",
        timm=["--optimizer", "--opt"],
    )
    base_arguments: Mapping[str, Any] = field(
        default_factory=dict,
        hash=False,
        metadata={
            "help": "further arguments of the base optimizer, for example eps=1e-6 or betas=[0.9,0.99], which takes "
            "precedence over --momentum",
            "heading": "Optimization",
            "flag": "--base-set",
        },
    )
    lr: float = setting(0.05, "the learning rate at the start of the schedule", "Optimization", NOT_NEGATIVE)
    schedule: Schedule = setting(
        "cosine", "cosine lowers lr to 0, step by step; constant keeps it", "Optimization", one_of(Schedule)
    )
    warmup: float = setting(
        0.0,
        "epochs over which the learning rate first rises linearly to lr",
        "Optimization",
        NOT_NEGATIVE,
        ["--warmup-epochs"],
    )
    momentum: float = setting(
        0.9,
        "momentum of SGD and RMSprop, or the first beta of Adam and its variants; the other optimizers have none",
        "Optimization",
        NOT_NEGATIVE,
    )
    nesterov: bool = setting(False, "use Nesterov momentum (SGD only)", "Optimization")
    weight_decay: float = setting(1e-3, "weight decay of the base optimizer", "Optimization", NOT_NEGATIVE)
    decay: Decay = setting(
        "all",
        "the parameters with weight decay: all of them, or, as in timm, only weights: not biases, normalization "
        "layers and embeddings, which include the position embeddings and class tokens of transformers",
        "Optimization",
        one_of(Decay),
    )
    epochs: int = setting(200, "the number of epochs", "Optimization")
    batch: int = setting(
        128,
        "samples per step, over all processes; an incomplete last batch is dropped",
        "Optimization",
        timm=["--batch-size"],
    )
    accumulate: int = setting(
        1,
        "split each batch into this many micro-batches, one after the other, to save memory. Every pass of a step runs "
        "over all of them, so the step is that of the whole batch, except for the statistics of batch norm",
        "Optimization",
    )
    clip_norm: float | None = setting(
        None,
        "before each step, scale the method's direction down to this norm if it is longer; default: never",
        "Optimization",
        check_positive,
        ["--clip-grad"],
    )
    ema: float | None = setting(
        None,
        "evaluate and save the average of the weights after all steps, in which each step counts this factor times as "
        "much as the next one, for example 0.999. Buffers, such as the statistics of batch norm, are averaged, too. "
        "Training itself does not change; default: evaluate and save the last weights",
        "Optimization",
        _check_decay,
        ["--model-ema-decay"],
    )
    head_lr: float | None = setting(
        None,
        "the learning rate of the last layers at the start of the schedule; default: lr",
        "Optimization",
        NOT_NEGATIVE,
    )
    layer_decay: float = setting(
        1.0,
        "each layer's learning rate is this factor times that of the next layer; 1 gives all layers the same rate; "
        "timm networks only",
        "Optimization",
        SHARE,
    )
    seed: int = setting(
        0,
        "seed of the initial weights, the order of the samples, their augmentation and the label noise",
        "Optimization",
        partial(check_count, low=0, high=MAX_SEED),
    )
    precision: Precision = setting(
        "fp32",
        "bf16 and fp16 run the network under autocast; fp16, which is for GPUs and slow on a CPU, also scales the loss "
        "with torch's GradScaler",
        "Precision and speed",
        one_of(Precision),
    )
    compile: bool = setting(
        False,
        "compile the network with torch.compile, if that works. Compiled kernels round differently: after 20 steps in "
        "fp32, the weights differ from those of eager training by less than 2 % of the distance they have moved",
        "Precision and speed",
    )
    capture: bool = setting(
        True,
        "capture the step in a CUDA graph, if possible: on one GPU, with most methods, the base optimizers "
        f"{', '.join(CAPTURABLE)}, and fp32 or bf16. Captured steps round "
        "differently: after 20 steps of a small classifier in fp32, the weights differ from those of eager training by "
        "less than 0.5 % of the distance they have moved, or 2 % with asam, gam, msam or Adam, which amplify rounding "
        "errors. For a small pose network with bsam and Adam, it is less than 15 % after 8 steps (7 % were measured)",
        "Precision and speed",
    )
    probe: int | None = setting(
        None,
        "record sharpness and gradient norms every N steps (bsam.flatness.Probe); default: never",
        "Measurement",
        check_count,
    )
    sharpness_rho: float | None = setting(
        None,
        "measure the sharpness on the training set at this radius after every epoch; default: never",
        "Measurement",
        check_radius,
        digest="radius",
    )
    curvature: bool = setting(
        False, "compute the largest eigenvalue of the Hessian after the last epoch", "Measurement"
    )
    surface: int | None = setting(
        None,
        "compute a loss surface with N points along each axis after the last epoch; default: none",
        "Measurement",
        _check_surface,
    )

    def __post_init__(self) -> None:
        _check_task("task", self.task)
        for name in ("method", "model"):
            if not isinstance(getattr(self, name), str):
                object.__setattr__(self, name, name_of(getattr(self, name), name))
        self._apply_presets()
        object.__setattr__(self, "base", find_base(self.base))
        check_values(self)
        self._check_method()
        self._check_start()
        if self.momentum >= 1:
            raise BsamValueError(f"momentum must be below 1, got {self.momentum}")
        if self.momentum != Run.momentum and not {"momentum", "betas"} & set(parameters_of(self.base)):
            raise BsamValueError(f"momentum has no effect with base {self.base}, which has none: leave it out")
        check_base_arguments(self.base, self.base_arguments)
        self._check_own_task()
        if self.nesterov and (self.base != "sgd" or not self.momentum):
            raise BsamValueError(
                f"nesterov needs base sgd and a momentum above 0; got base {self.base} and momentum {self.momentum}"
            )
        if self.head_lr is not None and not self.lr:
            raise BsamValueError(f"head_lr is {self.head_lr} but lr is 0: to train only the head, set freeze_backbone")
        if self.batch % self.accumulate:
            raise BsamValueError(f"accumulate must divide the batch of {self.batch} samples, got {self.accumulate}")
        for name in ("warmup", *RADIUS_SCHEDULE):
            if getattr(self, name) > self.epochs:
                raise BsamValueError(
                    f"{name} must be at most the {self.epochs} epochs of the run, got {getattr(self, name)}"
                )
        if self.rho_start == self.epochs:
            raise BsamValueError(
                f"rho_start must be below the {self.epochs} epochs of the run, or no step is the method's"
            )
        if self.rho_start and self.rho_start + self.rho_warmup > self.epochs:
            raise BsamValueError(
                f"rho_start plus rho_warmup must be at most the {self.epochs} epochs, got {self.rho_start} plus "
                f"{self.rho_warmup}"
            )

    def _check_own_task(self) -> None:
        """Raise if the task is the user's and does not know the data or the network, or does not use a setting."""
        task, defaults = self.task, {item.name: item.default for item in fields(self)}
        for name, known, kind in (("data", task.datasets, "FUNCTION"), ("model", task.networks, "NAME")):
            value = getattr(self, name)
            if known and value not in known and ":" not in value:
                raise BsamValueError(
                    f"{name} of {task.name} must be one of {', '.join(known)}, MODULE:{kind}; got {value!r}"
                )
        for name in task.unused:
            if getattr(self, name) != defaults[name]:
                raise BsamValueError(f"{task.name} does not use {name}: leave it out")

    def _apply_presets(self) -> None:
        given = {**given_values(self), **given_values(self.task)}
        if str(self.method).lower() == SGD:
            given["base"] = self.base
        if "base" in given:
            given["base"] = find_base(given["base"])
        values = {name: value for name, value in preset_values(type(self.task), given).items() if name not in given}
        of_task = {item.name: values.pop(item.name) for item in fields(self.task) if item.name in values}
        for name, value in values.items():
            object.__setattr__(self, name, value)
        object.__setattr__(self, "task", replace(self.task, **of_task))  # which counts as given from now on

    def _check_start(self) -> None:
        if self.init is not None and self.weights is not None:
            raise BsamValueError("init and weights both set the initial weights: leave one of them out")
        only_last = "to train only the last layers, set freeze_backbone"
        for name, advice in (("head_lr", "leave it out to use lr"), ("layer_decay", only_last)):
            if getattr(self, name) == 0:
                raise BsamValueError(f"{name} must be above 0, got 0: {advice}")
        if self.freeze_backbone and self.layer_decay != 1:
            raise BsamValueError(
                f"freeze_backbone trains only the last layers, where layer_decay ({self.layer_decay}) has no effect: "
                "leave one of them out"
            )
        if self.task.weight_bits is not None and self.freeze_backbone:
            raise BsamValueError(
                "freeze_backbone cannot be used with quantization, which trains all layers: leave it out"
            )
        if self.task.weight_bits is not None and (self.head_lr is not None or self.layer_decay != 1):
            raise BsamValueError("head_lr and layer_decay cannot be used with quantization: leave them out")

    def _check_method(self) -> None:
        if not is_own(self.method):
            object.__setattr__(self, "method", find_name("method", self.method, (BASE, SGD, *METHODS)))
        if self.method == SGD:
            if self.base != "sgd":
                raise BsamValueError(f'method "sgd" is SGD alone, but base is {self.base}: set method to "base"')
            object.__setattr__(self, "method", BASE)
        if not isinstance(self.arguments, Mapping):
            raise BsamValueError(f"arguments must map names to values, such as {{'rho': 0.05}}; got {self.arguments!r}")
        if self.method == BASE and self.arguments:
            raise BsamValueError(f"the base optimizer alone takes no method arguments, got {self.arguments!r}")
        if is_own(self.method) and known_method(self.method) is None:
            return  # it is imported, and checked, when it trains: a stored run may be read without its module
        known = () if self.method == BASE else arguments_of(self.method)
        for name in self.arguments:
            if f"rho_{name}" in RADIUS_SCHEDULE:
                raise BsamValueError(f"arguments must not contain {name}: set rho_{name}, which counts epochs")
            if name not in known:
                raise BsamValueError(f"{self.method} has no argument {name!r}: it takes {', '.join(known)}")
        has_radius = self.method != BASE and not method_class(self.method).is_loss
        for name in RADIUS_SCHEDULE:
            if getattr(self, name) and not has_radius:
                raise BsamValueError(f"{name} needs a method with a radius, and {self.method} has none: leave it out")
        if self.probe is not None and not has_radius:
            raise BsamValueError(
                f"probe needs a sharpness-aware optimizer, and {self.method} is not one. Leave probe out; to probe "
                "the base optimizer alone, use sam with rho=0"
            )

    @classmethod
    def of(
        cls,
        method: str | Method,
        arguments: Mapping[str, Any] | None = None,
        *,
        task: str | type[Any] = ClassificationSettings,
        **settings: Any,
    ) -> Run:
        """Return the run with these settings, those of the task included; ``task`` is its name, its class, or the class
        of its settings.

        Example:
            >>> Run.of("base", task="pose", base="adam", flip_test=True).task
            PoseSettings(simcc_k=2.0, simcc_sigma=6.0, flip_test=True)
        """
        kind = _settings_type(task)
        task_names = [item.name for item in fields(kind)]
        known = [*(item.name for item in fields(cls)), *task_names]
        for name in [name for name in settings if name not in known]:
            for owner in TASK_SETTINGS.values():
                if name in [item.name for item in fields(owner)]:
                    raise BsamValueError(
                        f"{name} is a setting of {owner.name}, but the task is {kind.name}: leave it out or change the "
                        "task"
                    )
            if (valid := find_name("setting", name, known)) in settings:
                raise BsamValueError(f"{valid} is given twice, also as {name}: give it once")
            settings[valid] = settings.pop(name)
        of_task = kind(**{name: settings.pop(name) for name in task_names if name in settings})
        name = method if isinstance(method, str) else name_of(method, "method")
        return cls(name, {} if arguments is None else arguments, task=of_task, **settings)

    def task_settings(self, kind: type[TaskSettingsT]) -> TaskSettingsT:
        """Return the settings of the task; raise if they are those of another task."""
        if not isinstance(self.task, kind):
            raise BsamValueError(f"the run has settings of {self.task.name}: set its task to {kind.__name__}(...)")
        return self.task

    def settings(self) -> dict[str, Any]:
        """Return all settings as JSON-serializable values, ``task`` by name; ``Run.of(**settings)`` gives an equal run,
        unless the task is your own.
        """
        settings: dict[str, Any] = {}
        for item in fields(self):
            if item.name == "task":
                settings |= {part.name: to_json_value(getattr(self.task, part.name)) for part in fields(self.task)}
                settings["task"] = self.task.name
            else:
                settings[item.name] = to_json_value(getattr(self, item.name))
        return settings

    def changed(self, **settings: Any) -> Run:
        """Return a copy with other settings, those of the task included. For another task, use ``dataclasses.replace``.

        Example:
            >>> Run("sam").changed(label_noise=0.4, lr=0.1).task.label_noise
            0.4
        """
        return Run.of(**{**self.settings(), "task": type(self.task), **settings})

    def learning_rate(self, step: int, steps_per_epoch: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        warmup_steps, total = round(self.warmup * steps_per_epoch), self.epochs * steps_per_epoch
        if step < warmup_steps:
            return self.lr * (step + 1) / warmup_steps
        if self.schedule == "constant":
            return self.lr
        return self.lr * (1 + math.cos(math.pi * (step - warmup_steps) / (total - warmup_steps))) / 2


def _settings_type(task: object) -> type[TaskSettings]:
    if isinstance(task, type) and not issubclass(task, TaskSettings):
        kind = getattr(task, "settings_type", None)
        if not (isinstance(kind, type) and issubclass(kind, TaskSettings)):
            raise BsamValueError(
                f"task must be a class derived from bsam.lab.Task, got {task.__name__}: check the name"
            )
        if not hasattr(kind, "name"):
            name_of(task, "task")  # raises, or the class would have one
        return kind
    return task if isinstance(task, type) else settings_of_task(task)


def imported(run: Run) -> Run:
    """Return a run that is about to train, after importing its method if it is a class of the user's, and checking the
    settings that this class decides.
    """
    if run.method == BASE or not is_own(run.method):
        return run
    method_class(run.method)
    return replace(run)


def method_title(run: Run) -> str:
    """Return the title of a run's method for tables; the base optimizer's title if it runs alone."""
    return BASES[run.base].__name__ if run.method == BASE else title_of_method(run.method)


def default_settings(task: type[TaskSettings]) -> dict[str, Any]:
    """Return the defaults of a run's settings, those of its task included, without presets.

    Example:
        >>> defaults = default_settings(ClassificationSettings)
        >>> defaults["lr"], defaults["label_smoothing"]
        (0.05, 0.1)
    """
    defaults: dict[str, Any] = {}
    for item in (*fields(Run), *fields(task)):
        if item.default_factory is not MISSING:
            defaults[item.name] = item.default_factory()
        elif item.default is not MISSING:
            defaults[item.name] = item.default
    return {**defaults, "method": BASE, "task": task.name}


def preset_values(task: type[TaskSettings], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults that follow from given settings: those of the task's presets, then those that all tasks
    share. Later ones win; their conditions are compared with what is given or set so far.

    Example:
        >>> preset_values(ClassificationSettings, {"base": "adamw"})
        {'lr': 0.001, 'weight_decay': 0.05, 'decay': 'weights'}
    """
    defaults = default_settings(task)
    values: dict[str, Any] = {}
    of_user = task.presets if is_own_task(task.name) else ()  # again: what a user says wins
    for preset in (*task.presets, *SHARED, *of_user):
        for name in (*preset.when, *preset.values):
            if name not in defaults:
                raise BsamValueError(f"a preset of {task.__name__} names {name}, which is no setting: correct it")
        if preset.applies({**defaults, **values, **given}):
            values |= preset.values
    return values


def settings_by_heading(task: str | None = None) -> dict[str, list[Field[Any]]]:
    """Return the fields of all settings by the heading of their flags; those of the tasks come last, but measurements
    are the last heading.

    Args:
        task: a task of the user, whose settings are then those of the only task.
    """
    listed: dict[str, list[Field[Any]]] = {}
    for item in fields(Run):
        listed.setdefault(item.metadata["heading"], []).append(item)
    *first, last = listed
    for kind in TASK_SETTINGS.values() if task is None else (settings_of_task(task),):
        for item in fields(kind):
            listed.setdefault(item.metadata["heading"], []).append(item)
    of_tasks = sorted(listed.keys() - {*first, last})
    return {heading: listed[heading] for heading in (*first, *of_tasks, last)}
