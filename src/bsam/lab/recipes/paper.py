"""The numbers that the paper printed: test accuracy (for poses PCKh@0.5) in %, as in its tables."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from ...common.errors import BsamValueError

MeanStd: TypeAlias = tuple[float, float | None]


@dataclass(frozen=True)
class Published:
    """A published number.

    Args:
        mean: in the unit of the table, usually %.
        std: the standard deviation; None if it was not published.
        note: a footnote, for example if the number was taken from elsewhere or belongs to another network.
    """

    mean: float
    std: float | None = None
    note: str = ""


@dataclass(frozen=True)
class PublishedTable:
    """Published numbers, which tables and figures show next to ours.

    Args:
        keys: names of the settings that identify a number: fields of :class:`bsam.lab.training.Run`, arguments of a
            method, and ``"measure"`` for recipes with several. ``"method"`` is the name that ``--only`` takes; the
            variants of BSAM share ``"bsam"``.
        numbers: the numbers, by the values of these settings.
        about: where they come from, for the line below the table.
        decimals: the number of decimals to print.

    Example:
        >>> table = PublishedTable(
        ...     ("data", "method"), {("digits", "sam"): Published(97.5, 0.2)}
        ... )
        >>> table.number({"data": "digits", "method": "sam"}).mean
        97.5
    """

    keys: tuple[str, ...]
    numbers: Mapping[tuple[Any, ...], Published]
    about: str = "as published."
    decimals: int = 2

    def number(self, settings: Mapping[str, Any]) -> Published | None:
        """Return the number with these settings; None if there is none."""
        if unknown := [name for name in self.keys if name not in settings]:
            raise BsamValueError(f"keys of published numbers must be settings of a run; {unknown[0]!r} is not one")
        return self.numbers.get(tuple(settings[name] for name in self.keys))


DATA = ("cifar10", "cifar100")  # the order of all pairs below
_NETWORKS = ("resnet18", "wide_resnet28_10", "pyramidnet110")
_CLASSIFICATION: Mapping[str, tuple[MeanStd, ...]] = {  # on these networks, each with both data sets
    "sgd": ((96.18, 0.09), (79.89, 0.38), (96.93, 0.05), (82.56, 0.27), (97.10, 0.08), (83.38, 0.21)),
    "sam": ((96.74, 0.05), (81.08, 0.27), (97.52, 0.05), (84.71, 0.21), (97.65, 0.06), (86.06, 0.16)),
    "asam": ((96.63, 0.15), (81.68, 0.12), (97.63, 0.13), (84.99, 0.22), (97.82, 0.07), (86.47, 0.09)),
    "fisher_sam": ((96.72, 0.03), (80.99, 0.13), (97.46, 0.18), (84.91, 0.07), (97.64, 0.09), (86.53, 0.07)),
    "friendly_sam": ((96.75, 0.09), (81.29, 0.12), (97.53, 0.11), (85.16, 0.07), (97.84, 0.05), (86.70, 0.14)),
    "looksam": ((96.47, 0.13), (80.48, 0.24), (97.13, 0.04), (83.52, 0.09), (97.22, 0.05), (83.76, 0.45)),
    "esam": ((96.56, 0.08), (80.41, 0.10), (97.29, 0.11), (84.51, 0.01), (97.81, 0.01), (85.56, 0.05)),
    "saf": ((96.37, 0.02), (80.06, 0.05), (97.08, 0.15), (83.81, 0.04), (97.34, 0.06), (84.71, 0.01)),
    "bsam": ((96.82, 0.12), (81.48, 0.18), (97.56, 0.07), (85.51, 0.14), (97.96, 0.10), (86.20, 0.06)),
}
_RHO_MIN: Mapping[float, tuple[MeanStd, MeanStd]] = {  # ResNet-18
    0.01: ((96.75, 0.09), (81.56, 0.05)),
    0.025: ((96.78, 0.02), (81.29, 0.11)),
    0.05: ((96.82, 0.12), (81.65, 0.04)),
    0.1: ((96.66, 0.13), (81.48, 0.18)),
    0.25: ((96.18, 0.09), (81.58, 0.25)),
}
RHO_MINS = tuple(_RHO_MIN)
NOISE_RATES = (0.2, 0.4, 0.6, 0.8)
_LABEL_NOISE: Mapping[str, tuple[float, ...]] = {  # ResNet-18, both data sets at these rates; without deviations
    "sgd": (85.94, 70.25, 48.50, 28.91, 65.42, 48.91, 31.46, 12.32),
    "sam": (90.44, 79.71, 67.22, 76.94, 69.10, 55.06, 35.59, 9.82),
    "bsam": (93.34, 85.58, 76.37, 78.27, 71.65, 57.61, 38.71, 32.69),
}
TRANSFER_DATA = ("cifar10", "cifar100", "flowers102", "stanford_cars", "oxford_pet")
_TRANSFER: Mapping[str, Mapping[str, tuple[MeanStd, ...]]] = {  # fine-tuned, on these data sets
    "timm:efficientnet_b0": {
        "sgd": ((97.32, 0.07), (87.05, 0.11), (77.11, 0.36), (74.47, 0.55), (87.89, 0.43)),
        "sam": ((97.48, 0.07), (87.27, 0.21), (78.04, 0.37), (75.75, 0.41), (88.30, 0.16)),
        "bsam": ((97.52, 0.04), (87.40, 0.21), (79.02, 1.10), (77.54, 0.62), (89.42, 0.25)),
    },
    "timm:resnet50": {
        "sgd": ((97.28, 0.05), (86.20, 0.18), (86.74, 0.16), (80.02, 0.24), (93.11, 0.17)),
        "sam": ((97.78, 0.02), (87.48, 0.04), (87.53, 0.13), (83.69, 0.19), (93.14, 0.14)),
        "bsam": ((97.81, 0.06), (87.51, 0.05), (88.22, 0.20), (84.36, 0.16), (93.06, 0.15)),
    },
}
STANDS_FOR = {  # networks whose weights can be converted: the paper's networks that they replace
    "resnet50": "timm:resnet50",
    **dict.fromkeys((f"timm:tf_efficientnet_lite{i}" for i in range(3)), "timm:efficientnet_b0"),
}
OTHER_NETWORK = "published for EfficientNet-B0; Lite networks lack squeeze-and-excitation and use ReLU6, not swish"

_POSE_MEASURES = ("pck_head", "pck_shoulder", "pck_elbow", "pck_wrist", "pck_hip", "pck_knee", "pck_ankle", "pck")
_POSE: Mapping[str, tuple[float, ...]] = {  # SimCC on MPII, by these measures; without deviations
    "adam": (96.828, 95.771, 89.654, 84.272, 88.679, 85.151, 81.436, 89.318),
    "sam": (96.965, 95.703, 89.637, 84.222, 88.402, 85.513, 81.862, 89.388),
    "bsam": (96.794, 95.584, 89.995, 85.317, 89.008, 85.392, 81.082, 89.552),
}
_QUANTIZATION: Mapping[str, Mapping[str, MeanStd]] = {  # CIFAR-10; "" is full precision, the others have 4 bits
    "resnet18": {"": (88.72, None), "sgd": (88.86, 0.18), "sam": (89.75, 0.21), "bsam": (89.84, 0.11)},
    "mobilenet_v1": {"": (85.81, None), "sgd": (84.04, 0.13), "sam": (84.72, 0.11), "bsam": (84.76, 0.1)},
}

_QUOTED = ("asam", "fisher_sam", "friendly_sam")
_NOTES: Mapping[str, str] = {
    **dict.fromkeys(_QUOTED, "taken by the paper from Li et al., CVPR 2024"),
    "esam": "taken by the paper from Du et al., ICLR 2022",
    "saf": "source unclear: the paper's text has K-SAM, from Zhao et al., 2022, where its table has SAF",
}


def _note(model: str, method: str) -> str:
    is_longer = model == "pyramidnet110" and method in _QUOTED
    return _NOTES.get(method, "") + (", after 300 epochs" if is_longer else "")


_ONE_BSAM = "The paper reports one BSAM"
_REPEATED = f"{_ONE_BSAM}; its number is repeated for our three variants."
_EPOCHS_UNKNOWN = "as published; the paper does not say after how many epochs."

CLASSIFICATION = PublishedTable(
    ("model", "data", "method"),
    {
        (model, data, method): Published(*cell, _note(model, method))
        for method, cells in _CLASSIFICATION.items()
        for (model, data), cell in zip(itertools.product(_NETWORKS, DATA), cells, strict=True)
    },
    f"as published, after 200 epochs. {_REPEATED}",
)
RHO_MIN_STUDY = PublishedTable(
    ("data", "rho_min"),
    {
        (data, rho_min): Published(*cell)
        for rho_min, cells in _RHO_MIN.items()
        for data, cell in zip(DATA, cells, strict=True)
    },
    CLASSIFICATION.about,
)
LABEL_NOISE = PublishedTable(
    ("data", "method", "label_noise", "noise_labels"),
    {
        (data, method, rate, "all"): Published(mean)
        for method, means in _LABEL_NOISE.items()
        for (data, rate), mean in zip(itertools.product(DATA, NOISE_RATES), means, strict=True)
    },
    f"{CLASSIFICATION.about} The numbers fit labels drawn from all classes, which the paper does not state.",
)
TRANSFER = PublishedTable(
    ("model", "data", "method"),
    {
        (model, data, method): Published(*cell, OTHER_NETWORK if "lite" in model else "")
        for model in (*_TRANSFER, *STANDS_FOR)
        for method, cells in _TRANSFER[STANDS_FOR.get(model, model)].items()
        for data, cell in zip(TRANSFER_DATA, cells, strict=True)
    },
    f"as published, after 30 epochs. {_REPEATED}",
)
POSE = PublishedTable(
    ("data", "method", "measure"),
    {
        ("mpii", method, measure): Published(mean)
        for method, means in _POSE.items()
        for measure, mean in zip(_POSE_MEASURES, means, strict=True)
    },
    f"{_EPOCHS_UNKNOWN} {_ONE_BSAM}.",
    decimals=3,
)
QUANTIZATION = PublishedTable(
    ("model", "data", "method", "weight_bits"),
    {
        (model, "cifar10", method or "sgd", 4 if method else None): Published(*cell)
        for model, rows in _QUANTIZATION.items()
        for method, cell in rows.items()
    },
    f"{_EPOCHS_UNKNOWN} {_REPEATED}",
)
