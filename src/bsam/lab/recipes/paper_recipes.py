"""The paper's experiments on CIFAR, fine-tuning, poses and quantization, and methods at equal total radii."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ..config import FINE_TUNING, QUANTIZED, Run
from ..data import dataset_entry
from ..models.weights import PRETRAINED
from ..tasks import task_of
from ..tasks.images import augmentation_of
from ..tasks.pose_outputs import SCORES
from ..training.run_dir import run_dir_name
from .plan import Plan
from .recipe import recipe
from .variants import BSAMS, MATCHED, arguments_on, variant_of, variants

CURVE_METHODS = ("sgd", "sam", *BSAMS)  # the methods in the paper's curves
TABLE_METHODS = ("sgd", "sam", *MATCHED, *BSAMS)  # those and SAM at BSAM's total radius
RHO_MINS = (0.01, 0.025, 0.05, 0.1, 0.25)  # the paper's
NOISE_RATES = (0.2, 0.4, 0.6, 0.8)
CONFLICT_START = 0.1  # rho_min at the start, in the figure of the gradient conflict ...
CONFLICT_FLOORS = (0.1, 0.05, 0.0)  # ... and at the end: fixed, halved, the paper's choice
NETWORK_SETTINGS: Mapping[str, Mapping[str, Any]] = {  # where the paper's differ from those of the other networks
    "pyramidnet110": {"lr": 0.1, "weight_decay": 5e-4},
    "pyramidnet8": {"lr": 0.1, "weight_decay": 5e-4},
    "timm:efficientnet_b0": {"weight_decay": 1e-5},
    "timm:test_efficientnet": {"weight_decay": 1e-5},
}

# What the scales are, for the help of `bsam run`.
SCALES = {
    "smoke": "small networks on digits or drawings: a test that everything runs, in a minute on two cores",
    "short": "the paper's protocol with fewer epochs, 24 on CIFAR: about an hour on a large GPU",
    "paper": "the paper's protocol: 200 epochs on CIFAR",
    "demo": "a small network on digits, 22 epochs: the demo's only scale",
}
FAST: Mapping[str, Any] = {"precision": "bf16", "compile": True}  # the paper does not state its precision
CIFAR = ("cifar10", "cifar100")
# The scales of a recipe with one network on both CIFAR data sets; other recipes change their entries.
SMOKE_SETTINGS: Mapping[str, Any] = {"epochs": 2, "batch": 64, "limit_train": 128, "limit_test": 80}
SMOKE: Mapping[str, Any] = {"networks": ("resnet8",), "data": ("digits",), **SMOKE_SETTINGS}
SHORT: Mapping[str, Any] = {"networks": ("resnet18",), "data": CIFAR, **FAST, "epochs": 24}
PAPER: Mapping[str, Any] = {"networks": ("resnet18",), "data": CIFAR, **FAST}
DEMO: Mapping[str, Any] = {  # settings of the demo, and of methods at equal radii on digits
    "lr": 0.04,
    "warmup": 3,
    "weight_decay": 5e-4,
    "epochs": 22,
    "batch": 64,
    "label_smoothing": 0.0,
    "label_noise": 0.4,
    "noise_labels": "other",
}

ONE_THREAD = {"smoke": 1}  # a second thread would mostly wait
paper_recipe = partial(recipe, threads=ONE_THREAD, remarks={"smoke": "shows that it runs"})


def method_run(
    name: str,
    model: str,
    data: str,
    *,
    radii: str | None = None,
    arguments: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Run:
    """Return the run of a method, with its usual arguments for the data set, and the settings of the network.

    Args:
        name: one of :func:`variants`.
        model: the name of the network.
        data: the name of the data set.
        radii: another data set whose radii it uses.
        arguments: arguments of the method, added to the usual ones for the data set.
        settings: settings of the run.

    Example:
        >>> method_run("bsam-2", "pyramidnet110", "cifar100", epochs=3).arguments
        {'rho_max': 0.1, 'rho_min': 0.1, 'passes': 2}
    """
    variant = variants()[name]
    values = {**arguments_on(variant, radii or data), **(arguments or {})}
    return Run.of(variant.method, values, model=model, data=data, **{**settings, **NETWORK_SETTINGS.get(model, {})})


def grid(
    methods: Sequence[str],
    networks: Sequence[str],
    data: Sequence[str],
    axis: Sequence[Mapping[str, Any]] = ({},),
    **settings: Any,
) -> list[Run]:
    """Return a run for each network, data set, point of a further axis, and method.

    Args:
        methods: names of :func:`variants`.
        networks: the networks.
        data: the data sets.
        axis: further arguments of :func:`method_run`.
        settings: settings of all runs.
    """
    return [
        method_run(name, network, data_name, **settings, **point)
        for network in networks
        for data_name in data
        for point in axis
        for name in methods
    ]


@paper_recipe(
    "Test accuracy of every method",
    scales={
        "smoke": {**SMOKE, "networks": ("resnet8", "wide_resnet10_1", "pyramidnet8")},
        "short": SHORT,
        "paper": {**PAPER, "networks": ("resnet18", "wide_resnet28_10", "pyramidnet110")},
    },
    published="classification",
    tunable=True,
)
def classification(**scale: Any) -> list[Run]:
    """Return every method on every network and data set."""
    return grid(list(variants()), **scale)


@paper_recipe(
    "BSAM with different rho_min", scales={"smoke": SMOKE, "short": SHORT, "paper": PAPER}, published="rho-min"
)
def rho_min_study(**scale: Any) -> list[Plan]:
    """Return BSAM with rho_min from small to large and the data set's usual rho_max."""
    return _by_rho_min(grid(BSAMS, axis=[{"arguments": {"rho_min": rho_min}} for rho_min in RHO_MINS], **scale))


