"""Settings that are chosen before the final runs, on data that is not the test set."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..methods import METHODS
from ..tasks.settings import Split
from ..training.config import BASE, Run
from ..training.run_dir import run_dir_name

TUNING_SEED = 10_000  # added to the seed: a tuning run shares its random numbers with no final run
TUNING_FACTORS = (0.5, 1, 2, 4)  # on the paper's radii


@dataclass(frozen=True)
class Tuning:
    """Settings that are chosen before the final runs, by the score after the last epoch on data that is not the test
    set.

    Args:
        settings: called with a run; returns the candidates for it, each as fields of :class:`Run` by name.
        split: the data that they are evaluated on.
        labels: names of the candidates in a table.
    """

    settings: Callable[[Run], Sequence[Mapping[str, Any]]]
    split: Split = "validation"
    labels: tuple[str, ...] = ()

    def run(self, run: Run, **candidate: Any) -> Run:
        """Return a tuning run. It does not see the test set, and measures nothing else."""
        alone: dict[str, Any] = {"radius": None, "curvature": False, "surface": None, "probe": None, "limit_test": None}
        return replace(run, seed=run.seed + TUNING_SEED, eval_split=self.split, **alone, **candidate)

    def runs(self, run: Run, runs: Sequence[Run]) -> list[Run]:
        """Return a tuning run for each candidate.

        Args:
            run: the run whose settings are chosen.
            runs: of the recipe. If ``run`` begins with one of them, its tuning runs begin with the tuning run of that
                one, which has not seen the data that they are evaluated on either.
        """
        trials = [self.run(run, **candidate) for candidate in self.settings(run)]
        if run.init is None:
            return trials
        initial = next(each for each in runs if run_dir_name(each) == run.init)
        return [replace(trial, init=run_dir_name(self.run(initial))) for trial in trials]


def radius_candidates(run: Run) -> list[dict[str, Any]]:
    """Return a run's arguments with all radii (of SAF and MESA the weight of their loss) times each factor."""
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
    """Return the names of the settings, and arguments of the method, in which candidates differ."""
    tried = [{**candidate, **candidate.get("arguments", {})} for candidate in candidates]
    return {name for each in tried for name in each if each[name] != tried[0][name]} - {"arguments"}
