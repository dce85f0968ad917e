"""The paper's experiments with image classification: on CIFAR, fine-tuned, and quantized to 4 bits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..data import dataset_entry
from ..models import model_entry
from ..models.weight_loading import PRETRAINED
from ..training.config import FINE_TUNING, QUANTIZED, Run
from ..training.run_dir import run_dir_name
from .columns import TOP_EIGENVALUE, TOP_EIGENVALUE_NOTE, TableCell
from .experiments import Axis, Recipe
from .paper import (
    CLASSIFICATION,
    LABEL_NOISE,
    NOISE_RATES,
    QUANTIZATION,
    RHO_MIN_STUDY,
    RHO_MINS,
    TRANSFER,
    TRANSFER_DATA,
)
from .scales import Scale, scale_of
from .variants import BSAMS, MATCHED, arguments, variant_of, variants

CURVES = ("sgd", "sam", *BSAMS)  # the methods in the paper's curves
COMPARED = ("sgd", "sam", *MATCHED, *BSAMS)  # those and SAM at BSAM's total radius
CONFLICT_START = 0.1  # rho_min at the start, in the figure of the gradient conflict ...
CONFLICT_FLOORS = (0.1, 0.05, 0.0)  # ... and at the end: fixed, halved, the paper's choice
MAIN = "resnet18"
FINE_TUNED: Mapping[str, Mapping[str, Any]] = {  # the paper's networks, with settings that differ from FINE_TUNING
    "timm:efficientnet_b0": {"weight_decay": 1e-5},
    "timm:resnet50": {},
}
SMALL_TIMM = {"timm:efficientnet_b0": "timm:test_efficientnet", "timm:resnet50": "timm:test_resnet"}
SMALLEST_DATA = ("flowers102", "oxford_pet")
QUANTIZED_NETWORKS = ("resnet18", "mobilenet_v1")
BITS = 4  # of weights and activations
QUANTIZED_EPOCHS = {"smoke": 2, "short": 12, "paper": 60}  # of the quantized runs; float runs have those of the scale
SMOKE = {"limit_train": 12, "batch": 6}  # few samples, as Hessian products are slow; --tune holds out half of them
FULL_PRECISION = "Full precision"  # the row of the float network


def classification(scale: Scale) -> list[Run]:
    """Return every method on every network and data set."""
    pairs = [(network, data) for network in scale.networks for data in scale.data]
    return [scale.run(variant, network, data) for network, data in pairs for variant in variants().values()]


def rho_min_study(scale: Scale) -> list[Run]:
    """Return BSAM with rho_min from small to large and the data set's usual rho_max."""
    return [
        scale.run(variants()[name], MAIN, data, arguments={"rho_min": rho_min})
        for data in scale.data
        for rho_min in RHO_MINS
        for name in BSAMS
    ]


def label_noise(scale: Scale) -> list[Run]:
    """Return runs in which some of the training labels are drawn from all classes, as in the published tables."""
    return [
        scale.run(variants()[name], MAIN, data, label_noise=rate, noise_labels="all")
        for data in scale.data
        for rate in NOISE_RATES
        for name in COMPARED
    ]


def training_curves(scale: Scale) -> list[Run]:
    """Return the runs whose loss and accuracy are drawn over the epochs."""
    return [scale.run(variants()[name], "wide_resnet28_10", scale.data[-1]) for name in CURVES]


def sharpness_curves(scale: Scale) -> list[Run]:
    """Return runs with a probe, which records MaxS, MinS and BilS over the steps."""
    return [scale.run(variants()[name], MAIN, scale.data[-1], probe=scale.probe) for name in ("sam", *BSAMS)]


def gradient_conflict(scale: Scale) -> list[Run]:
    """Return runs under three schedules of rho_min, with a probe, which records the cosine of g and g_min."""
    schedules = [{"rho_min": CONFLICT_START, "rho_min_floor": floor} for floor in CONFLICT_FLOORS]
    settings: dict[str, Any] = {"network": MAIN, "data": scale.data[-1], "probe": scale.probe}
    return [scale.run(variants()[name], arguments=schedule, **settings) for schedule in schedules for name in BSAMS]


def transfer(scale: Scale) -> list[Run]:
    """Return the networks of the transfer table on its data sets.

    At the scale ``short`` these are the two smallest data sets, at ``smoke`` digits, with small networks that begin
    with random weights.
    """
    shared: dict[str, Any] = {"weights": PRETRAINED, "precision": "bf16"}  # compiling takes as long as it saves
    data: Sequence[str] = SMALLEST_DATA if scale.name == "short" else TRANSFER_DATA
    if scale.stand_ins:
        shared, data = {**scale.settings, "image_size": 32}, scale.data
    return [
        Run(
            variant.method,
            arguments(variant, "cifar10"),  # the paper uses the radius of CIFAR-10 on all of them
            model=SMALL_TIMM[network] if scale.stand_ins else network,
            data=name,
            **{**FINE_TUNING, **settings, **shared},
        )
        for network, settings in FINE_TUNED.items()
        for name in data
        for variant in (variants()[name] for name in COMPARED)
    ]


