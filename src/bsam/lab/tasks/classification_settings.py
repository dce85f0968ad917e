"""The settings of classification: labels and quantization."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

from ...common.checks import check_count
from ...common.errors import BsamValueError
from ..data import dataset_entry
from ..data.label_noise import NoiseLabels, wrong_share
from .settings import SHARE, TaskSettings, one_of, setting

Quantizer = Literal["lsq", "minmax"]
QUANTIZATION = ("activation_bits", "first_last_bits", "quantizer", "fold_batch_norm", "perturb_scales")
FINE_TUNING = {"epochs": 30, "lr": 0.01, "weight_decay": 1e-4, "label_smoothing": 0.0}  # the paper's, for ResNet-50
QUANTIZED = {"epochs": 60, "lr": 0.01, "weight_decay": 1e-4}  # rates as in FINE_TUNING: the paper does not give any
BITS = partial(check_count, low=2, high=8)


@dataclass(frozen=True, kw_only=True)
class ClassificationSettings(TaskSettings):
    """The settings of classification."""

    name = "classification"

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
        changed = [name for name in QUANTIZATION if getattr(self, name) != getattr(ClassificationSettings, name)]
        if self.weight_bits is None and changed:
            raise BsamValueError(f"{changed[0]} has no effect on a network that is not quantized: set weight_bits")
        if self.perturb_scales and self.quantizer != "lsq":
            raise BsamValueError(f"perturb_scales is for learned scales (quantizer lsq), got {self.quantizer}")

    def wrong_labels(self, data: str) -> float | None:
        """Return the fraction of the training labels that are wrong; None for a user's own data, whose number of
        classes is not known before the data is read.
        """
        try:
            classes = dataset_entry(data).classes
        except BsamValueError:  # a data set that this version does not have
            return None
        return None if classes is None else round(wrong_share(self.label_noise, self.noise_labels, classes), 6)

    def noise_text(self, data: str, wrong: float | None = None) -> str:
        """Describe the label noise; empty if there is none.

        Args:
            data: the name of the data set.
            wrong: the fraction of the training labels that are wrong, if it is known; None computes it.

        Example:
            >>> ClassificationSettings(label_noise=0.4).noise_text("cifar10")
            '40 % of labels drawn from all classes: 36.0 % wrong'
        """
        if not self.label_noise:
            return ""
        wrong = self.wrong_labels(data) if wrong is None else wrong
        text = f"{100 * self.label_noise:g} % of labels drawn from {self.noise_labels} classes"
        return text if wrong is None else f"{text}: {100 * wrong:.1f} % wrong"
