"""The experiments besides CIFAR: fine-tuning, quantization, poses, and methods at equal total radii."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..config import FINE_TUNING, QUANTIZED, Run
from ..data import dataset_entry
from ..models.weights import PRETRAINED
from ..tasks import task_of
from ..tasks.images import augmentation_of
from ..tasks.pose_outputs import SCORES
from ..training.run_dir import run_dir_name
from .cifar_recipes import COMPARED, MAIN, grid
from .experiments import recipe
from .planning import Plan, titles_of
from .scales import SCALES, Scale
from .start import with_weights
from .variants import arguments, variant_of, variants

FINE_TUNED = ("timm:efficientnet_b0", "timm:resnet50")  # the paper's
TRANSFER_DATA = ("cifar10", "cifar100", "flowers102", "stanford_cars", "oxford_pet")
SMALLEST_DATA = ("flowers102", "oxford_pet")

QUANTIZED_NETWORKS = ("resnet18", "mobilenet_v1")
BITS = 4  # of weights and activations
QUANTIZED_EPOCHS = {"smoke": 2, "short": 12, "paper": 60}  # of the quantized runs; float runs have those of the scale
SMOKE = {"limit_train": 12, "batch": 6}  # few samples, as Hessian products are slow; --tune holds out half of them
FULL_PRECISION = "Full precision"  # the row of the float network

# SimCC's authors evaluate with the flip test
_LARGE = {"model": "simcc_resnet50", "weights": PRETRAINED, "precision": "bf16", "compile": True, "flip_test": True}
_SMALL = {"model": "simcc_resnet8", "image_size": 24, "simcc_sigma": 2.0, "lr": 0.015, "batch": 8}
POSE_SETTINGS: Mapping[str, Mapping[str, Any]] = {  # by scale
    "paper": {**_LARGE, "data": "mpii", "epochs": 210},
    "short": {**_LARGE, "data": "lspet", "epochs": 30},
    "smoke": {**_SMALL, "data": "stick_figures", "epochs": 4, "limit_train": 240, "limit_test": 100},
}
POSE_NOTES: Mapping[str, tuple[str, ...]] = {  # by score
    "PCK@0.2": (
        "PCK@0.2: the share of labelled joints found within 0.2 torsos, where a torso is the distance from left "
        "shoulder to right hip or, if that is not known, from right shoulder to left hip.",
        "A group is the mean over its joints. Mean counts all joints together. Persons whose torso is not known are "
        "left out.",
    ),
    "PCKh@0.5": (
        "PCKh@0.5: the share of labelled joints found within half a head size.",
        "A group is the mean over its joints. Mean counts all joints together, without pelvis and thorax.",
    ),
}

NOISE = 0.4
TOTALS = {"digits": (0.1, 0.2, 0.4, 0.6)}  # total radii, by data set
DEFAULT_TOTALS = (0.05, 0.1, 0.2, 0.4)  # for all others


@recipe("Pretrained networks, fine-tuned", published="transfer", tunable=True)
def transfer(scale: Scale) -> list[Run]:
    """Return the networks of the transfer table on its data sets.

    At the scale ``short`` these are the two smallest data sets, at ``smoke`` digits, with small networks that begin
    with random weights.
    """
    settings: Mapping[str, Any] = {"weights": PRETRAINED, "precision": "bf16"}  # compiling takes as long as it saves
    data: Sequence[str] = SMALLEST_DATA if scale.name == "short" else TRANSFER_DATA
    if scale.stand_ins:
        settings, data = {**scale.settings, "image_size": 32}, scale.data
    scale = replace(scale, settings={**FINE_TUNING.values, **settings})
    # the paper uses the radius of CIFAR-10 on all of them
    runs = grid(scale, COMPARED, FINE_TUNED, data, axis=[{"radii": "cifar10"}])
    runs = [replace(run, augment=augmentation_of(dataset_entry(run.data), run.model, run.image_size)) for run in runs]
    return with_weights(runs, scale.weights)


def _score_title(data: str) -> str:
    """Return the title of the score of a pose data set."""
    joints = dataset_entry(data).classes
    return next(score.title for skeleton, score in SCORES.items() if len(skeleton.joints) == joints)


def _pose_notes(scale: Scale) -> list[str]:
    mean_pose = "Mean pose: each joint at its mean position in the boxes of the training set, without a network."
    return [*POSE_NOTES[_score_title(POSE_SETTINGS[scale.name]["data"])], mean_pose]


@recipe("Human pose estimation with SimCC", published="pose", tunable=True, notes=_pose_notes)
def pose(scale: Scale) -> list[Plan]:
    """Return Adam, SAM, SAM at BSAM's total radius, and BSAM.

    The data is MPII; at the scale ``short`` it is LSP Extended, at ``smoke`` stick figures. The runs on photographs
    begin with pretrained weights from a file.
    """
    settings = {**POSE_SETTINGS[scale.name], "task": "pose"}
    # the paper does not state its radii for poses; we use those of CIFAR-10
    runs = [Run.of(variants()[name].method, arguments(variants()[name], "cifar10"), **settings) for name in COMPARED]
    section = f"{' on '.join(titles_of(runs[0]))}, {_score_title(runs[0].data)} in %"
    return [Plan(run, section=section, column="") for run in with_weights(runs, scale.weights)]


def _quantization_notes(scale: Scale) -> list[str]:
    return [
        f"{FULL_PRECISION}: the float network, trained with SGD. The rows below start from it and train "
        f"{QUANTIZED_EPOCHS[scale.name]} more epochs, with {BITS}-bit weights and layer inputs (8 bits in the first "
        "and the last layer) and learned scales (LSQ).",
        "For quantized networks, λmax is computed at the quantized weights, with the straight-through estimator.",
    ]


@recipe("Quantization-aware training with 4 bits", published="quantization", tunable=True, notes=_quantization_notes)
def quantization(scale: Scale) -> list[Plan]:
    """Return a float run with SGD for each network, each followed by the runs that quantize it and train it further."""
    data, plans = scale.data[0], []
    common: dict[str, Any] = {"curvature": True, **(SMOKE if scale.name == "smoke" else {})}
    quantized = {**QUANTIZED.values, **common, "epochs": QUANTIZED_EPOCHS[scale.name], "weight_bits": BITS}
    for network in QUANTIZED_NETWORKS:
        base = scale.run(variants()["sgd"], network, data, **common)
        init = run_dir_name(base)
        runs = [base, *(scale.run(variants()[name], network, data, init=init, **quantized) for name in COMPARED)]
        column, title = titles_of(base)
        for run in runs:
            row = FULL_PRECISION if run.settings()["weight_bits"] is None else variant_of(run).title
            plans.append(Plan(run, section=f"{title}, W{BITS}A{BITS}", row=row, column=column))
    return plans


@recipe(
    "Methods at equal total radii, 40 % wrong training labels",
    scales=[replace(SCALES["demo"], name="smoke"), "short", "paper"],
    at_equal_radii=True,
    notes=[
        "Total radius: rho of SAM, rho_max + rho_min of BSAM, at the largest learning rate; BSAM's two radii are equal."
    ],
)
def radius(scale: Scale) -> list[Plan]:
    """Return SGD and each method at each total radius, on the first data set of the scale.

    How much of a gain is due to the radius? To first order in the radii, SAM and BSAM correct the gradient in
    proportion to the total.
    """
    data, network = scale.data[0], MAIN if MAIN in scale.networks else scale.networks[0]
    settings: dict[str, Any] = {"label_noise": NOISE, "noise_labels": "other", "curvature": True}
    sgd = scale.run(variants()["sgd"], network, data, **settings)
    section = f"{', '.join(titles_of(sgd))}, {task_of(sgd).data_words(sgd)}"
    plans = [Plan(sgd, section=section)]
    for total in TOTALS.get(data, DEFAULT_TOTALS):
        equal = {"rho_max": total / 2, "rho_min": total / 2}
        follow = {"rho": total, "rho_floor": total / 2}
        for name, radii in {"sam": {"rho": total}, "sam-follow": follow, "bsam": equal, "bsam-2": equal}.items():
            run = scale.run(variants()[name], network, data, arguments=radii, **settings)
            plans.append(Plan(run, section=section, row=f"{variant_of(run).title}, total radius {total:g}"))
    return plans
