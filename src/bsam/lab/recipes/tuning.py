"""The candidates of tuning: multiples of radii, and of learning rate and weight decay."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from ..config import Run
from .planning import Plan
from .variants import all_arguments

TUNING_FACTORS = (0.5, 1, 2, 4)  # multiples of a run's radii
LR_FACTORS = (0.3, 1, 3)  # multiples of the learning rate
WEIGHT_DECAY_FACTORS = (0.1, 1, 10, 100)  # weight decay helps most where SAM does, far above the usual values
WITHOUT_WEIGHT_DECAY = (0, 1e-3, 1e-2)  # the candidates if it is 0


def base_candidates(run: Run) -> list[dict[str, Any]]:
    """Return all pairs of multiples of a run's learning rate and weight decay.

    Example:
        >>> [(c["lr"], c["weight_decay"]) for c in base_candidates(Run("sgd", lr=0.1))][:5]
        [(0.03, 0.0001), (0.03, 0.001), (0.03, 0.01), (0.03, 0.1), (0.1, 0.0001)]
    """
    rates = dict.fromkeys(float(f"{run.lr * factor:.6g}") for factor in LR_FACTORS)  # 0.03, not 0.030000000000000002
    decays = [float(f"{run.weight_decay * factor:.6g}") for factor in WEIGHT_DECAY_FACTORS]
    tried = decays if run.weight_decay else WITHOUT_WEIGHT_DECAY
    return [{"lr": lr, "weight_decay": decay} for lr in rates for decay in tried]


def radius_candidates(run: Run) -> tuple[Mapping[str, Any], ...]:
    """Return, for each factor, the run's arguments with all radii (SAF, MESA: the loss weight) multiplied by it."""
    values = {**all_arguments(run.method, {}), **run.arguments}
    radii = [name for name in values if name.startswith("rho")] or ["lam"] * ("lam" in values)
    scaled = {name: values[name] for name in radii if values[name]}
    return tuple(
        {"arguments": {**run.arguments, **{name: factor * value for name, value in scaled.items()}}}
        for factor in (TUNING_FACTORS if radii else ())
    )


def with_tuned_radii(plans: Iterable[Plan]) -> list[Plan]:
    """Return plans of runs whose radii are chosen from multiples of theirs."""
    return [replace(plan, candidates=radius_candidates(plan.run)) for plan in plans]
