"""The settings that tuning chooses from the scores of finished tuning runs, and the runs that it needs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ...common.checks import is_number
from ...common.errors import BsamValueError
from ..tasks import TASKS
from ..training.config import BASE, Run
from ..training.run_dir import RunDir, RunState, run_dir_name
from .candidates import Tuning, differing_names, radius_tuning
from .columns import score_of, states_of
from .experiments import Recipe
from .scales import Scale
from .variants import variant_of


@dataclass(frozen=True)
class Choice:
    """The candidates for the settings of a run, and the tuning runs of each.

    Args:
        run: the run before tuning.
        candidates: the settings to choose from, as fields of :class:`Run` by name; empty if there is nothing to choose.
        trials: for each candidate, the states of its tuning runs, one for each tuning seed.
    """

    run: Run
    candidates: Sequence[Mapping[str, Any]]
    trials: Sequence[Sequence[RunState]]

    @property
    def states(self) -> list[RunState]:
        """The states of all tuning runs."""
        return [state for seeds in self.trials for state in seeds]

    @property
    def names(self) -> list[str]:
        """The settings and method arguments that differ between the candidates."""
        return sorted(differing_names(self.candidates))

    @property
    def split(self) -> str:
        """The split that the tuning runs are evaluated on."""
        return self.states[0].run.eval_split

    @property
    def seeds(self) -> int:
        """The number of tuning seeds."""
        return max(map(len, self.trials))

    @cached_property
    def samples(self) -> int | None:
        """The number of samples that a tuning run is evaluated on; None before any has begun, and for old runs."""
        known = (RunDir(state.path).note("identity").get("eval_samples") for state in self.states)
        return next((number for number in known if number is not None), None)

    def scores(self, clean: bool = False) -> list[float | None]:
        """Return the mean score of each candidate after the last epoch, over the tuning seeds that have finished.

        Args:
            clean: whether to score on the true labels if some of the evaluation labels are wrong.

        Returns:
            The scores; None for a candidate without a finished run.
        """
        finished = [[_score(state, clean) for state in seeds if state.finished] for seeds in self.trials]
        return [statistics.fmean(scores) if scores else None for scores in finished]

    @property
    def diverged(self) -> list[int]:
        """The number of tuning runs of each candidate that diverged."""
        return [sum(state.diverged is not None for state in seeds) for seeds in self.trials]

    def best(self, clean: bool = False) -> int | None:
        """Return the index of the candidate with the highest score; None until all tuning runs have ended.

        On ties it is the one nearest to the middle of the grid, or the first of those. Candidates that diverged with
        fewer seeds come first. If all diverged with every seed, it is the first one, which has the smallest radii.
        """
        if not self.trials or not all(state.ended for state in self.states):
            return None
        scores = self.scores(clean)
        if not any(state.finished for state in self.states):
            return 0

        def rank(number: int) -> tuple[float, float, float]:
            score = scores[number]
            centre = sum(place**2 for place in self._places[number].values())
            return -self.diverged[number], -math.inf if score is None else round(score, 9), -round(centre, 9)

        return max(range(len(scores)), key=rank)

    @property
    def settings(self) -> Mapping[str, Any] | None:
        """The chosen candidate; empty without candidates, None until all tuning runs have ended."""
        if not self.candidates:
            return {}
        best = self.best()
        return None if best is None else self.candidates[best]

    def values(self, number: int) -> dict[str, Any]:
        """Return the values of a candidate that differ between the candidates, by name."""
        tried = {**self.candidates[number], **self.candidates[number].get("arguments", {})}
        return {name: tried[name] for name in self.names}

    @cached_property
    def _places(self) -> list[dict[str, float]]:
        """For each candidate, the places of its numbers in the grid: -1 the smallest, 0 the middle, 1 the largest."""
        all_values = [self.values(number) for number in range(len(self.candidates))]
        places: list[dict[str, float]] = [{} for _ in all_values]
        for name in self.names:
            if all(is_number(values[name]) for values in all_values):
                grid = sorted({values[name] for values in all_values})
                for place, values in zip(places, all_values, strict=True):
                    place[name] = 2 * grid.index(values[name]) / (len(grid) - 1) - 1
        return places

    def edges(self, number: int | None) -> list[str]:
        """Return the names of a candidate's settings that are the smallest (but not 0) or the largest tried."""
        if number is None:
            return []
        values = self.values(number)
        return [name for name, place in self._places[number].items() if place == 1 or (place == -1 and values[name])]

    @property
    def noise(self) -> float | None:
        """The standard error of the best score, the larger of those over samples and over seeds; None if unknown.

        A share of n samples has the standard error sqrt(p (1 - p) / n), here with two more successes and failures
        (Agresti and Coull), so that it is not 0 for a score of 100 %. Each seed holds out other training samples.
        """
        best = self.best()
        if best is None or (score := self.scores()[best]) is None:
            return None
        errors, factor = [], TASKS[self.run.task].measure.factor
        if self.samples is not None and 0 <= score <= factor:
            n = self.samples * (self.seeds if self.split == "holdout" else 1) + 4
            share = (score / factor * (n - 4) + 2) / n
            errors.append(factor * math.sqrt(share * (1 - share) / n))
        scores = [_score(state) for state in self.trials[best] if state.finished]
        if len(scores) > 1:
            errors.append(statistics.stdev(scores) / math.sqrt(len(scores)))
        return max(errors, default=None)

    @property
    def rivals(self) -> int:
        """The number of other candidates whose score is within a standard error of the best, equal scores included."""
        best, scores = self.best(), self.scores()
        if best is None or (score := scores[best]) is None:
            return 0
        reach = score - (self.noise or 0.0) - 1e-9
        return sum(other is not None and other >= reach for other in scores) - 1


