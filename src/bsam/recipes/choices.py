"""Tuned recipes, and the settings that tuning chose from the scores of finished tuning runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..common.errors import BsamValueError
from ..training.config import Run
from ..training.run_dir import RunState, run_dir_name
from .experiments import Recipe
from .scales import Scale
from .states import score_of, states_of
from .tuning import radius_tuning
from .variants import variant_of


def tuned(recipe: Recipe) -> Recipe:
    """Return a recipe whose radii are chosen first, on held-out training images.

    SAM at the sum of both radii is left out: SAM's candidates contain it.
    """
    if not recipe.tunable:
        raise BsamValueError(f"the recipe {recipe.name} is not tunable, as it sets its radii itself: leave --tune out")

    def grid(scale: Scale) -> list[Run]:
        return [run for run in recipe.grid(scale) if variant_of(run).name != "sam-sum"]

    return replace(recipe, grid=grid, tuning=radius_tuning())


@dataclass(frozen=True)
class Choice:
    """The candidates for the settings of a run, and the tuning run of each.

    Args:
        run: the run before tuning.
        candidates: the settings to choose from, as fields of :class:`Run` by name; empty if there is nothing to choose.
        trials: the state of each candidate's tuning run.
    """

    run: Run
    candidates: Sequence[Mapping[str, Any]]
    trials: Sequence[RunState]

    def scores(self, clean: bool = False) -> list[float | None]:
        """Return the score of each candidate after the last epoch; None if it diverged or is not finished.

        Args:
            clean: whether to score on the true labels if some of the evaluation labels are wrong.
        """
        return [_score(state, clean) if state.finished else None for state in self.trials]

    def best(self, clean: bool = False) -> int | None:
        """Return the index of the candidate with the highest score, the first one on ties; None until all have ended.

        A candidate that diverged is chosen only if all did.
        """
        if not self.trials or not all(state.ended for state in self.trials):
            return None
        scores = [-1.0 if score is None else score for score in self.scores(clean)]
        return scores.index(max(scores))

    @property
    def settings(self) -> Mapping[str, Any] | None:
        """The chosen candidate; empty without candidates, None until all tuning runs have ended."""
        if not self.candidates:
            return {}
        best = self.best()
        return None if best is None else self.candidates[best]


def _score(state: RunState, clean: bool) -> float | None:
    score = state.epochs[-1].get(f"{state.run.eval_split}_clean_accuracy") if clean else None
    return score_of(state) if score is None else 100 * score


def tuning_runs(recipe: Recipe, runs: Sequence[Run]) -> list[Run]:
    """Return the tuning runs that choose the settings of ``runs``; empty if the recipe needs no tuning."""
    if recipe.tuning is None:
        return []
    first = _first_seed(runs)
    initial = {run.init for run in first}
    initial_runs = [recipe.tuning.run(run) for run in first if run_dir_name(run) in initial]
    return initial_runs + [trial for run in first for trial in recipe.tuning.runs(run, first)]


def choices(recipe: Recipe, runs: Sequence[Run], out: Path) -> list[Choice]:
    """Return the choice for each run of the first seed; empty if the recipe needs no tuning."""
    if recipe.tuning is None:
        return []
    first = _first_seed(runs)
    return [Choice(run, recipe.tuning.settings(run), states_of(recipe.tuning.runs(run, first), out)) for run in first]


def with_tuned_settings(recipe: Recipe, runs: Sequence[Run], out: Path) -> list[Run]:
    """Return the runs with the settings that tuning chose; runs whose tuning has not ended are unchanged."""
    chosen = _by_key(choices(recipe, runs, out))
    return [replace(run, **(chosen[_key(run)].settings or {})) if chosen else run for run in runs]


def untuned(recipe: Recipe, runs: Sequence[Run], out: Path) -> dict[str, tuple[Run, list[str]]]:
    """Return the runs whose tuning has not ended, by directory name, with the directory names of their tuning runs."""
    chosen = _by_key(choices(recipe, runs, out))
    waiting = [(run, chosen[_key(run)]) for run in runs if chosen and chosen[_key(run)].settings is None]
    return {run_dir_name(run): (run, [state.path.name for state in choice.trials]) for run, choice in waiting}


def _first_seed(runs: Sequence[Run]) -> list[Run]:
    seed = min((run.seed for run in runs), default=0)
    return [run for run in runs if run.seed == seed]


def _by_key(run_choices: Sequence[Choice]) -> dict[str, Choice]:
    return {_key(choice.run): choice for choice in run_choices}


def _key(run: Run) -> str:
    """Return a key that is equal for runs that differ only in their seed."""
    return run_dir_name(replace(run, seed=0, surface=None, init=None))
