"""Settings that are chosen before the final runs, without the test set."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..methods import METHODS
from ..tasks.settings import Split
from ..training.config import BASE, Run
from ..training.run_dir import run_dir_name

TUNING_SEED = 10_000  # added to the seed, so that tuning runs share no random numbers with final runs
TUNING_FACTORS = (0.5, 1, 2, 4)  # multiples of a run's radii


@dataclass(frozen=True)
class Tuning:
    """How settings are chosen before the final runs: by the score after the last epoch on a split other than test.

    Args:
        settings: called with a run; returns its candidates, each as fields of :class:`Run` by name.
        split: the split that they are evaluated on.
        labels: the names of the candidates in a table.
    """

    settings: Callable[[Run], Sequence[Mapping[str, Any]]]
    split: Split = "validation"
    labels: tuple[str, ...] = ()

    def run(self, run: Run, **candidate: Any) -> Run:
        """Return a tuning run, which measures nothing but its score."""
        unset: dict[str, Any] = {"radius": None, "curvature": False, "surface": None, "probe": None, "limit_test": None}
        return replace(run, seed=run.seed + TUNING_SEED, eval_split=self.split, **unset, **candidate)

    def runs(self, run: Run, runs: Sequence[Run]) -> list[Run]:
        """Return a tuning run for each candidate.

        Args:
            run: the run whose settings are chosen.
            runs: the runs of the recipe. If ``run`` starts from the weights of one of them, its tuning runs start
                from a tuning run of that one, so that no weights were trained on the evaluation data.
        """
        trials = [self.run(run, **candidate) for candidate in self.settings(run)]
        initial = [run_dir_name(self.run(earlier)) for earlier in runs if run_dir_name(earlier) == run.init]
        return [replace(trial, init=initial[0]) for trial in trials] if initial else trials


def radius_tuning() -> Tuning:
    """Return a tuning that chooses among multiples of a run's radii by the score on held-out training samples."""
    return Tuning(radius_candidates, "holdout", tuple(f"x {factor:g}" for factor in TUNING_FACTORS))


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


def differing(candidates: Sequence[Mapping[str, Any]]) -> set[str]:
    """Return the names of the settings and method arguments that differ between candidates."""
    tried = [{**candidate, **candidate.get("arguments", {})} for candidate in candidates]
    return {name for values in tried for name in values if values[name] != tried[0][name]} - {"arguments"}
