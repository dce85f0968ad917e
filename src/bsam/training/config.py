"""What a run is."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from ..core.checks import check_count, check_number, check_radius
from ..core.errors import BsamValueError
from ..methods import METHODS

Base = Literal["sgd", "adam", "adamw"]
Schedule = Literal["cosine", "constant"]
Precision = Literal["fp32", "bf16"]
Split = Literal["validation", "test"]
MOST_SEED = 2**63 - 1  # numpy takes larger ones, torch does not
_CHOICES: dict[str, Any] = {"base": Base, "schedule": Schedule, "precision": Precision, "eval_split": Split}


def arguments_of(method: str) -> tuple[str, ...]:
    """The arguments of a method that a run may set; the rest (base, model ...) it gets from the run.

    Example:
        >>> arguments_of("asam")
        ('rho', 'eta', 'm_sharpness', 'same_draws')
    """
    cls = METHODS[method].cls
    return tuple(name for name in inspect.signature(cls).parameters if name not in cls.set_by_training)


@dataclass(frozen=True)
class Run:
    """The settings of one training run: two runs with equal settings give equal numbers on one machine. The defaults
    are the paper's for CIFAR-10.

    Args:
        method: ``"sgd"`` is the base optimizer alone; else a name of :data:`bsam.methods.METHODS`, around the base
            optimizer.
        arguments: of the method, by name.
        task: what is learned, a name of :data:`bsam.training.loop.TASKS`.
        model: a name of :data:`bsam.models.MODELS`.
        data: a name of :data:`bsam.data.DATASETS`.
        augment: a name of :data:`bsam.data.augment.AUGMENTATIONS`; None takes the data set's own.
        base: the optimizer that takes the step.
        lr: the learning rate, from which the schedule leads down to 0, step by step.
        schedule: cosine or constant.
        warmup: epochs in which the learning rate first rises to ``lr``, in a straight line.
        momentum: of SGD; of Adam, its first beta.
        nesterov: whether SGD's momentum is Nesterov's.
        weight_decay: of the base optimizer.
        epochs: how many.
        batch: samples a step, of all processes together; a remainder of the epoch that does not fill a batch is left
            out.
        label_smoothing: the probability that the other classes share.
        label_noise: the share of the training labels that is flipped.
        limit_train: train on so many samples, as evenly from all classes as can be; None: on all.
        limit_test: judge on so many, likewise; None: on all.
        precision: bf16 runs the network under autocast.
        compile: whether the network goes through ``torch.compile``, where that works. Its kernels round otherwise:
            after 20 steps in fp32 the weights are off those of plain steps by less than 2 % of the way that they went.
        capture: whether a step becomes a CUDA graph, where that works: on one GPU, with methods whose steps are all
            alike. After 20 steps in fp32 the weights are off those of plain steps by less than 0.5 % of the way that
            they went; with asam, gam, msam or Adam, which carry rounding further, 2 %.
        seed: of the initial weights, the order of the samples, their augmentation and the flipped labels.
        eval_split: the set that the network is judged on; a run that helps to choose settings never sees the test set.
        probe: read sharpness and gradients every so many steps, by :class:`bsam.flatness.Probe`; None reads none.
        radius: at which the sharpness on the whole training set is measured after every epoch; None measures none.
        curvature: whether the largest eigenvalue of the Hessian is taken after the last epoch.
        relief: the points along each axis of a landscape that is taken after the last epoch; None takes none.

    Example:
        >>> Run("sam", {"rho": 0.05}, lr=0.1, seed=3).method
        'sam'
        >>> Run("sma")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        bsam.core.errors.BsamValueError: method must be one of sgd, sam, ...; got 'sma'
    """

    method: str
    arguments: Mapping[str, Any] = field(default_factory=dict, hash=False)
    task: str = "classification"
    model: str = "digits_net"
    data: str = "digits"
    augment: str | None = None
    base: Base = "sgd"
    lr: float = 0.05
    schedule: Schedule = "cosine"
    warmup: float = 0.0
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 1e-3
    epochs: int = 200
    batch: int = 128
    label_smoothing: float = 0.1
    label_noise: float = 0.0
    limit_train: int | None = None
    limit_test: int | None = None
    precision: Precision = "fp32"
    compile: bool = False
    capture: bool = True
    seed: int = 0
    eval_split: Split = "test"
    probe: int | None = None
    radius: float | None = None
    curvature: bool = False
    relief: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.arguments, Mapping):
            raise BsamValueError(
                f"arguments must be those of the method, by name, as {{'rho': 0.05}}; got {self.arguments!r}"
            )
        for item in fields(self):
            object.__setattr__(
                self, item.name, _plain(getattr(self, item.name))
            )  # a copy: the caller's arguments may change later
        names = ("sgd", *METHODS)
        if self.method not in names:
            raise BsamValueError(f"method must be one of {', '.join(names)}; got {self.method!r}")
        if self.method == "sgd" and self.arguments:
            raise BsamValueError(f"sgd takes no arguments of a method, got {self.arguments!r}")
        known = () if self.method == "sgd" else arguments_of(self.method)
        for name, value in self.arguments.items():
            if name not in known:
                raise BsamValueError(f"{self.method} has no argument {name!r}: it takes {', '.join(known)}")
            if not _is_json(value):
                raise BsamValueError(
                    f"{name} must be a number, a text, or a list of them, so that the settings can be written down; "
                    f"got {value!r}"
                )
        for name in ("task", "model", "data", "augment"):
            value = getattr(self, name)
            if not (isinstance(value, str) and value) and (name, value) != ("augment", None):
                raise BsamValueError(f"{name} must be a name, got {value!r}")
        if self.probe is not None and self.method == "sgd":
            raise BsamValueError(
                "the probe looks at the passes of a sharpness-aware method, and sgd is none: leave probe out, or take "
                "sam with rho=0, which is sgd"
            )
        if self.probe is not None and METHODS[self.method].is_loss:
            raise BsamValueError(
                f"the probe looks at the passes of a sharpness-aware method, and {self.method} is a loss: leave probe "
                "out"
            )
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in get_args(choices):
                raise BsamValueError(
                    f"{name} must be one of {', '.join(get_args(choices))}; got {getattr(self, name)!r}"
                )
        for name in ("epochs", "batch"):
            check_count(name, getattr(self, name))
        for name in ("limit_train", "limit_test", "probe", "relief"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name))
        check_count("seed", self.seed, low=0, high=MOST_SEED)
        for name in ("lr", "momentum", "weight_decay", "warmup"):
            check_number(name, getattr(self, name), low=0)
        for name in ("label_smoothing", "label_noise"):
            check_number(name, getattr(self, name), low=0, high=1)
        for name in ("nesterov", "compile", "capture", "curvature"):
            if not isinstance(getattr(self, name), bool):
                raise BsamValueError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if self.momentum >= 1:
            raise BsamValueError(f"momentum must be below 1, got {self.momentum}")
        if self.nesterov and (self.base != "sgd" or not self.momentum):
            raise BsamValueError(
                f"nesterov is a kind of SGD's momentum, and here base is {self.base} with momentum {self.momentum}: "
                "leave it out"
            )
        if self.warmup > self.epochs:
            raise BsamValueError(f"warmup must be at most the {self.epochs} epochs of the run, got {self.warmup}")
        if self.radius is not None:
            check_radius("radius", self.radius)
        if self.relief is not None and (self.relief < 3 or self.relief % 2 == 0):  # now, not after the last epoch
            raise BsamValueError(f"relief must be 3, 5, 7 ..., so that the network is at the centre; got {self.relief}")

    def settings(self) -> dict[str, Any]:
        """All of it as plain values, for JSON."""
        return asdict(self)

    def learning_rate(self, step: int, steps_per_epoch: int) -> float:
        """The learning rate of a step, counted from 0.

        Example:
            >>> run = Run("sgd", lr=0.1, epochs=10, warmup=1)
            >>> [round(run.learning_rate(step, steps_per_epoch=4), 4) for step in (0, 3, 4, 22, 39)]
            [0.025, 0.1, 0.1, 0.05, 0.0002]
        """
        rise, total = round(self.warmup * steps_per_epoch), self.epochs * steps_per_epoch
        if step < rise:
            return self.lr * (step + 1) / rise
        if self.schedule == "constant":
            return self.lr
        return self.lr * (1 + math.cos(math.pi * (step - rise) / (total - rise))) / 2


def _plain(value: Any) -> Any:
    """Numpy's numbers as Python's, also inside of lists and mappings."""
    if isinstance(value, (np.generic, np.ndarray)):
        return value.tolist()
    if isinstance(value, Mapping):
        return {name: _plain(one) for name, one in value.items()}
    return type(value)(map(_plain, value)) if type(value) in (list, tuple) else value


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


def check_settings(folder: Path, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Refuse a folder whose numbers came about under other settings.

    Example:
        >>> check_settings(Path("runs/demo"), {"epochs": 2}, {"epochs": 3})
        Traceback (most recent call last):
        ...
        bsam.core.errors.BsamValueError: runs/demo holds results with other settings (epochs 2 there, 3 here): choose
        another folder, or remove that one
    """
    differing = [
        f"{name} {theirs.get(name)} there, {ours.get(name)} here"
        for name in {**theirs, **ours}
        if theirs.get(name) != ours.get(name)
    ]
    if differing:
        raise BsamValueError(
            f"{folder} holds results with other settings ({'; '.join(differing)}): choose another folder, or remove "
            "that one"
        )