@paper_recipe(
    "Training with label noise",
    scales={"smoke": SMOKE, "short": SHORT, "paper": PAPER},
    published="label-noise",
    tunable=True,
)
def label_noise(**scale: Any) -> list[Plan]:
    """Return runs in which some of the training labels are drawn from all classes, as in the published tables."""
    runs = grid(TABLE_METHODS, axis=[{"label_noise": rate} for rate in NOISE_RATES], noise_labels="all", **scale)
    plans = []
    for run in runs:
        section = ", ".join(task_of(run).titles(run))
        plans.append(Plan(run, section=section, column=f"{run.settings()['label_noise']:.0%}"))
    return plans


@paper_recipe(
    "Loss and accuracy during training",
    scales={
        "smoke": {**SMOKE, "networks": ("wide_resnet10_1",)},
        "short": {**SHORT, "networks": ("wide_resnet28_10",), "data": ("cifar100",)},
        "paper": {**PAPER, "networks": ("wide_resnet28_10",), "data": ("cifar100",)},
    },
    published="classification",
)
def training_curves(**scale: Any) -> list[Run]:
    """Return the runs whose loss and accuracy are drawn over the epochs."""
    return grid(CURVE_METHODS, **scale)


PROBED = {
    "smoke": {**SMOKE, "probe": 1},
    "short": {**SHORT, "data": ("cifar100",), "probe": 20},
    "paper": {**PAPER, "data": ("cifar100",), "probe": 100},
}


@paper_recipe(
    "MaxS, MinS and BilS during training",
    scales=PROBED,
    published="classification",
    notes=["MaxS, MinS and BilS are measured at each method's radii; BSAM's rho_min falls with the learning rate."],
)
def sharpness_curves(**scale: Any) -> list[Run]:
    """Return runs with a probe, which records MaxS, MinS and BilS over the steps."""
    return grid(("sam", *BSAMS), **scale)


@paper_recipe("Cosine of g and g_min under three schedules of rho_min", scales=PROBED)
def gradient_conflict(**scale: Any) -> list[Plan]:
    """Return runs under three schedules of rho_min, with a probe, which records the cosine of g and g_min."""
    schedules = [{"rho_min": CONFLICT_START, "rho_min_floor": floor} for floor in CONFLICT_FLOORS]
    return _by_rho_min(grid(BSAMS, axis=[{"arguments": schedule} for schedule in schedules], **scale))