def quantization(scale: Scale) -> list[Run]:
    """Return a float run with SGD for each network, each followed by the runs that quantize it and train it further."""
    data, runs = scale.data[0], []
    common = {"curvature": True, **(SMOKE if scale.name == "smoke" else {})}
    quantized = {**QUANTIZED, **common, "epochs": QUANTIZED_EPOCHS[scale.name], "weight_bits": BITS}
    for network in QUANTIZED_NETWORKS:
        base = scale.run(variants()["sgd"], network, data, **common)
        init = run_dir_name(base)
        runs += [base, *(scale.run(variants()[name], network, data, init=init, **quantized) for name in COMPARED)]
    return runs


def by_rho_min(run: Run) -> TableCell:
    """Place a run: a section per variant of BSAM, a row per rho_min or schedule of it, a column per data set."""
    start, floor = run.arguments["rho_min"], run.arguments.get("rho_min_floor")
    schedule = "" if floor is None else ", fixed" if floor == start else f" to {floor:g}"
    section = f"{model_entry(run.model).title}, {variant_of(run).title}"
    return TableCell(section, f"{start:g}{schedule}", dataset_entry(run.data).title)


def by_noise(run: Run) -> TableCell:
    """Place a run: a section per data set, a row per method, a column per rate of label noise."""
    section = f"{model_entry(run.model).title}, {dataset_entry(run.data).title}"
    return TableCell(section, variant_of(run).title, f"{run.label_noise:.0%}")


def by_precision(run: Run) -> TableCell:
    """Place a run: a section per data set, a row for the float network and one per method, a column per network."""
    row = FULL_PRECISION if run.weight_bits is None else variant_of(run).title
    return TableCell(f"{dataset_entry(run.data).title}, W{BITS}A{BITS}", row, model_entry(run.model).title)


def quantization_notes(run: Run) -> list[str]:
    """Return the lines below the table that contains this float run.

    Example:
        >>> quantization_notes(quantization(scale_of("short"))[0])[0]  # doctest: +ELLIPSIS
        'Full precision: the float network, trained with SGD. The rows below start from it and train 12 more ...'
    """
    scales = {scale_of(name).settings.get("epochs", Run.epochs): name for name in QUANTIZED_EPOCHS}
    more = QUANTIZED_EPOCHS[scales[run.epochs]]
    return [
        f"{FULL_PRECISION}: the float network, trained with SGD. The rows below start from it and train {more} more "
        f"epochs, with {BITS}-bit weights and layer inputs (8 bits in the first and the last layer) and learned scales "
        "(LSQ).",
        f"{TOP_EIGENVALUE_NOTE} For quantized networks it is computed at the quantized weights, with the "
        "straight-through estimator.",
    ]


IMAGE_RECIPES = (
    Recipe(
        "classification", "Test accuracy of every method", classification, published_table=CLASSIFICATION, tunable=True
    ),
    Recipe(
        "rho-min-study",
        "BSAM with different rho_min",
        rho_min_study,
        by_rho_min,
        rows="rho_min",
        published_table=RHO_MIN_STUDY,
        figures=("accuracy_lines",),
        axis=Axis("rho_min at the start", lambda run: run.arguments["rho_min"], log=True),
    ),
    Recipe(
        "label-noise",
        "Training with label noise",
        label_noise,
        by_noise,
        published_table=LABEL_NOISE,
        figures=("accuracy_lines",),
        axis=Axis("label noise, %", lambda run: 100 * run.label_noise),
        tunable=True,
    ),
    Recipe(
        "training-curves",
        "Loss and accuracy during training",
        training_curves,
        published_table=CLASSIFICATION,
        figures=("training_curves",),
    ),
    Recipe(
        "sharpness-curves",
        "MaxS, MinS and BilS during training",
        sharpness_curves,
        published_table=CLASSIFICATION,
        figures=("sharpness_curves",),
        notes=lambda run: (
            "MaxS, MinS and BilS are measured at each method's radii; BSAM's rho_min falls with the learning rate.",
        ),
    ),
    Recipe(
        "gradient-conflict",
        "Cosine of g and g_min under three schedules of rho_min",
        gradient_conflict,
        by_rho_min,
        rows="rho_min",
        figures=("gradient_conflict",),
    ),
    Recipe("transfer", "Pretrained networks, fine-tuned", transfer, published_table=TRANSFER, tunable=True),
)

QUANTIZATION_RECIPE = Recipe(
    "quantization",
    "Quantization-aware training with 4 bits",
    quantization,
    by_precision,
    published_table=QUANTIZATION,
    details=(TOP_EIGENVALUE,),
    notes=quantization_notes,
    tunable=True,
)
