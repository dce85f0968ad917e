"""Settings that are chosen before the final runs, without the test set."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...methods import METHODS
from ..tasks.settings import Split
from ..training.config import BASE, Run
from ..training.run_dir import run_dir_name

TUNING_SEED = 10_000  # added to the seed, so that tuning runs share no random numbers with final runs
TUNING_FACTORS = (0.5, 1, 2, 4)  # multiples of a run's radii
LR_FACTORS = (0.3, 1, 3)  # multiples of the learning rate
WEIGHT_DECAY_FACTORS = (0.1, 1, 10, 100)  # weight decay helps most where SAM does, far above the usual values
WITHOUT_WEIGHT_DECAY = (0, 1e-3, 1e-2)  # the candidates if it is 0


@dataclass(frozen=True)
class Tuning:
    """How settings are chosen before the final runs: by the score after the last epoch on a split other than test.

    Args:
        settings: called with a run; returns its candidates, each as fields of :class:`Run` by name.
        split: the split that they are evaluated on.
        labels: the names of the candidates in a table.
        seeds: the number of seeds that each candidate is trained with.
    """

    settings: Callable[[Run], Sequence[Mapping[str, Any]]]
    split: Split = "validation"
    labels: tuple[str, ...] = ()
    seeds: int = 1

    def run(self, run: Run, number: int = 0, **candidate: Any) -> Run:
        """Return a tuning run, which measures nothing but its score, with the tuning seed of this number."""
        unset: dict[str, Any] = {"radius": None, "curvature": False, "surface": None, "probe": None, "limit_test": None}
        return replace(run, seed=run.seed + TUNING_SEED + number, eval_split=self.split, **unset, **candidate)

    def runs(self, run: Run, runs: Sequence[Run] = ()) -> list[list[Run]]:
        """Return the tuning runs of each candidate, one for each tuning seed.

        Args:
            run: the run whose settings are chosen.
            runs: the runs of the recipe. If ``run`` starts from the weights of one of them, its tuning runs start
                from a tuning run of that one, so that no weights were trained on the evaluation data.
        """
        start = next((earlier for earlier in runs if run_dir_name(earlier) == run.init), None)

        def trial(number: int, candidate: Mapping[str, Any]) -> Run:
            trial_run = self.run(run, number, **candidate)
            return trial_run if start is None else replace(trial_run, init=run_dir_name(self.run(start, number)))

        return [[trial(number, candidate) for number in range(self.seeds)] for candidate in self.settings(run)]


def radius_tuning(split: Split = "holdout", seeds: int = 1) -> Tuning:
    """Return a tuning that chooses among multiples of a run's radii."""
    return Tuning(radius_candidates, split, tuple(f"x {factor:g}" for factor in TUNING_FACTORS), seeds)


def base_candidates(run: Run) -> list[dict[str, Any]]:
    """Return all pairs of multiples of a run's learning rate and weight decay.

    Example:
        >>> [(c["lr"], c["weight_decay"]) for c in base_candidates(Run("sgd", lr=0.1))][:5]
        [(0.03, 0.0001), (0.03, 0.001), (0.03, 0.01), (0.03, 0.1), (0.1, 0.0001)]
    """
    rates = [_product(run.lr, factor) for factor in LR_FACTORS]
    decays = [_product(run.weight_decay, factor) for factor in WEIGHT_DECAY_FACTORS]
    return [
        {"lr": lr, "weight_decay": decay}
        for lr in dict.fromkeys(rates)
        for decay in (decays if run.weight_decay else WITHOUT_WEIGHT_DECAY)
    ]


def _product(value: float, factor: float) -> float:
    return float(f"{value * factor:.6g}")  # 0.03 instead of 0.030000000000000002


def radius_candidates(run: Run) -> list[dict[str, Any]]:
    """Return, for each factor, the run's arguments with all radii (SAF, MESA: the loss weight) multiplied by it."""
    if run.method == BASE:
        return []
    defaults = inspect.signature(METHODS[run.method]).parameters
    names = [name for name in defaults if name.startswith("rho")] or ["lam"]
    values = {name: run.arguments.get(name, defaults[name].default) for name in names}
    return [
        {"arguments": {**run.arguments, **{name: factor * value for name, value in values.items() if value}}}
        for factor in TUNING_FACTORS
    ]


def differing_names(candidates: Sequence[Mapping[str, Any]]) -> set[str]:
    """Return the names of the settings and method arguments that differ between candidates."""
    tried = [{**candidate, **candidate.get("arguments", {})} for candidate in candidates]
    return {name for values in tried for name in values if values[name] != tried[0][name]} - {"arguments"}


def chosen_text(chosen: Mapping[str, Any] | None) -> str:
    """Return the settings that tuning chose as text.

    Example:
        >>> (
        ...     chosen_text({"rho_max": 0.1, "rho_min": 0.1}),
        ...     chosen_text({"weight_decay": 0.1}),
        ...     chosen_text(None),
        ... )
        ('rho_max 0.1, rho_min 0.1', 'weight decay 0.1', '-')
    """
    return ", ".join(f"{settings_text([name])} {value:g}" for name, value in (chosen or {}).items()) or "-"


def settings_text(names: Sequence[str]) -> str:
    """Return the names of settings in words.

    Example:
        >>> settings_text(["lr", "weight_decay"])
        'lr and weight decay'
    """
    return " and ".join(name.replace("weight_decay", "weight decay") for name in names)