def _by_rho_min(runs: Sequence[Run]) -> list[Plan]:
    """Plan runs with a row for each variant of BSAM and each rho_min, or schedule of it."""
    plans = []
    for run in runs:
        start = run.arguments["rho_min"]
        floor = run.arguments.get("rho_min_floor")
        schedule = "" if floor is None else ", fixed" if floor == start else f" to {floor:g}"
        plans.append(Plan(run, row=f"{variant_of(run).title}, rho_min {start:g}{schedule}"))
    return plans


# Compiling the networks of fine-tuning takes as long as it saves.
TRANSFER: Mapping[str, Any] = {
    "networks": ("timm:efficientnet_b0", "timm:resnet50"),  # the paper's
    **FINE_TUNING.values,
    "weights": PRETRAINED,
    "precision": "bf16",
}


@paper_recipe(
    "Pretrained networks, fine-tuned",
    scales={
        "smoke": {  # small networks with random weights
            "networks": ("timm:test_efficientnet", "timm:test_resnet"),
            "data": ("digits",),
            **FINE_TUNING.values,
            **SMOKE_SETTINGS,
            "image_size": 32,
        },
        "short": {**TRANSFER, "data": ("flowers102", "oxford_pet")},  # the smallest data sets
        "paper": {**TRANSFER, "data": (*CIFAR, "flowers102", "stanford_cars", "oxford_pet")},
    },
    published="transfer",
    tunable=True,
)
def transfer(**scale: Any) -> list[Run]:
    """Return the networks of the transfer table on its data sets."""
    runs = grid(TABLE_METHODS, radii="cifar10", **scale)  # the paper uses the radius of CIFAR-10 on all of them
    return [replace(run, augment=augmentation_of(dataset_entry(run.data), run.model, run.image_size)) for run in runs]


