"""Every setting of a run: its default, its help and its check. Data, models and tasks read settings, so this module is
below them.

In this order:

- how a setting is declared: :func:`setting`, and checks of values;
- presets, which are defaults that follow from other settings: :class:`Preset`;
- the base optimizers, which are those of torch.optim: :data:`BASES`;
- the methods: those of bsam, and classes of the user: :func:`method_class`;
- the settings of the tasks: :class:`TaskSettings` and its subclasses;
- the settings of a run: :class:`Run`, and the defaults, presets and help of all settings;
- the digest of a run's settings, which ends the name of its directory: :func:`digest`.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, MISSING, Field, dataclass, field, fields, make_dataclass, replace
from functools import cache, partial
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Final,
    Literal,
    Self,
    TypeAlias,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
)

import numpy as np
import torch
from torch.optim import Optimizer

from ..common.checks import check_count, check_flag, check_number, check_radius, is_number
from ..common.errors import BsamValueError
from ..core.optimizer import SharpnessAware
from ..methods import METHODS
from ..methods.distillation import Distillation
from .common.names import OWN_CLASS, find_name, find_object, is_own, known_object, name_of

if TYPE_CHECKING:
    pass

T = TypeVar("T")
Check: TypeAlias = Callable[[str, Any], object]
Split = Literal["validation", "holdout", "test"]
MAX_SEED = 2**63 - 1  # seeds are stored as 64-bit integers

NOT_NEGATIVE: Check = partial(check_number, low=0)
SHARE: Check = partial(check_number, low=0, high=1)


def setting(
    default: T,
    help: str,
    heading: str = "Task",
    check: Check | None = None,
    timm: Sequence[str] = (),
    digest: str | None = None,
) -> T:
    """Declare a dataclass field.

    Args:
        default: its default; None is not checked.
        help: the help text of its flag.
        heading: the heading of its flag.
        check: called with the name and the value; raises if the value is wrong. By default the value must be a name, a
            count, a number or a bool, as the default is.
        timm: its flags in timm's ``train.py``, which `bsam train` takes, too.
        digest: its name in the digest of a run, if the setting was renamed.

    Example:
        >>> from dataclasses import dataclass
        >>> from bsam.lab.config import TaskSettings
        >>> @dataclass(frozen=True, kw_only=True)
        ... class Settings(TaskSettings):
        ...     name = "segmentation"
        ...     width: int = setting(8, "channels of the first stage")
        >>> Settings(width=0)
        Traceback (most recent call last):
        ...
        bsam.common.errors.BsamValueError: width must be a whole number of at least 1, got 0
    """
    checks: dict[type, Check] = {str: check_name, int: check_count, float: check_number, bool: check_flag}
    metadata = {
        "help": help,
        "heading": heading,
        "check": check or checks.get(type(default)),
        "timm": timm,
        "digest": digest,
    }
    return field(default=default, metadata=metadata)


def check_name(name: str, value: object) -> None:
    """Raise unless the value is a non-empty string."""
    if not (isinstance(value, str) and value):
        raise BsamValueError(f"{name} must be a name, got {value!r}")


def check_positive(name: str, value: object, high: float = math.inf) -> None:
    """Raise unless the value is a finite number above 0 and at most ``high``."""
    if not is_number(value) or not 0 < value <= high:  # type: ignore[operator]
        most = "" if high == math.inf else f" and at most {high:g}"
        raise BsamValueError(f"{name} must be a finite number above 0{most}, got {value!r}")


def one_of(kind: Any) -> Check:
    """Return a check for the values of a ``Literal``."""

    def check(name: str, value: object) -> None:
        if value not in get_args(kind):
            raise BsamValueError(f"{name} must be one of {', '.join(get_args(kind))}; got {value!r}")

    return check


KINDS = (str, int, float, bool)


def kind_of(hint: Any) -> Any:
    """Return what the annotation of a setting allows besides None: str, int, float, bool or a ``Literal``; None for
    other annotations, which no flag and no file of a run can have.

    Example:
        >>> kind_of(int | None), kind_of(tuple)
        (<class 'int'>, None)
    """
    if get_origin(hint) in (types.UnionType, Union):
        parts = [part for part in get_args(hint) if part is not types.NoneType]
        hint = parts[0] if len(parts) == 1 else None
    return hint if hint in KINDS or get_origin(hint) is Literal else None


def to_json_value(value: Any) -> Any:
    """Return the value as JSON stores it: numpy numbers as Python numbers, tuples and arrays as lists, even nested."""
    if value is None or type(value) in (str, bool, int, float):  # most values; this is called often
        return value
    if isinstance(value, (np.generic, np.ndarray)):
        return value.tolist()
    if isinstance(value, Mapping):
        return {name: to_json_value(entry) for name, entry in value.items()}
    return [to_json_value(entry) for entry in value] if type(value) in (list, tuple) else value


# the fields of a dataclass: a plan makes hundreds of runs, and ``fields`` looks for them each time
fields_of = cast(Callable[[type[Any]], tuple[Field[Any], ...]], cache(fields))

SET: Final = object()  # in ``when``: any value except None


class Preset:
    """Defaults that follow from other settings.

    Args:
        when: the values of other settings with which it applies, by name; ``SET`` stands for any value except
            None. Without them, it always applies.
        words: when it applies, for help texts, such as "with quantization"; by default the values of ``when``.
        values: the defaults, by name.

    Example:
        >>> preset = Preset(when={"base": "adamw"}, lr=3e-3)
        >>> preset.applies({"base": "adamw"}), preset.applies({"base": "sgd"})
        (True, False)
    """

    def __init__(self, *, when: Mapping[str, Any] | None = None, words: str = "", **values: Any) -> None:
        self.when = dict(when or {})
        self.words = words or " and ".join(f"with {value}" for value in self.when.values())
        self.values = values

    def applies(self, settings: Mapping[str, Any]) -> bool:
        for name, value in self.when.items():
            actual = settings[name]
            if (actual is None) if value is SET else (actual != value):
                return False
        return True

    def to_json(self) -> dict[str, Any]:
        """Return it as plain values: ``set`` lists the conditions with any value except None."""
        plain = {name: to_json_value(value) for name, value in self.when.items() if value is not SET}
        others = [name for name, value in self.when.items() if value is SET]
        values = {name: to_json_value(value) for name, value in self.values.items()}
        return {"when": plain, "set": others, "words": self.words, "values": values}

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Preset:
        """Return the preset that :meth:`to_json` described.

        Example:
            >>> preset = Preset.from_json(Preset(when={"weights": SET}, epochs=3).to_json())
            >>> [preset.applies({"weights": weights}) for weights in ("resnet18", None)]
            [True, False]
        """
        when = {**stored["when"], **dict.fromkeys(stored["set"], SET)}
        return cls(when=when, words=stored["words"], **stored["values"])


# usual for transformers trained from scratch
ADAMW = Preset(when={"base": "adamw"}, lr=1e-3, weight_decay=0.05, decay="weights")
SHARED = (ADAMW,)  # for all tasks, after their own


class Settings:
    """A base class of frozen dataclasses with fields from :func:`setting`: they check the values, and remember which of
    them the caller gave.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Note the names of the arguments."""
        self = super().__new__(cls)
        positional = [item.name for item in fields_of(cls) if not item.kw_only]
        object.__setattr__(self, "_given", (*positional[: len(args)], *kwargs))
        return self

    def __post_init__(self) -> None:
        """Check the value of each field, and replace it by a copy in plain Python values."""
        for item in fields_of(type(self)):
            value = to_json_value(getattr(self, item.name))  # a copy: the caller's values may change later
            object.__setattr__(self, item.name, value)
            check = item.metadata.get("check")
            if check is not None and (value is not None or item.default is not None):
                check(item.name, value)


_OPTIMIZERS: dict[str, type[Optimizer]] = {
    name.lower(): cls
    for name, cls in vars(torch.optim).items()
    if isinstance(cls, type) and issubclass(cls, Optimizer) and cls is not Optimizer
}
UNUSABLE = {
    "lbfgs": "it evaluates the loss several times per step",
    "muon": "it takes only matrices, but networks have other parameters, too (in your own loop, use "
    "bsam.CombinedOptimizer)",
    "rprop": "it is made for gradients of the whole training set, and ignores the learning-rate schedule",
    "sparseadam": "it takes only sparse gradients, but those of the networks are dense",
}
BASES = {name: cls for name, cls in sorted(_OPTIMIZERS.items()) if name not in UNUSABLE}
# Steps of the others were not tested in a CUDA graph, or wait for the device.
CAPTURABLE = ("sgd", "adam", "adamw")
# Arguments that are settings of the run, and those that depend on the machine or that sharpness-aware steps exclude.
_SET_BY_RUN = ("lr", "momentum", "nesterov", "weight_decay")
_NOT_OFFERED = ("params", "foreach", "fused", "capturable", "maximize", "differentiable")


def find_base(name: object) -> str:
    """Return the name of a base optimizer in lower case; raise if there is none or it cannot train a network.

    Example:
        >>> find_base("RMSprop")
        'rmsprop'
    """
    if (lower := str(name).lower()) in UNUSABLE:
        raise BsamValueError(f"base must not be {lower}: {UNUSABLE[lower]}. Choose another, such as sgd or adamw")
    return find_name("base", name, BASES)


def check_base_arguments(base: str, arguments: object) -> None:
    """Raise unless the arguments are accepted by the base optimizer and are not settings of the run."""
    if not isinstance(arguments, Mapping):
        raise BsamValueError(f"base_arguments must map names to values, such as {{'eps': 1e-6}}; got {arguments!r}")
    parameters = inspect.signature(BASES[base]).parameters
    known = [name for name in parameters if name not in (*_SET_BY_RUN, *_NOT_OFFERED)]
    for name in arguments:
        if name in _SET_BY_RUN:
            raise BsamValueError(f"base_arguments must not contain {name}, which is a setting of the run: set {name}")
        if name not in known:
            raise BsamValueError(f"base {base} has no argument {name!r}: its base_arguments are {', '.join(known)}")
    if arguments:
        try:
            BASES[base]([torch.zeros(1)], **as_tuples(arguments))
        except (TypeError, ValueError, IndexError) as error:
            raise BsamValueError(f"base {base} does not take {dict(arguments)}: {error}") from error


def as_tuples(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments with tuples in place of lists, as which JSON stores them."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in arguments.items()}


NoiseLabels = Literal["all", "other"]
Quantizer = Literal["lsq", "minmax"]
_check_bits = partial(check_count, low=2, high=8)
MAX_BINS = 16  # of SimCC per pixel; the last layers grow with this number

# the paper's, for ResNet-50
FINE_TUNING = Preset(
    when={"weights": SET, "weight_bits": None},
    words="with pretrained weights",
    epochs=30,
    lr=0.01,
    weight_decay=1e-4,
    label_smoothing=0.0,
)
# rates as in FINE_TUNING: the paper does not give any
QUANTIZED = Preset(when={"weight_bits": SET}, words="with quantization", epochs=60, lr=0.01, weight_decay=1e-4)
# as SimCC's authors use for MPII, except for the schedule and the epochs: they train for 210
POSE = Preset(base="adam", batch=64, epochs=140)
POSE_WITH_ADAM = Preset(when={"base": "adam"}, lr=1e-3, weight_decay=0.0)


@dataclass(frozen=True)
class TaskSettings(Settings):
    """The settings of a task. Tasks add theirs in subclasses, and override the properties that apply."""

    name: ClassVar[str]  #: the name of the task
    presets: ClassVar[Sequence[Preset]] = ()  #: defaults that follow from other settings, of the run or of the task
    datasets: ClassVar[Sequence[str]] = ()  #: the data sets of a task of the user, by name
    networks: ClassVar[Sequence[str]] = ()  #: its networks, by name
    unused: ClassVar[Sequence[str]] = ()  #: settings of a run that it does not use

    @property
    def tag(self) -> str:
        """What the name of a run directory says of these settings."""
        return ""

    @property
    def cost(self) -> tuple[Any, ...]:
        """The settings that determine how long a pass over the data takes; by default all."""
        return tuple(repr(getattr(self, item.name)) for item in fields(self))

    def check_run(self, run: Run) -> None:
        """Raise if settings of the run cannot be used with these."""


@dataclass(frozen=True, kw_only=True)
class ClassificationSettings(TaskSettings):
    """The settings of classification."""

    name = "classification"
    presets = (FINE_TUNING, QUANTIZED)

    label_smoothing: float = setting(
        0.1, "label smoothing: the total probability of the other classes", "Optimization", SHARE, ["--smoothing"]
    )
    label_noise: float = setting(0.0, "the fraction of the training labels to draw at random", "Data", SHARE)
    noise_labels: NoiseLabels = setting(
        "all",
        "with --label-noise: draw from all classes, so that some labels stay right (with ten classes, 0.8 makes 72 % "
        "of the labels wrong), or only from the other classes (0.8 makes 80 % wrong)",
        "Data",
        one_of(NoiseLabels),
    )
    weight_bits: int | None = setting(
        None,
        "quantization-aware training with this many bits for the weights, 2 to 8; default: no quantization",
        "Quantization",
        _check_bits,
    )
    activation_bits: int | None = setting(
        None, "bits of the layer inputs, 2 to 8; default: the same as for weights", "Quantization", _check_bits
    )
    first_last_bits: int = setting(
        8, "bits of the weights and inputs of the first and the last layer", "Quantization", _check_bits
    )
    quantizer: Quantizer = setting(
        "lsq",
        "lsq learns the scales, minmax computes them from the smallest and the largest values",
        "Quantization",
        one_of(Quantizer),
    )
    fold_batch_norm: bool = setting(False, "first fold batch norm into the convolution before it", "Quantization")
    perturb_scales: bool = setting(False, "let a sharpness-aware step perturb the learned scales, too", "Quantization")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.noise_labels != ClassificationSettings.noise_labels and not self.label_noise:
            raise BsamValueError(
                f"noise_labels {self.noise_labels} has no effect without label noise: set label_noise, or leave it out"
            )
        if self.weight_bits is None:
            for name in ("activation_bits", "first_last_bits", "quantizer", "fold_batch_norm", "perturb_scales"):
                if getattr(self, name) != getattr(ClassificationSettings, name):
                    raise BsamValueError(f"{name} has no effect on a network that is not quantized: set weight_bits")
        if self.perturb_scales and self.quantizer != "lsq":
            raise BsamValueError(f"perturb_scales is for learned scales (quantizer lsq), got {self.quantizer}")

    @property
    def tag(self) -> str:
        """The label noise."""
        labels = "-all" if self.noise_labels == "all" else ""
        return f"noise{100 * self.label_noise:g}{labels}" if self.label_noise else ""

    @property
    def cost(self) -> tuple[Any, ...]:
        """The number of bits."""
        return (self.weight_bits,)

    def check_run(self, run: Run) -> None:
        """Raise if a run trains a part of a quantized network, or with several learning rates."""
        if self.weight_bits is None:
            return
        if run.freeze_backbone:
            raise BsamValueError(
                "freeze_backbone cannot be used with quantization, which trains all layers: leave it out"
            )
        if run.head_lr is not None or run.layer_decay != 1:
            raise BsamValueError("head_lr and layer_decay cannot be used with quantization: leave them out")


@dataclass(frozen=True, kw_only=True)
class PoseSettings(TaskSettings):
    """The settings of pose estimation."""

    name = "pose"
    presets = (POSE, POSE_WITH_ADAM)

    simcc_k: float = setting(
        2.0, f"number of SimCC bins per pixel, at most {MAX_BINS}", "Pose", partial(check_positive, high=MAX_BINS)
    )
    simcc_sigma: float = setting(6.0, "standard deviation of SimCC's labels, in bins", "Pose", check_positive)
    flip_test: bool = setting(
        False, "average the probabilities of each image and its mirror image in evaluation", "Pose"
    )


#: the settings of the tasks, by name
TASK_SETTINGS: dict[str, type[TaskSettings]] = {kind.name: kind for kind in (ClassificationSettings, PoseSettings)}


_STORED_SETTINGS: dict[str, type[TaskSettings]] = {}  # those of tasks of the user that only files describe


def settings_of_task(task: object) -> type[TaskSettings]:
    """Return the class of the settings of a task. Nothing is imported: a task of the user is known once it is imported,
    or once a run directory that describes it is read.

    Args:
        task: its name, its class, or the class of its settings.

    Example:
        >>> settings_of_task("pose").__name__
        'PoseSettings'
    """
    if isinstance(task, type) and issubclass(task, TaskSettings):
        return task
    if isinstance(task, str) and task in TASK_SETTINGS:
        return TASK_SETTINGS[task]
    settings = getattr(known_object(task) if isinstance(task, str) else task, "settings_type", None)
    if isinstance(settings, type) and issubclass(settings, TaskSettings):
        if not hasattr(settings, "name"):
            name_of(task, "task")  # raises, or the class would have one
        return settings
    if isinstance(task, type):
        raise BsamValueError(f"task must be a class derived from bsam.lab.Task, got {task.__name__}: check the name")
    if isinstance(task, str) and task in _STORED_SETTINGS:
        return _STORED_SETTINGS[task]
    raise BsamValueError(
        f"task must be one of {', '.join(TASK_SETTINGS)}; got {task!r}. For a task of your own, pass its class"
    )


def store_settings(name: str, described: Mapping[str, Mapping[str, Any]], presets: Sequence[Mapping[str, Any]]) -> None:
    """Make the settings of a task of the user known without its module.

    Args:
        name: ``MODULE:CLASS``.
        described: the ``default`` and the ``help`` of each setting, by name. Those of several runs, between which
            the task may have changed, are put together.
        presets: those of the run that was read last, as :meth:`Preset.to_json` describes them.
    """
    before = [(item.name, Any, item) for item in fields(_STORED_SETTINGS[name])] if name in _STORED_SETTINGS else []
    known = [name for name, *_ in before]
    new = [
        (key, Any, setting(value["default"], value["help"], check=_anything))
        for key, value in described.items()
        if key not in known
    ]
    if name not in _STORED_SETTINGS or new:
        options: dict[str, Any] = {"bases": (TaskSettings,), "frozen": True, "kw_only": True}
        _STORED_SETTINGS[name] = make_dataclass("StoredSettings", [*before, *new], namespace={"name": name}, **options)
    _STORED_SETTINGS[name].presets = tuple(Preset.from_json(preset) for preset in presets)


def _anything(name: str, value: object) -> None:
    """Accept a stored value, which was checked when the run began."""


Method: TypeAlias = type[SharpnessAware] | type[Distillation]


def method_class(name: str) -> Method:
    """Return the class of a method; import it if it is a class of the user.

    Args:
        name: a name in ``bsam.METHODS``, or ``MODULE:CLASS``. To import a module is to run its code: the name must come
            from the user, not only from a file.
    """
    return METHODS[name] if name in METHODS else _checked(name, find_object(name, "method"))


def known_method(name: str) -> Method | None:
    """Return the class of a method without importing it; None for a class of the user that was not imported before."""
    own = known_object(name)
    return METHODS.get(name) or (None if own is None else _checked(name, own))


def _checked(name: str, given: object) -> Method:
    if not isinstance(given, type) or not issubclass(given, SharpnessAware | Distillation):
        kind = "a function" if inspect.isfunction(given) else f"{given!r}"
        raise BsamValueError(
            f"the method {name} must be a class derived from bsam.SharpnessAware (or, for a loss, from "
            f"bsam.methods.distillation.Distillation), got {kind}: check the name"
        )
    missing = [part for part in dir(given) if getattr(getattr(given, part, None), "__isabstractmethod__", False)]
    if missing:
        raise BsamValueError(f"the method {name} has no {missing[0]}: add it to the class")
    if not is_number(given.passes_with({})):
        raise BsamValueError(
            f"the method {name} must say how many gradient passes a step takes: set the class attribute passes, such "
            "as passes = 2, or override the class method passes_with"
        )
    return given


Schedule = Literal["cosine", "constant"]
Precision = Literal["fp32", "bf16", "fp16"]
Decay = Literal["all", "weights"]
TaskSettingsT = TypeVar("TaskSettingsT", bound=TaskSettings)
BASE = "base"  # the method name for the base optimizer alone
SGD = "sgd"  # another one, if the base optimizer is SGD
RADIUS_SCHEDULE = ("rho_warmup", "rho_start")  # settings of a run that only methods with a radius take


# arguments that training gives to every method that has them, unless the run does
TRAINING_KNOWS = ("seed", "total_steps", "samples", "classes", "label_smoothing", "side_by_side")


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
    if both := {item.name for item in fields_of(type(value))} & {item.name for item in fields_of(Run)}:
        raise BsamValueError(f"{min(both)} of {type(value).__name__} is also a setting of Run: choose another name")


@dataclass(frozen=True)
class Run(Settings):
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
            "help": "a method from `bsam list methods`, case-insensitive; base or sgd for the base optimizer alone; "
            "MODULE:CLASS for one of your own",
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
    model: str = setting(
        "digits_net",
        "a network from `bsam list models`, timm:NAME for one from timm, or MODULE:FUNCTION for one of your own",
        "Model",
    )
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
        f"{', '.join(CAPTURABLE)}, and fp32 or bf16. Captured steps round differently",
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
        super().__post_init__()
        self._check_method()
        self._check_start()
        if self.momentum >= 1:
            raise BsamValueError(f"momentum must be below 1, got {self.momentum}")
        if self.momentum != Run.momentum and not (
            {"momentum", "betas"} & set(inspect.signature(BASES[self.base]).parameters)
        ):
            raise BsamValueError(f"momentum has no effect with base {self.base}, which has none: leave it out")
        check_base_arguments(self.base, self.base_arguments)
        if is_own(self.task.name):
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
        """Raise if the task of the user does not know the data or the network, or does not use a setting."""
        task = self.task
        defaults = {item.name: item.default for item in fields(self)}
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
        given: dict[str, Any] = {}
        for part in (self, self.task):
            given |= {name: getattr(part, name) for name in vars(part)["_given"]}
        if str(self.method).lower() == SGD:
            given["base"] = self.base
        if "base" in given:
            given["base"] = find_base(given["base"])
        values = {name: value for name, value in preset_values(type(self.task), given).items() if name not in given}
        of_task = {item.name: values.pop(item.name) for item in fields_of(type(self.task)) if item.name in values}
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
        self.task.check_run(self)

    def _check_method(self) -> None:
        if not is_own(self.method):
            object.__setattr__(self, "method", find_name("method", self.method, (BASE, SGD, *METHODS), OWN_CLASS))
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
        defaults = {} if self.method == BASE else inspect.signature(method_class(self.method)).parameters
        for name in known:
            is_required = defaults[name].default is inspect.Parameter.empty and name not in TRAINING_KNOWS
            if is_required and name not in self.arguments:
                raise BsamValueError(
                    f"{self.method} needs {name}: give it among its arguments, with --set {name}=..., or in a list of "
                    f"methods as {self.method}:{name}=..."
                )
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
        kind = settings_of_task(task)
        task_names = [item.name for item in fields_of(kind)]
        known = [*(item.name for item in fields_of(cls)), *task_names]
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
        for item in fields_of(Run):
            if item.name == "task":
                parts = fields_of(type(self.task))
                settings |= {part.name: to_json_value(getattr(self.task, part.name)) for part in parts}
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
        warmup_steps = round(self.warmup * steps_per_epoch)
        total = self.epochs * steps_per_epoch
        if step < warmup_steps:
            return self.lr * (step + 1) / warmup_steps
        if self.schedule == "constant":
            return self.lr
        return self.lr * (1 + math.cos(math.pi * (step - warmup_steps) / (total - warmup_steps))) / 2


def imported(run: Run) -> Run:
    """Return a run that is about to train, after importing its method, a class of the user's, and checking the settings
    that this class decides.
    """
    method_class(run.method)
    return replace(run)


def method_title(run: Run) -> str:
    """Return the title of a run's method for tables; the base optimizer's title if it runs alone.

    A class of the user has its own ``title``, or its name.
    """
    if run.method == BASE:
        return BASES[run.base].__name__
    if run.method in METHODS:
        return METHODS[run.method].title
    own = known_method(run.method)
    return (own and own.__dict__.get("title")) or run.method.rpartition(":")[2]


def default_settings(task: type[TaskSettings]) -> dict[str, Any]:
    """Return the defaults of a run's settings, those of its task included, without presets.

    Example:
        >>> defaults = default_settings(ClassificationSettings)
        >>> defaults["lr"], defaults["label_smoothing"]
        (0.05, 0.1)
    """
    defaults: dict[str, Any] = {}
    for item in (*fields_of(Run), *fields_of(task)):
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
    of_user = task.presets if is_own(task.name) else ()  # again: what a user says wins
    for preset in (*task.presets, *SHARED, *of_user):
        for name in (*preset.when, *preset.values):
            if name not in defaults:
                raise BsamValueError(f"a preset of {task.name} names {name}, which is no setting: correct it")
        if preset.applies({**defaults, **values, **given}):
            values |= preset.values
    return values


def listed_tasks(task: str | None = None) -> list[type[TaskSettings]]:
    """Return the settings of the tasks that a command shows: of ours, or of a task of the user alone."""
    return [settings_of_task(task)] if is_own(task) else [*TASK_SETTINGS.values()]


def settings_by_heading(task: str | None = None) -> dict[str, list[Field[Any]]]:
    """Return the fields of all settings by the heading of their flags; those of the tasks come last, but measurements
    are the last heading.

    Args:
        task: from :func:`listed_tasks`.
    """
    listed: dict[str, list[Field[Any]]] = {}
    for item in fields(Run):
        listed.setdefault(item.metadata["heading"], []).append(item)
    *first, last = listed
    for kind in listed_tasks(task):
        for item in fields(kind):
            listed.setdefault(item.metadata["heading"], []).append(item)
    of_tasks = sorted(listed.keys() - {*first, last})
    return {heading: listed[heading] for heading in (*first, *of_tasks, last)}


# A setting with this value is not in the digest, so that a new setting does not rename runs. The values were defaults
# when the settings were added, and never change, even if a default does.
FROZEN_OF_RUN: Mapping[str, Any] = {
    "arguments": {},
    "rho_warmup": 0.0,
    "rho_start": 0.0,
    "task": "classification",
    "model": "digits_net",
    "weights": None,
    "init": None,
    "freeze_backbone": False,
    "data": "digits",
    "image_size": None,
    "skip_corrupt": False,
    "augment": None,
    "limit_train": None,
    "limit_test": None,
    "eval_split": "test",
    "base": "sgd",
    "base_arguments": {},
    "lr": 0.05,
    "schedule": "cosine",
    "warmup": 0.0,
    "momentum": 0.9,
    "nesterov": False,
    "weight_decay": 1e-3,
    "decay": "all",
    "epochs": 200,
    "batch": 128,
    "accumulate": 1,
    "clip_norm": None,
    "ema": None,
    "head_lr": None,
    "layer_decay": 1.0,
    "seed": 0,
    "precision": "fp32",
    "compile": False,
    "capture": True,
    "probe": None,
    "radius": None,  # sharpness_rho
    "curvature": False,
    "surface": None,
}
FROZEN_OF_TASK: Mapping[str, Mapping[str, Any]] = {
    "classification": {
        "label_smoothing": 0.1,
        "label_noise": 0.0,
        "noise_labels": "other",  # not its default
        "weight_bits": None,
        "activation_bits": None,
        "first_last_bits": 8,
        "quantizer": "lsq",
        "fold_batch_norm": False,
        "perturb_scales": False,
    },
    "pose": {"simcc_k": 2.0, "simcc_sigma": 6.0, "flip_test": False},
}
#: the names in the digest of settings that were renamed after it was frozen
DIGEST_NAMES: Mapping[str, str] = {
    item.name: item.metadata["digest"] for item in fields(Run) if item.metadata.get("digest") is not None
}


def digest(settings: Mapping[str, Any], defaults: Mapping[str, Any]) -> str:
    """Return eight digits of a digest of the settings that are not defaults.

    Args:
        settings: from :meth:`Run.settings`.
        defaults: those of the settings of the task, for a task of your own.

    Example:
        >>> digest({"method": "sam", "arguments": {"rho": 0.1}, "task": "classification"}, {})
        'c8c55539'
    """
    frozen = {**defaults, **FROZEN_OF_RUN, **FROZEN_OF_TASK.get(settings["task"], {})}
    chosen: dict[str, Any] = {}
    for name, value in settings.items():
        key = DIGEST_NAMES.get(name, name)
        if name == "method" or value != frozen[key]:
            chosen[key] = value
    if not settings.get("label_noise"):
        chosen.pop("noise_labels", None)  # without noise, it says nothing
    if settings["task"] == "pose":
        chosen["label_smoothing"] = 0.0  # it is no setting of pose, but in the frozen names
    return hashlib.sha256(json.dumps(chosen, sort_keys=True).encode()).hexdigest()[:8]
