"""Settings of one training run."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from ..common.checks import check_count, check_number, check_radius
from ..common.errors import BsamValueError
from ..methods import METHODS
from ..tasks import TASKS
from ..tasks.classification_settings import FINE_TUNING as FINE_TUNING
from ..tasks.classification_settings import QUANTIZED as QUANTIZED
from ..tasks.classification_settings import ClassificationSettings
from ..tasks.pose_settings import POSE as POSE
from ..tasks.pose_settings import PoseSettings
from ..tasks.settings import MAX_SEED as MAX_SEED
from ..tasks.settings import check_flag, check_name, one_of, setting
from .names import find_name

Base = Literal["sgd", "adam", "adamw"]
Schedule = Literal["cosine", "constant"]
Precision = Literal["fp32", "bf16"]
BASE = "base"  # the method name for the base optimizer alone
BASE_TITLES: dict[str, str] = {"sgd": "SGD", "adam": "Adam", "adamw": "AdamW"}


def arguments_of(method: str) -> tuple[str, ...]:
    """Return the arguments of a method that a run can set; training supplies the others, such as base and model."""
    cls = METHODS[method]
    return tuple(name for name in inspect.signature(cls).parameters if name not in cls.set_by_training)


def _check_surface(name: str, value: object) -> None:
    count = check_count(name, value)
    if count < 3 or count % 2 == 0:
        raise BsamValueError(f"{name} must be at least 3, and odd so that the network is at the centre; got {count}")


@dataclass(frozen=True)
class Run(ClassificationSettings, PoseSettings):
    """Settings of one training run, including those of the tasks.

    The defaults are the paper's for CIFAR-10, except the network (digits_net) and the data (digits). On the same CPU,
    equal settings give equal numbers. The method ``"base"`` is the base optimizer alone; ``"sgd"`` is another name for
    it when the base is SGD. ``bsam train --help`` explains each setting.

    Example:
        >>> Run("sam", {"rho": 0.05}, lr=0.1, seed=3).method
        'sam'
        >>> Run("sgd") == Run("base", base="sgd")
        True
        >>> Run("sma")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        bsam.common.errors.BsamValueError: method must be ... 'sma'. Did you mean 'sam'?
    """

    method: str = field(
        metadata={
            "help": "a method from `bsam list methods`, case-insensitive; base or sgd for the base optimizer alone"
        }
    )
    arguments: Mapping[str, Any] = field(default_factory=dict, hash=False)
    _: KW_ONLY
    task: str = setting("classification", f"the task, one of {', '.join(TASKS)}", check_name)
    base: Base = setting("sgd", "the base optimizer, which takes the step", one_of(Base))
    lr: float = setting(0.05, "the learning rate at the start of the schedule", partial(check_number, low=0))
    schedule: Schedule = setting("cosine", "cosine lowers lr to 0, step by step; constant keeps it", one_of(Schedule))
    warmup: float = setting(
        0.0, "epochs over which the learning rate first rises linearly to lr", partial(check_number, low=0)
    )
    momentum: float = setting(0.9, "momentum of SGD, or the first beta of Adam", partial(check_number, low=0))
    nesterov: bool = setting(False, "use Nesterov momentum (SGD only)", check_flag)
    weight_decay: float = setting(1e-3, "weight decay of the base optimizer", partial(check_number, low=0))
    epochs: int = setting(200, "the number of epochs", check_count)
    batch: int = setting(128, "samples per step, over all processes; an incomplete last batch is dropped", check_count)
    precision: Precision = setting("fp32", "bf16 runs the network under autocast", one_of(Precision))
    compile: bool = setting(
        False,
        "compile the network with torch.compile, if that works. Compiled kernels round differently: after 20 steps in "
        "fp32, the weights differ from those of eager training by less than 2 % of the distance they have moved",
        check_flag,
    )
    capture: bool = setting(
        True,
        "capture the step in a CUDA graph, if possible: on one GPU, with most methods. Captured steps round "
        "differently: after 20 steps of a small classifier in fp32, the weights differ from those of eager training by "
        "less than 0.5 % of the distance they have moved, or 2 % with asam, gam, msam or Adam, which amplify rounding "
        "errors. For a small pose network with bsam and Adam, it is less than 15 % after 8 steps (7 % were measured)",
        check_flag,
    )
    probe: int | None = setting(
        None, "record sharpness and gradient norms every N steps (bsam.flatness.Probe); default: never", check_count
    )
    radius: float | None = setting(
        None,
        "measure the sharpness on the training set at this radius after every epoch; default: never",
        check_radius,
    )
    curvature: bool = setting(False, "compute the largest eigenvalue of the Hessian after the last epoch", check_flag)
    surface: int | None = setting(
        None, "compute a loss surface with N points along each axis after the last epoch; default: none", _check_surface
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_method()
        if self.momentum >= 1:
            raise BsamValueError(f"momentum must be below 1, got {self.momentum}")
        if self.nesterov and (self.base != "sgd" or not self.momentum):
            raise BsamValueError(
                f"nesterov needs base sgd and a momentum above 0; got base {self.base} and momentum {self.momentum}"
            )
        if self.head_lr is not None and not self.lr:
            raise BsamValueError(f"head_lr is {self.head_lr} but lr is 0: to train only the head, set freeze_backbone")
        if self.warmup > self.epochs:
            raise BsamValueError(f"warmup must be at most the {self.epochs} epochs of the run, got {self.warmup}")

    def _check_method(self) -> None:
        object.__setattr__(self, "method", find_name("method", self.method, (BASE, "sgd", *METHODS)))
        if self.method == "sgd":
            if self.base != "sgd":
                raise BsamValueError(f'method "sgd" is SGD alone, but base is {self.base}: set method to "base"')
            object.__setattr__(self, "method", BASE)
        if not isinstance(self.arguments, Mapping):
            raise BsamValueError(f"arguments must map names to values, such as {{'rho': 0.05}}; got {self.arguments!r}")
        if self.method == BASE and self.arguments:
            raise BsamValueError(f"the base optimizer alone takes no method arguments, got {self.arguments!r}")
        known = () if self.method == BASE else arguments_of(self.method)
        for name in self.arguments:
            if name not in known:
                raise BsamValueError(f"{self.method} has no argument {name!r}: it takes {', '.join(known)}")
        if self.probe is not None and (self.method == BASE or METHODS[self.method].is_loss):
            raise BsamValueError(
                f"probe needs a sharpness-aware optimizer, and {self.method} is not one. Leave probe out; to probe "
                "the base optimizer alone, use sam with rho=0"
            )

    def settings(self) -> dict[str, Any]:
        """Return all settings as JSON-serializable values; ``Run(**settings)`` gives an equal run."""
        return asdict(self)

    def learning_rate(self, step: int, steps_per_epoch: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        warmup_steps, total = round(self.warmup * steps_per_epoch), self.epochs * steps_per_epoch
        if step < warmup_steps:
            return self.lr * (step + 1) / warmup_steps
        if self.schedule == "constant":
            return self.lr
        return self.lr * (1 + math.cos(math.pi * (step - warmup_steps) / (total - warmup_steps))) / 2


def method_title(run: Run) -> str:
    """Return the title of a run's method for tables; the base optimizer's title if it runs alone."""
    return BASE_TITLES[run.base] if run.method == BASE else METHODS[run.method].title


def stored_run(settings: Mapping[str, Any]) -> Run:
    """Return the run with stored settings. Runs stored without ``noise_labels`` drew labels from the other classes."""
    before = {"noise_labels": "other"} if settings.get("label_noise") else {}
    return Run(**{**before, **settings})


def check_settings(folder: Path, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Raise if a folder holds results with other settings."""
    differing = [
        f"{name} {theirs.get(name)} there, {ours.get(name)} here"
        for name in {**theirs, **ours}
        if theirs.get(name) != ours.get(name)
    ]
    if differing:
        differences = "; ".join(differing)
        raise BsamValueError(
            f"{folder} holds results with other settings ({differences}): use the same settings, choose another "
            "folder, or remove that one"
        )
