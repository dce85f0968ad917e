"""The paper's experiments on CIFAR: one grid of networks, data sets and methods, with different axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..config import Run
from .experiments import recipe
from .planning import Plan, titles_of
from .scales import Scale
from .variants import BSAMS, MATCHED, variant_of, variants

MAIN = "resnet18"
CURVES = ("sgd", "sam", *BSAMS)  # the methods in the paper's curves
COMPARED = ("sgd", "sam", *MATCHED, *BSAMS)  # those and SAM at BSAM's total radius
RHO_MINS = (0.01, 0.025, 0.05, 0.1, 0.25)  # the paper's
NOISE_RATES = (0.2, 0.4, 0.6, 0.8)
CONFLICT_START = 0.1  # rho_min at the start, in the figure of the gradient conflict ...
CONFLICT_FLOORS = (0.1, 0.05, 0.0)  # ... and at the end: fixed, halved, the paper's choice


def grid(
    scale: Scale,
    methods: Sequence[str],
    networks: Sequence[str] = (MAIN,),
    data: Sequence[str] | None = None,
    axis: Sequence[dict[str, Any]] = ({},),
) -> list[Run]:
    """Return a run for each network, data set, point of a further axis, and method.

    Args:
        scale: the scale.
        methods: names of :func:`variants`.
        networks: the networks.
        data: the data sets; None takes those of the scale.
        axis: settings of the runs; ``arguments`` are added to those of the method.
    """
    return [
        scale.run(variants()[name], network, data_name, **point)
        for network in networks
        for data_name in (scale.data if data is None else data)
        for point in axis
        for name in methods
    ]


@recipe("Test accuracy of every method", published="classification", tunable=True)
def classification(scale: Scale) -> list[Run]:
    """Return every method on every network and data set."""
    return grid(scale, list(variants()), scale.networks)


@recipe("BSAM with different rho_min", published="rho-min")
def rho_min_study(scale: Scale) -> list[Plan]:
    """Return BSAM with rho_min from small to large and the data set's usual rho_max."""
    return _by_rho_min(grid(scale, BSAMS, axis=[{"arguments": {"rho_min": rho_min}} for rho_min in RHO_MINS]))


@recipe("Training with label noise", published="label-noise", tunable=True)
def label_noise(scale: Scale) -> list[Plan]:
    """Return runs in which some of the training labels are drawn from all classes, as in the published tables."""
    noise = [{"label_noise": rate, "noise_labels": "all"} for rate in NOISE_RATES]
    runs = grid(scale, COMPARED, axis=noise)
    return [Plan(run, section=", ".join(titles_of(run)), column=f"{run.settings()['label_noise']:.0%}") for run in runs]


@recipe("Loss and accuracy during training", published="classification")
def training_curves(scale: Scale) -> list[Run]:
    """Return the runs whose loss and accuracy are drawn over the epochs."""
    return grid(scale, CURVES, ["wide_resnet28_10"], scale.data[-1:])


@recipe(
    "MaxS, MinS and BilS during training",
    published="classification",
    notes=["MaxS, MinS and BilS are measured at each method's radii; BSAM's rho_min falls with the learning rate."],
)
def sharpness_curves(scale: Scale) -> list[Run]:
    """Return runs with a probe, which records MaxS, MinS and BilS over the steps."""
    return grid(scale, ("sam", *BSAMS), data=scale.data[-1:], axis=[{"probe": scale.probe}])


@recipe("Cosine of g and g_min under three schedules of rho_min")
def gradient_conflict(scale: Scale) -> list[Plan]:
    """Return runs under three schedules of rho_min, with a probe, which records the cosine of g and g_min."""
    schedules = [{"rho_min": CONFLICT_START, "rho_min_floor": floor} for floor in CONFLICT_FLOORS]
    axis = [{"arguments": schedule, "probe": scale.probe} for schedule in schedules]
    return _by_rho_min(grid(scale, BSAMS, data=scale.data[-1:], axis=axis))


def _by_rho_min(runs: Sequence[Run]) -> list[Plan]:
    """Plan runs with a row for each variant of BSAM and each rho_min, or schedule of it."""
    plans = []
    for run in runs:
        start, floor = run.arguments["rho_min"], run.arguments.get("rho_min_floor")
        schedule = "" if floor is None else ", fixed" if floor == start else f" to {floor:g}"
        plans.append(Plan(run, row=f"{variant_of(run).title}, rho_min {start:g}{schedule}"))
    return plans
