"""Methods at equal total radii, with 40 % flipped labels: how much is the method, and how much the radius?

The total radius is SAM's rho, and rho_max + rho_min of BSAM: to first order in the radii both correct the gradient in
proportion to it.
"""

from __future__ import annotations

from typing import Any

from ..data import dataset_entry
from ..models import model_entry
from ..training.config import BASE, Run
from ..training.loop import CURVATURE_SAMPLES
from .experiments import MAIN, TableCell
from .scales import Scale, scale_of
from .variants import variant_of, variants

NOISE = 0.4
TOTALS = {"digits": (0.1, 0.2, 0.4, 0.6), "cifar10": (0.05, 0.1, 0.2, 0.4)}  # total radii, by data set
METHODS = ("sam", "sam-follow", "bsam", "bsam-2")
NOTES = (
    "Total radius: rho of SAM, rho_max + rho_min of BSAM, at the largest learning rate; BSAM's two radii are equal.",
    "Memorised: the share of the flipped training labels that the network predicts after the last epoch, in %.",
    f"λmax: the largest eigenvalue of the Hessian on {CURVATURE_SAMPLES} training samples, with the labels used in "
    "training.",
)


def radius_study(scale: Scale | str) -> list[Run]:
    """Return SGD, and each method at each total radius, on the first data set of the scale."""
    scale = scale_of(scale)
    data, network = scale.data[0], MAIN if MAIN in scale.networks else scale.networks[0]
    settings: dict[str, Any] = {"label_noise": NOISE, "curvature": True}
    runs = [
        scale.run(variants()[name], network, data, arguments=radii(name, total), **settings)
        for total in TOTALS[data]
        for name in METHODS
    ]
    return [scale.run(variants()["sgd"], network, data, **settings), *runs]


def radii(name: str, total: float) -> dict[str, float]:
    """Return the arguments of a method that give it a total radius.

    Example:
        >>> radii("bsam-2", 0.2), radii("sam-follow", 0.2)
        ({'rho_max': 0.1, 'rho_min': 0.1}, {'rho': 0.2, 'rho_floor': 0.1})
    """
    if name.startswith("bsam"):
        return {"rho_max": total / 2, "rho_min": total / 2}
    return {"rho": total, "rho_floor": total / 2} if name == "sam-follow" else {"rho": total}


def total_radius(run: Run) -> float:
    """Return the total radius of a run of this study, at the largest learning rate; 0 without a method."""
    if run.method == BASE:
        return 0.0
    names = ("rho_max", "rho_min") if run.method == "bsam" else ("rho",)
    return float(sum(run.arguments[name] for name in names))


def by_radius(run: Run) -> TableCell:
    """A section for each total radius, a row for each method."""
    network, data = model_entry(run.model).title, dataset_entry(run.data).title
    section = f"{network}, {data}, {run.label_noise:.0%} flipped labels, total radius {total_radius(run):g}"
    return TableCell(section, variant_of(run).title, data)