# SimCC's authors evaluate with the flip test.
LARGE_POSE: Mapping[str, Any] = {
    "model": "simcc_resnet50",
    "weights": PRETRAINED,
    "precision": "bf16",
    "compile": True,
    "flip_test": True,
}
SMALL_POSE: Mapping[str, Any] = {
    "model": "simcc_resnet8",
    "image_size": 24,
    "simcc_sigma": 2.0,
    "lr": 0.015,
    "batch": 8,
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


def _pose_score(data: str) -> str:
    """Return the title of the score of a pose data set."""
    joints = dataset_entry(data).classes
    return next(score.title for skeleton, score in SCORES.items() if len(skeleton.joints) == joints)


def _pose_notes(data: str, **_: Any) -> list[str]:
    mean_pose = "Mean pose: each joint at its mean position in the boxes of the training set, without a network."
    return [*POSE_NOTES[_pose_score(data)], mean_pose]


@paper_recipe(
    "Human pose estimation with SimCC",
    scales={
        "smoke": {**SMALL_POSE, "data": "stick_figures", "epochs": 4, "limit_train": 240, "limit_test": 100},
        "short": {**LARGE_POSE, "data": "lspet", "epochs": 30},
        "paper": {**LARGE_POSE, "data": "mpii", "epochs": 210},
    },
    published="pose",
    tunable=True,
    notes=_pose_notes,
)
def pose(**settings: Any) -> list[Plan]:
    """Return Adam, SAM, SAM at BSAM's total radius, and BSAM.

    The runs on photographs begin with pretrained weights from a file.
    """
    # the paper does not state its radii for poses; we use those of CIFAR-10
    runs = [method_run(name, radii="cifar10", task="pose", **settings) for name in TABLE_METHODS]
    section = f"{' on '.join(task_of(runs[0]).titles(runs[0]))}, {_pose_score(runs[0].data)} in %"
    return [Plan(run, section=section, column="") for run in runs]


QUANTIZED_BITS = 4  # of weights and activations
FULL_PRECISION = "Full precision"  # the row of the float network
QUANTIZED_NETWORKS = ("resnet18", "mobilenet_v1")


def _quantization_notes(quantized_epochs: int, **_: Any) -> list[str]:
    return [
        f"{FULL_PRECISION}: the float network, trained with SGD. The rows below start from it and train "
        f"{quantized_epochs} more epochs, with {QUANTIZED_BITS}-bit weights and layer inputs (8 bits in the first "
        "and the last layer) and learned scales (LSQ).",
        "For quantized networks, λmax is computed at the quantized weights, with the straight-through estimator.",
    ]


@paper_recipe(
    "Quantization-aware training with 4 bits",
    scales={
        "smoke": {  # few samples, as Hessian products are slow; --tune holds out half of them
            **SMOKE,
            "networks": ("resnet8", "mobilenet_v1_small"),
            "limit_train": 12,
            "batch": 6,
            "quantized_epochs": 2,
        },
        "short": {**SHORT, "networks": QUANTIZED_NETWORKS, "data": ("cifar10",), "quantized_epochs": 12},
        "paper": {**PAPER, "networks": QUANTIZED_NETWORKS, "data": ("cifar10",), "quantized_epochs": 60},
    },
    published="quantization",
    tunable=True,
    notes=_quantization_notes,
)
def quantization(networks: Sequence[str], data: Sequence[str], quantized_epochs: int, **settings: Any) -> list[Plan]:
    """Return a float run with SGD for each network, each followed by the runs that quantize it and train it further."""
    quantized = {**settings, **QUANTIZED.values, "epochs": quantized_epochs, "weight_bits": QUANTIZED_BITS}
    plans = []
    for base in grid(["sgd"], networks, data, curvature=True, **settings):
        init = run_dir_name(base)
        runs = [base, *grid(TABLE_METHODS, [base.model], [base.data], init=init, curvature=True, **quantized)]
        column, title = task_of(base).titles(base)
        for run in runs:
            row = FULL_PRECISION if run.settings()["weight_bits"] is None else variant_of(run).title
            plans.append(Plan(run, section=f"{title}, W{QUANTIZED_BITS}A{QUANTIZED_BITS}", row=row, column=column))
    return plans


EQUAL_RADII: Mapping[str, Any] = {  # on CIFAR
    "model": "resnet18",
    "data": "cifar10",
    "totals": (0.05, 0.1, 0.2, 0.4),
    **FAST,
    "label_noise": 0.4,
    "noise_labels": "other",
}


@recipe(
    "Methods at equal total radii, 40 % wrong training labels",
    scales={
        "smoke": {"model": "digits_net", "data": "digits", "totals": (0.1, 0.2, 0.4, 0.6), **DEMO},  # a real study
        "short": {**EQUAL_RADII, "epochs": 24},
        "paper": EQUAL_RADII,
    },
    at_equal_radii=True,
    notes=[
        "Total radius: rho of SAM, rho_max + rho_min of BSAM, at the largest learning rate; BSAM's two radii are equal."
    ],
    threads=ONE_THREAD,
    workers={"smoke": 2},
)
def radius(totals: Sequence[float], **settings: Any) -> list[Plan]:
    """Return SGD and each method at each total radius.

    How much of a gain is due to the radius? To first order in the radii, SAM and BSAM correct the gradient in
    proportion to the total.
    """
    sgd = method_run("sgd", curvature=True, **settings)
    section = f"{', '.join(task_of(sgd).titles(sgd))}, {task_of(sgd).data_words(sgd)}"
    plans = [Plan(sgd, section=section)]
    for total in totals:
        equal = {"rho_max": total / 2, "rho_min": total / 2}
        follow = {"rho": total, "rho_floor": total / 2}
        for name, radii in {"sam": {"rho": total}, "sam-follow": follow, "bsam": equal, "bsam-2": equal}.items():
            run = method_run(name, arguments=radii, curvature=True, **settings)
            plans.append(Plan(run, section=section, row=f"{variant_of(run).title}, total radius {total:g}"))
    return plans
