"""The settings of the tasks, and their presets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, make_dataclass
from functools import partial
from typing import Any, ClassVar, Literal

from ...common.checks import check_count
from ...common.errors import BsamValueError
from ..common.names import known_object
from .presets import SET, Preset, RecordsGiven
from .settings import SHARE, check_positive, check_values, one_of, setting

NoiseLabels = Literal["all", "other"]
Quantizer = Literal["lsq", "minmax"]
BITS = partial(check_count, low=2, high=8)
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
class TaskSettings(RecordsGiven):
    """The settings of a task. Tasks add theirs in subclasses, and override the properties that apply."""

    name: ClassVar[str]  #: the name of the task
    presets: ClassVar[Sequence[Preset]] = ()  #: defaults that follow from other settings, of the run or of the task
    datasets: ClassVar[Sequence[str]] = ()  #: the data sets of a task of the user, by name
    networks: ClassVar[Sequence[str]] = ()  #: its networks, by name
    unused: ClassVar[Sequence[str]] = ()  #: settings of a run that it does not use

    def __post_init__(self) -> None:
        check_values(self)

    @property
    def is_own(self) -> bool:
        """Whether it is a task of the user, ``MODULE:CLASS``."""
        return is_own_task(self.name)

    @property
    def weight_bits(self) -> int | None:
        """The number of bits of the weights; None without quantization."""
        return None

    @property
    def label_noise(self) -> float:
        """The fraction of the training labels that are drawn at random."""
        return 0.0


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
        BITS,
    )
    activation_bits: int | None = setting(
        None, "bits of the layer inputs, 2 to 8; default: the same as for weights", "Quantization", BITS
    )
    first_last_bits: int = setting(
        8, "bits of the weights and inputs of the first and the last layer", "Quantization", BITS
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


_STORED: dict[str, type[TaskSettings]] = {}  # those of tasks of the user that only files describe


def is_own_task(name: object) -> bool:
    """Return whether this is the name of a task of the user, ``MODULE:CLASS``."""
    return isinstance(name, str) and ":" in name


def settings_of_task(name: object) -> type[TaskSettings]:
    """Return the class of the settings of a task. Nothing is imported: a task of the user is known once it is imported,
    or once a run directory that describes it is read.

    Example:
        >>> settings_of_task("pose").__name__
        'PoseSettings'
    """
    if isinstance(name, str):
        if name in TASK_SETTINGS:
            return TASK_SETTINGS[name]
        kind = getattr(known_object(name), "settings_type", None)
        if isinstance(kind, type) and issubclass(kind, TaskSettings):
            return kind
        if name in _STORED:
            return _STORED[name]
    raise BsamValueError(
        f"task must be one of {', '.join(TASK_SETTINGS)}; got {name!r}. For a task of your own, pass its class"
    )


def store_settings(name: str, described: Mapping[str, Mapping[str, Any]]) -> None:
    """Make the settings of a task of the user known without its module.

    Args:
        name: ``MODULE:CLASS``.
        described: the ``default`` and the ``help`` of each setting, by name. Those of several runs, which older
            versions of the task may have trained, are put together.
    """
    before = [(item.name, Any, item) for item in fields(_STORED[name])] if name in _STORED else []
    new = [
        (key, Any, setting(value["default"], value["help"], check=_anything))
        for key, value in described.items()
        if key not in [known for known, *_ in before]
    ]
    if name not in _STORED or new:
        options: dict[str, Any] = {"bases": (TaskSettings,), "frozen": True, "kw_only": True}
        _STORED[name] = make_dataclass("StoredSettings", [*before, *new], namespace={"name": name}, **options)


def _anything(name: str, value: object) -> None:
    """Accept a stored value, which was checked when the run began."""