def _score(state: RunState, clean: bool = False) -> float:
    score = state.epochs[-1].get(f"{state.run.eval_split}_clean_accuracy") if clean else None
    return score_of(state) if score is None else 100 * score


def tuned_recipe(recipe: Recipe) -> Recipe:
    """Return a recipe whose radii are chosen first, on held-out training images.

    SAM at the sum of both radii is left out: SAM's candidates contain it.
    """
    if not recipe.tunable:
        raise BsamValueError(f"the recipe {recipe.name} is not tunable, as it sets its radii itself: leave --tune out")

    def grid(scale: Scale) -> list[Run]:
        return [run for run in recipe.grid(scale) if variant_of(run).name != "sam-sum"]

    return replace(recipe, grid=grid, tuning=radius_tuning())


class TunedRuns:
    """The runs of an experiment, with the settings that tuning has chosen so far.

    Args:
        recipe: the experiment.
        runs: its runs, before tuning.
        out: its folder.

    Attributes:
        base: the choice of the base optimizer's settings; None if the recipe does not tune it.
        base_trials: the runs that tune the base optimizer, before all others.
        choices: the choice for each run of the first seed; empty if the recipe does not tune.
        trials: the runs that tune, with the settings of the base optimizer.
        finals: the final runs; unchanged if their tuning has not ended.
    """

    def __init__(self, recipe: Recipe, runs: Sequence[Run], out: Path) -> None:
        self.base: Choice | None = None
        self.choices: list[Choice] = []
        initial_trials: list[Run] = []
        if recipe.base_tuning is not None:
            base_run = replace(_first_seed(runs)[0], method=BASE, arguments={}, probe=None)
            self.base = _choice(recipe.base_tuning, base_run, (), out)
        base_settings = (None if self.base is None else self.base.settings) or {}
        self._runs = [replace(run, **base_settings) for run in runs]
        if (tuning := recipe.tuning) is not None:
            first = _first_seed(self._runs)
            self.choices = [_choice(tuning, run, first, out) for run in first]
            names = {run.init for run in first}
            initial_runs = [run for run in first if run_dir_name(run) in names]
            initial_trials = [tuning.run(run, number) for number in range(tuning.seeds) for run in initial_runs]
        self.base_trials = [] if self.base is None else [state.run for state in self.base.states]
        self.trials = initial_trials + [state.run for choice in self.choices for state in choice.states]
        by_key = {_key(choice.run): choice for choice in self.choices}
        self._choices = [by_key.get(_key(run)) for run in self._runs]
        settings = [None if choice is None else choice.settings for choice in self._choices]
        self.finals = [replace(run, **(chosen or {})) for run, chosen in zip(self._runs, settings, strict=True)]

    @property
    def choice_by_name(self) -> dict[str, Choice]:
        """The choice behind the settings of each final run that has one, by the name of its directory."""
        pairs = zip(self.finals, self._choices, strict=True)
        return {run_dir_name(run): choice for run, choice in pairs if choice is not None and choice.names}

    @property
    def waiting(self) -> dict[str, tuple[Run, list[str]]]:
        """The runs whose tuning has not ended, by directory name, with the directory names of their tuning runs."""
        waits_for_base = self.base is not None and self.base.settings is None
        choices = [self.base] * len(self._runs) if waits_for_base else self._choices
        return {
            run_dir_name(run): (run, [state.path.name for state in choice.states])
            for run, choice in zip(self._runs, choices, strict=True)
            if choice is not None and choice.settings is None
        }


def _choice(tuning: Tuning, run: Run, runs: Sequence[Run], out: Path) -> Choice:
    return Choice(run, tuning.settings(run), [states_of(seeds, out) for seeds in tuning.runs(run, runs)])


def _first_seed(runs: Sequence[Run]) -> list[Run]:
    seed = min((run.seed for run in runs), default=0)
    return [run for run in runs if run.seed == seed]


def _key(run: Run) -> str:
    """Return a key that is equal for runs that differ only in their seed."""
    return run_dir_name(replace(run, seed=0, surface=None, init=None))
