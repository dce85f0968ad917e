"""The settings of what is learned, and how to declare a setting."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias, TypeVar, get_args

import numpy as np

from ...common.checks import check_count, check_flag, check_number, is_number
from ...common.errors import BsamValueError
from ..data.augment import AUGMENTATIONS
from ..data.pose.pose_augment import POSE_AUGMENTATIONS
from ..data.timm_augment import EXAMPLE

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")
Check: TypeAlias = Callable[[str, Any], object]
Split = Literal["validation", "holdout", "test"]
# the headings of the flags of `bsam train`, in their order
Group = Literal["Method", "Model", "Data", "Optimization", "Precision and speed", "Pose", "Quantization", "Measurement"]
GROUPS: tuple[Group, ...] = get_args(Group)
MAX_SEED = 2**63 - 1  # seeds are stored as 64-bit integers


NOT_NEGATIVE: Check = partial(check_number, low=0)
SHARE: Check = partial(check_number, low=0, high=1)


def setting(default: T, help: str, group: Group, check: Check | None = None, timm: Sequence[str] = ()) -> T:
    """Declare a dataclass field.

    Args:
        default: its default; None is not checked.
        help: the help text of its flag.
        group: the heading of its flag.
        check: called with the name and the value; raises if the value is wrong. By default the value must be a name, a
            count or a bool, as the default is.
        timm: its flags in timm's ``train.py``, which `bsam train` takes, too.
    """
    checks: dict[type, Check] = {str: check_name, int: check_count, bool: check_flag}
    metadata = {"help": help, "check": check or checks[type(default)], "group": group, "timm": timm}
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


def to_json_value(value: Any) -> Any:
    """Return the value as JSON stores it: numpy numbers as Python numbers, tuples and arrays as lists, even nested."""
    if value is None or type(value) in (str, bool, int, float):  # most values; this is called often
        return value
    if isinstance(value, (np.generic, np.ndarray)):
        return value.tolist()
    if isinstance(value, Mapping):
        return {name: to_json_value(entry) for name, entry in value.items()}
    return [to_json_value(entry) for entry in value] if type(value) in (list, tuple) else value


def check_values(settings: DataclassInstance) -> None:
    """Check the value of each field, and replace it by a copy in plain Python values."""
    for item in fields(settings):
        value = to_json_value(getattr(settings, item.name))  # a copy: the caller's values may change later
        object.__setattr__(settings, item.name, value)
        if "check" in item.metadata and (value is not None or item.default is not None):
            item.metadata["check"](item.name, value)


@dataclass(frozen=True)
class TaskSettings:
    """The settings of a task. Tasks add theirs in subclasses, and override the properties and methods that apply."""

    name: ClassVar[str]  #: the name of the task

    def __post_init__(self) -> None:
        check_values(self)

    @property
    def weight_bits(self) -> int | None:
        """The number of bits of the weights; None without quantization."""
        return None

    @property
    def label_noise(self) -> float:
        """The fraction of the training labels that are drawn at random."""
        return 0.0

    def wrong_labels(self, data: str) -> float | None:
        """Return the fraction of the training labels that are wrong, if it is known."""
        return None

    def noise_text(self, data: str, wrong: float | None = None) -> str:
        """Describe the label noise; empty if there is none."""
        return ""


TaskSettingsT = TypeVar("TaskSettingsT", bound=TaskSettings)


@dataclass(frozen=True, kw_only=True)
class SubjectSettings:
    """Settings for what is learned: the task, the network, data and evaluation.
    :class:`bsam.lab.training.config.Run` adds settings for how it is learned.

    Each field's metadata holds its help text. Values are checked, and copied as plain Python values.
    """

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
        f"{', '.join(AUGMENTATIONS)}; for pose {', '.join(POSE_AUGMENTATIONS)}; {EXAMPLE}, or some of these three, for "
        "crops and flips followed by timm's RandAugment, Mixup and CutMix. resized-crop-flip is RandomResizedCrop and "
        "flips, for photographs; crop-flip shifts by at most 4 pixels, for small images",
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
    seed: int = setting(
        0,
        "seed of the initial weights, the order of the samples, their augmentation and the label noise",
        "Optimization",
        partial(check_count, low=0, high=MAX_SEED),
    )

    task: TaskSettings

    def __post_init__(self) -> None:
        check_values(self)
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

    def task_settings(self, kind: type[TaskSettingsT]) -> TaskSettingsT:
        """Return the settings of the task; raise if they are those of another task."""
        if not isinstance(self.task, kind):
            raise BsamValueError(f"the run has settings of {self.task.name}: set its task to {kind.__name__}(...)")
        return self.task
