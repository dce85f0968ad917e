"""Settings of one training run."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from typing import Any, Literal

from ...common.checks import check_count, check_radius, is_number
from ...common.errors import BsamValueError
from ...methods import METHODS
from ..common.methods import Method, is_own, known_method, method_class, title_of_method
from ..common.names import find_name, name_of
from ..data.timm_augment import TimmAugment, is_timm
from ..tasks import TASKS, task_class
from ..tasks.classification_settings import ClassificationSettings
from ..tasks.settings import MAX_SEED as MAX_SEED
from ..tasks.settings import (
    NOT_NEGATIVE,
    SubjectSettings,
    TaskSettings,
    check_positive,
    one_of,
    setting,
    to_json_value,
)
from .bases import BASES, CAPTURABLE, check_base_arguments, find_base, parameters_of

Schedule = Literal["cosine", "constant"]
Precision = Literal["fp32", "bf16", "fp16"]
Decay = Literal["all", "weights"]
BASE = "base"  # the method name for the base optimizer alone
RADIUS_SCHEDULE = ("rho_warmup", "rho_start")  # settings of a run that only methods with a radius take
# the task that each setting of a task belongs to
OWNERS = {item.name: name for name, task in TASKS.items() for item in fields(task.settings_type)}


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
class Run(SubjectSettings):
    """Settings of one training run. Those of the task are in ``task``; :meth:`of` takes all of them side by side.

    The defaults are the paper's for CIFAR-10, except the network (digits_net) and the data (digits); ``bsam train`` and
    ``bsam compare`` have other ones for AdamW, pose, quantization and fine-tuning. On the same CPU, equal settings give
    equal numbers. The method ``"base"`` is the base optimizer alone; ``"sgd"`` is another name for it when the base is
    SGD. ``bsam train --help`` explains each setting.

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
            "group": "Method",
        }
    )
    arguments: Mapping[str, Any] = field(
        default_factory=dict,
        hash=False,
        metadata={
            "help": "arguments of the method, for example rho_max=0.1 passes=2 beta=[1,1,1]",
            "group": "Method",
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
    task: TaskSettings = setting(ClassificationSettings(), f"the task, one of {', '.join(TASKS)}", "Model", _check_task)
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
            "group": "Optimization",
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
    radius: float | None = setting(
        None,
        "measure the sharpness on the training set at this radius after every epoch; default: never",
        "Measurement",
        check_radius,
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
        for name in ("method", "model"):
            if not isinstance(getattr(self, name), str):
                object.__setattr__(self, name, name_of(getattr(self, name), name))
        super().__post_init__()
        object.__setattr__(self, "base", find_base(self.base))
        self._check_method()
        if self.momentum >= 1:
            raise BsamValueError(f"momentum must be below 1, got {self.momentum}")
        if self.momentum != Run.momentum and not {"momentum", "betas"} & set(parameters_of(self.base)):
            raise BsamValueError(f"momentum has no effect with base {self.base}, which has none: leave it out")
        check_base_arguments(self.base, self.base_arguments)
        if self.nesterov and (self.base != "sgd" or not self.momentum):
            raise BsamValueError(
                f"nesterov needs base sgd and a momentum above 0; got base {self.base} and momentum {self.momentum}"
            )
        if self.head_lr is not None and not self.lr:
            raise BsamValueError(f"head_lr is {self.head_lr} but lr is 0: to train only the head, set freeze_backbone")
        if self.batch % self.accumulate:
            raise BsamValueError(f"accumulate must divide the batch of {self.batch} samples, got {self.accumulate}")
        if is_timm(self.augment) and TimmAugment.named(str(self.augment)).mixes and self.batch % 2:
            raise BsamValueError(f"mixup and cutmix need an even batch, got {self.batch}")
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

    def _check_method(self) -> None:
        if not is_own(self.method):
            object.__setattr__(self, "method", find_name("method", self.method, (BASE, "sgd", *METHODS)))
        if self.method == "sgd":
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
        task: str | type[TaskSettings] = ClassificationSettings,
        **settings: Any,
    ) -> Run:
        """Return the run with these settings, those of the task included; ``task`` is its name, or the class of its
        settings.

        Example:
            >>> Run.of("base", task="pose", base="adam", flip_test=True).task
            PoseSettings(simcc_k=2.0, simcc_sigma=6.0, flip_test=True)
        """
        kind = task if isinstance(task, type) and issubclass(task, TaskSettings) else task_class(task).settings_type
        task_names = [item.name for item in fields(kind)]
        known = [*(item.name for item in fields(cls)), *task_names]
        for name in [name for name in settings if name not in known]:
            if name in OWNERS:
                raise BsamValueError(
                    f"{name} is a setting of {OWNERS[name]}, but the task is {kind.name}: leave it out or change the "
                    "task"
                )
            if (valid := find_name("setting", name, known)) in settings:
                raise BsamValueError(f"{valid} is given twice, also as {name}: give it once")
            settings[valid] = settings.pop(name)
        of_task = kind(**{name: settings.pop(name) for name in task_names if name in settings})
        name = method if isinstance(method, str) else name_of(method, "method")
        return cls(name, {} if arguments is None else arguments, task=of_task, **settings)

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
