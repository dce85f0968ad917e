"""Methods at equal total radii, with 40 % wrong labels: how much of a gain is due to the radius?

The total radius is rho for SAM and rho_max + rho_min for BSAM: to first order in the radii, both methods correct the
gradient in proportion to it.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from ..data import dataset_entry
from ..models import model_entry
from ..training.config import BASE, Run
from ..training.run_dir import RunState
from .columns import MEMORISED, TOP_EIGENVALUE, TOP_EIGENVALUE_NOTE, CellSummary, TableCell, score_of
from .experiments import Recipe
from .image_recipes import MAIN
from .scales import Scale
from .variants import BSAMS, variant_of, variants

NOISE = 0.4
TOTALS = {"digits": (0.1, 0.2, 0.4, 0.6)}  # total radii, by data set
DEFAULT_TOTALS = (0.05, 0.1, 0.2, 0.4)  # for all others
METHODS = ("sam", "sam-follow", "bsam", "bsam-2")
OTHERS = (("SAM (follow)", "sam-follow", 1), ("SAM", "sam", 1), ("SAM at rho_max", "sam", 0.5))  # shares of the total
NOTES = (
    "Total radius: rho of SAM, rho_max + rho_min of BSAM, at the largest learning rate; BSAM's two radii are equal.",
    "Memorised: the share of the wrong training labels that the network predicts after the last epoch, in %.",
    TOP_EIGENVALUE_NOTE,
)


def radius_study(scale: Scale) -> list[Run]:
    """Return SGD and each method at each total radius, on the first data set of the scale."""
    data, network = scale.data[0], MAIN if MAIN in scale.networks else scale.networks[0]
    settings: dict[str, Any] = {"label_noise": NOISE, "noise_labels": "other", "curvature": True}
    runs = [
        scale.run(variants()[name], network, data, arguments=radii(name, total), **settings)
        for total in TOTALS.get(data, DEFAULT_TOTALS)
        for name in METHODS
    ]
    return [scale.run(variants()["sgd"], network, data, **settings), *runs]


def radii(name: str, total: float) -> dict[str, float]:
    """Return the arguments that give a method this total radius.

    Example:
        >>> radii("bsam-2", 0.2), radii("sam-follow", 0.2)
        ({'rho_max': 0.1, 'rho_min': 0.1}, {'rho': 0.2, 'rho_floor': 0.1})
    """
    if name.startswith("bsam"):
        return {"rho_max": total / 2, "rho_min": total / 2}
    return {"rho": total, "rho_floor": total / 2} if name == "sam-follow" else {"rho": total}


def total_radius(run: Run) -> float:
    """Return the total radius of a run at the largest learning rate; 0 for the base optimizer alone."""
    if run.method == BASE:
        return 0.0
    names = ("rho_max", "rho_min") if run.method == "bsam" else ("rho",)
    return float(sum(run.arguments[name] for name in names))


def by_radius(run: Run) -> TableCell:
    """Place a run: a section per total radius, a row per method."""
    network, data = model_entry(run.model).title, dataset_entry(run.data).title
    section = f"{network}, {data}, {run.noise_text()}, total radius {total_radius(run):g}"
    return TableCell(section, variant_of(run).title, data)


def radius_findings(_: Sequence[CellSummary], states: Sequence[RunState]) -> list[str]:
    """Compare BSAM with SAM over shared seeds, first at equal total radius, then with SAM's rho equal to rho_max."""
    scores: dict[tuple[str, float], dict[int, float]] = {}
    for state in states:
        if state.finished and state.run.method != BASE:
            key = variant_of(state.run).name, round(total_radius(state.run), 9)
            scores.setdefault(key, {})[state.run.seed] = score_of(state)
    lines = []
    for (name, total), ours in scores.items():
        if name in BSAMS:
            differences = [
                f"minus {title} {text}"
                for title, variant, share in OTHERS
                if (text := _difference(ours, scores.get((variant, round(share * total, 9)), {})))
            ]
            if differences:
                lines.append(f"{variants()[name].title}, total radius {total:g}: {'; '.join(differences)}.")
    if lines:
        lines.insert(0, "Differences in points, mean ± standard error over the shared seeds (number of seeds):")
    return lines


def _difference(ours: Mapping[int, float], theirs: Mapping[int, float]) -> str:
    gaps = [ours[seed] - theirs[seed] for seed in ours if seed in theirs]
    if not gaps:
        return ""
    error = f" ± {statistics.stdev(gaps) / len(gaps) ** 0.5:.1f}" if len(gaps) > 1 else ""
    return f"{statistics.fmean(gaps):+.1f}{error} ({len(gaps)})"


RADIUS_RECIPE = Recipe(
    "radius",
    "Methods at equal total radii, 40 % wrong training labels",
    radius_study,
    by_radius,
    figures=("radius",),
    details=(MEMORISED, TOP_EIGENVALUE),
    notes=lambda run: NOTES,
    findings=radius_findings,
    smoke="demo",
)
