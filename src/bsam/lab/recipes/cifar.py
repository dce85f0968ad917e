"""The paper's experiments on CIFAR."""

from __future__ import annotations

from ..data import dataset_entry
from ..models import model_entry
from ..training.config import Run
from .cells import TableCell
from .experiments import Axis, Recipe
from .paper import CLASSIFICATION, LABEL_NOISE, NOISE_RATES, RHO_MIN_STUDY, RHO_MINS
from .scales import Scale, scale_of
from .variants import BSAMS, MATCHED, variant_of, variants

CURVES = ("sgd", "sam", *BSAMS)  # the methods in the paper's curves
COMPARED = ("sgd", "sam", *MATCHED, *BSAMS)  # those and SAM at BSAM's total radius
CONFLICT_START = 0.1  # rho_min at the start, in the figure of the gradient conflict ...
CONFLICT_FLOORS = (0.1, 0.05, 0.0)  # ... and at the end: fixed, halved, the paper's choice
MAIN = "resnet18"


def classification(scale: Scale | str) -> list[Run]:
    """Return every method on every network and data set."""
    scale = scale_of(scale)
    pairs = [(network, data) for network in scale.networks for data in scale.data]
    return [scale.run(variant, network, data) for network, data in pairs for variant in variants().values()]


def rho_min_study(scale: Scale | str) -> list[Run]:
    """Return BSAM with rho_min from small to large and the data set's usual rho_max."""
    scale = scale_of(scale)
    return [
        scale.run(variants()[name], MAIN, data, arguments={"rho_min": rho_min})
        for data in scale.data
        for rho_min in RHO_MINS
        for name in BSAMS
    ]


def label_noise(scale: Scale | str) -> list[Run]:
    """Return runs in which some of the training labels are drawn from all classes, as in the published tables."""
    scale = scale_of(scale)
    return [
        scale.run(variants()[name], MAIN, data, label_noise=rate, noise_labels="all")
        for data in scale.data
        for rate in NOISE_RATES
        for name in COMPARED
    ]


def training_curves(scale: Scale | str) -> list[Run]:
    """Return the runs whose loss and accuracy are drawn over the epochs."""
    scale = scale_of(scale)
    return [scale.run(variants()[name], "wide_resnet28_10", scale.data[-1]) for name in CURVES]


def sharpness_curves(scale: Scale | str) -> list[Run]:
    """Return runs with a probe, which records MaxS, MinS and BilS over the steps."""
    scale = scale_of(scale)
    return [scale.run(variants()[name], MAIN, scale.data[-1], probe=scale.probe) for name in ("sam", *BSAMS)]


def gradient_conflict(scale: Scale | str) -> list[Run]:
    """Return runs under three schedules of rho_min, with a probe, which records the cosine of g and g_min."""
    scale = scale_of(scale)
    schedules = [{"rho_min": CONFLICT_START, "rho_min_floor": floor} for floor in CONFLICT_FLOORS]
    return [
        scale.run(variants()[name], MAIN, scale.data[-1], probe=scale.probe, arguments=schedule)
        for schedule in schedules
        for name in BSAMS
    ]


def by_rho_min(run: Run) -> TableCell:
    """Place a run: a section per variant of BSAM, a row per rho_min, a column per data set."""
    section = f"{model_entry(run.model).title}, {variant_of(run).title}"
    return TableCell(section, f"{run.arguments['rho_min']:g}", dataset_entry(run.data).title)


def by_noise(run: Run) -> TableCell:
    """Place a run: a section per data set, a row per method, a column per rate of label noise."""
    section = f"{model_entry(run.model).title}, {dataset_entry(run.data).title}"
    return TableCell(section, variant_of(run).title, f"{run.label_noise:.0%}")


def by_schedule(run: Run) -> TableCell:
    """Place a run: a section per variant of BSAM, a row per schedule of rho_min."""
    section = f"{model_entry(run.model).title}, {variant_of(run).title}"
    return TableCell(section, schedule_of(run), dataset_entry(run.data).title)


def schedule_of(run: Run) -> str:
    """Describe the schedule of rho_min."""
    start, floor = run.arguments["rho_min"], run.arguments["rho_min_floor"]
    return f"{start:g}, fixed" if start == floor else f"{start:g} to {floor:g}"


CIFAR_RECIPES = (
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
        by_schedule,
        rows="rho_min",
        figures=("gradient_conflict",),
    ),
)
