"""Settings that are chosen before the final runs, by scores on a split other than the test set."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ...common.checks import is_number
from ..common.grouping import count_text
from ..tasks import TASKS
from ..tasks.settings import Split
from ..training.config import BASE, Run
from ..training.run_dir import RunDir, RunState, run_dir_name
from .columns import states_of
from .planning import TUNING_SEED, Planned, describe, experiment_title
from .published_numbers import all_arguments, total_radius
from .variants import variant_of

TUNING_FACTORS = (0.5, 1, 2, 4)  # multiples of a run's radii
LR_FACTORS = (0.3, 1, 3)  # multiples of the learning rate
WEIGHT_DECAY_FACTORS = (0.1, 1, 10, 100)  # weight decay helps most where SAM does, far above the usual values
WITHOUT_WEIGHT_DECAY = (0, 1e-3, 1e-2)  # the candidates if it is 0
SPLITS = {"validation": "validation", "holdout": "held-out"}


@dataclass(frozen=True)
class Tuning:
    """How settings are chosen: by the score after the last epoch on a split, with some seeds for each candidate.

    Args:
        split: the split that the tuning runs are evaluated on.
        seeds: the number of seeds that each candidate is trained with.
        radii: whether the candidates are multiples of radii (``--tune``).
        base: whether learning rate and weight decay are chosen first, for the base optimizer alone (``--tune-base``).
    """

    split: Split = "validation"
    seeds: int = 1
    radii: bool = False
    base: bool = False

    def trial(self, run: Run, number: int = 0, **candidate: Any) -> Run:
        """Return a tuning run, which measures nothing but its score, with the tuning seed of this number."""
        unset: dict[str, Any] = {"radius": None, "curvature": False, "surface": None, "probe": None, "limit_test": None}
        return run.changed(seed=run.seed + TUNING_SEED + number, eval_split=self.split, **unset, **candidate)


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


def radius_candidates(run: Run) -> tuple[Mapping[str, Any], ...]:
    """Return, for each factor, the run's arguments with all radii (SAF, MESA: the loss weight) multiplied by it."""
    values = {**all_arguments(run.method, {}), **run.arguments}
    radii = [name for name in values if name.startswith("rho")] or (["lam"] if run.method != BASE else [])
    scaled = {name: values[name] for name in radii if values[name]}
    return tuple(
        {"arguments": {**run.arguments, **{name: factor * value for name, value in scaled.items()}}}
        for factor in (TUNING_FACTORS if radii else ())
    )


def with_tuned_radii(planned: Iterable[Planned]) -> list[Planned]:
    """Return planned runs whose radii are chosen from multiples of theirs."""
    return [replace(plan, candidates=radius_candidates(plan.run)) for plan in planned]


def chosen_text(chosen: Mapping[str, Any]) -> str:
    """Return settings as text.

    Example:
        >>> (
        ...     chosen_text({"rho_max": 0.1, "rho_min": 0.1}),
        ...     chosen_text({"weight_decay": 0.1}),
        ...     chosen_text({}),
        ... )
        ('rho_max 0.1, rho_min 0.1', 'weight decay 0.1', '-')
    """
    return ", ".join(f"{settings_text([name])} {value:g}" for name, value in chosen.items()) or "-"


def settings_text(names: Sequence[str]) -> str:
    """Return the names of settings in words."""
    return " and ".join(name.replace("weight_decay", "weight decay") for name in names)


@dataclass(frozen=True)
class Choice:
    """A planned run with candidates for its settings, and the states of their tuning runs: a row for each candidate,
    a column for each seed.
    """

    plan: Planned
    tuning: Tuning
    trials: Sequence[Sequence[RunState]]

    @property
    def states(self) -> list[RunState]:
        """The states of all tuning runs."""
        return [state for seeds in self.trials for state in seeds]

    @cached_property
    def values(self) -> list[dict[str, Any]]:
        """For each candidate, the settings and arguments that differ between the candidates."""
        tried = [{**candidate, **candidate.get("arguments", {})} for candidate in self.plan.candidates]
        names = sorted({name for values in tried for name in values if values[name] != tried[0][name]} - {"arguments"})
        return [{name: values[name] for name in names} for values in tried]

    @property
    def names(self) -> list[str]:
        """The names of these settings."""
        return list(self.values[0])

    @cached_property
    def samples(self) -> int | None:
        """The number of samples that a tuning run is evaluated on; None before any has begun, and for old runs."""
        known = (RunDir(state.path).note("identity").get("eval_samples") for state in self.states)
        return next((number for number in known if number is not None), None)

    def scores(self, clean: bool = False) -> list[float | None]:
        """Return the mean score of each candidate over the seeds that have finished; None without any.

        Args:
            clean: whether to score on the true labels if some of the evaluation labels are wrong.
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
        """The chosen candidate; None until all tuning runs have ended."""
        best = self.best()
        return None if best is None else self.plan.candidates[best]

    @cached_property
    def _places(self) -> list[dict[str, float]]:
        """For each candidate, the places of its numbers in the grid: -1 the smallest, 0 the middle, 1 the largest."""
        ordered = [name for name in self.names if all(is_number(values[name]) for values in self.values)]
        grids = {name: sorted({values[name] for values in self.values}) for name in ordered}
        return [
            {name: 2 * grid.index(values[name]) / (len(grid) - 1) - 1 for name, grid in grids.items()}
            for values in self.values
        ]

    def edges(self, number: int) -> list[str]:
        """Return the names of a candidate's settings that are the smallest (but not 0) or the largest tried."""
        values = self.values[number]
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
        errors, factor = [], TASKS[self.plan.run.task.name].measure.factor
        if self.samples is not None and 0 <= score <= factor:
            n = self.samples * (self.tuning.seeds if self.tuning.split == "holdout" else 1) + 4
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

    @property
    def samples_text(self) -> str:
        """The number and the kind of the samples that scored the candidates, in words."""
        return f"{'' if self.samples is None else f'{self.samples:,} '}{SPLITS[self.tuning.split]} samples"

    @property
    def tuned_on(self) -> str:
        """What the settings were tuned on, and warnings, in words; empty until all tuning runs have ended."""
        if (best := self.best()) is None:
            return ""
        words = [f"tuned on {self.samples_text}", count_text(self.tuning.seeds, "seed")]
        warnings = ["within the noise"] if self.rivals else []
        if edges := self.edges(best):
            warnings.append(("" if edges == self.names else f"{settings_text(edges)} ") + "at the edge of the grid")
        return "; ".join(filter(None, (", ".join(words), ", ".join(warnings))))


def _score(state: RunState, clean: bool = False) -> float:
    last, split = state.epochs[-1], state.run.eval_split
    score = last.get(f"{split}_clean_accuracy") if clean else None
    return TASKS[state.run.task.name].measure.shown(last, split) if score is None else 100 * score


class TunedRuns:
    """Planned runs, with the settings that tuning has chosen so far.

    Args:
        planned: the runs, before tuning.
        tuning: how their settings are chosen; None chooses nothing.
        out: the folder of the experiment.

    Attributes:
        base: the choice of the base optimizer's settings; None if it is not tuned.
        choices: the choice for each run of the first seed that has candidates.
        base_trials, trials: the runs that tune the base optimizer, and then the others.
        finals: the final runs; unchanged if their tuning has not ended.
        chosen: the settings that were chosen for final runs, by the name of the run directory.
        waiting: the final runs whose tuning has not ended, by name, with the names of their tuning runs.
    """

    def __init__(self, planned: Sequence[Planned], tuning: Tuning | None, out: Path) -> None:
        self._tuning, self._out = tuning or Tuning(), out
        self.base: Choice | None = None
        if self._tuning.base:
            run = replace(planned[0].run, method=BASE, arguments={}, probe=None)
            self.base = self._choice(Planned(run, describe(run), base_candidates(run)), ())
            planned = [_with_settings(plan, self.base.settings or {}) for plan in planned]
        seed = min((plan.run.seed for plan in planned), default=0)
        first = [plan for plan in planned if plan.run.seed == seed]
        self.choices = [self._choice(plan, first) for plan in first if plan.candidates]
        initial = {choice.plan.run.init for choice in self.choices}
        starts = [plan.run for plan in first if plan.name in initial]
        numbers = range(self._tuning.seeds)
        self.base_trials = [] if self.base is None else [_trial(state.run) for state in self.base.states]
        self.trials = [_trial(self._tuning.trial(run, number)) for number in numbers for run in starts]
        self.trials += [_trial(state.run) for choice in self.choices for state in choice.states]
        self.finals: list[Planned] = []
        self.chosen: dict[str, dict[str, Any]] = {}
        self.waiting: dict[str, list[str]] = {}
        by_key = {_key(choice.plan.run): choice for choice in self.choices}
        for plan in planned:
            self._add_final(plan, by_key.get(_key(plan.run)))

    def _add_final(self, plan: Planned, choice: Choice | None) -> None:
        waits_for = next((c for c in (self.base, choice) if c is not None and c.settings is None), None)
        if waits_for is not None:
            self.waiting[plan.name] = [state.path.name for state in waits_for.states]
            self.finals.append(plan)
            return
        final = plan if choice is None else _with_settings(plan, choice.settings or {})
        if choice is not None and choice.names:
            self.chosen[final.name] = choice.values[choice.best() or 0]
        self.finals.append(replace(final, about={**final.about, **self._how_chosen(final, choice)}))

    def _how_chosen(self, plan: Planned, choice: Choice | None) -> dict[str, Any]:
        """Return the entries of a tuned run that say so."""
        parts, tuned = [], {}
        if choice is not None and choice.names:
            is_radius = all(name.startswith("rho") for name in choice.names)
            parts.append(("" if is_radius else f"{settings_text(choice.names)} ") + choice.tuned_on)
            tuned = {"row": f"{plan.about['row']}, tuned"} if self._tuning.radii else {}
        if self.base is not None:
            of_base = f"as tuned for {variant_of(self.base.plan.run).title}"
            parts.append(
                f"{settings_text(self.base.names)} {of_base if plan.run.method != BASE else self.base.tuned_on}"
            )
        if not parts:
            return {}
        has_choice = (choice is not None and bool(choice.names)) or plan.run.method == BASE
        words = parts if has_choice else [*filter(None, [plan.about["chosen"]]), *parts]  # the radius is as planned
        return {"chosen": "; ".join(words), "tuned": has_choice, **tuned}

    @property
    def base_sentence(self) -> str:
        """A sentence on the settings that were chosen for the base optimizer; empty if there are none."""
        if self.base is None or (best := self.base.best()) is None:
            return ""
        settings = chosen_text(self.base.values[best]).replace(", ", " and ")
        return (
            f"All methods use {settings}, which were chosen for {variant_of(self.base.plan.run).title} alone from "
            f"{len(self.base.trials)} candidates ({self.base.tuned_on})."
        )

    def _choice(self, plan: Planned, others: Sequence[Planned]) -> Choice:
        """Return the choice for a run. If it starts from the weights of another run, its tuning runs start from a
        tuning run of that one, so that no weights were trained on the evaluation data.
        """
        start = next((other.run for other in others if other.name == plan.run.init), None)
        trials: list[list[RunState]] = []
        for candidate in plan.candidates:
            runs = [self._tuning.trial(plan.run, number, **candidate) for number in range(self._tuning.seeds)]
            if start is not None:
                starts = [run_dir_name(self._tuning.trial(start, number)) for number in range(self._tuning.seeds)]
                runs = [replace(run, init=name) for run, name in zip(runs, starts, strict=True)]
            trials.append(states_of(runs, self._out))
        return Choice(plan, self._tuning, trials)


def _trial(run: Run) -> Planned:
    return Planned(run, describe(run, trial=True))


def _with_settings(plan: Planned, settings: Mapping[str, Any]) -> Planned:
    """Return a planned run with other settings; its radius changes, and the title that names its settings."""
    run = plan.run.changed(**settings)
    about = {**plan.about, "radius": total_radius(run)}
    if about["experiment"] == experiment_title(plan.run):
        about["experiment"] = experiment_title(run)
    return replace(plan, run=run, about=about)


def _key(run: Run) -> str:
    """Return a key that is equal for runs that differ only in their seed."""
    return run_dir_name(replace(run, seed=0, surface=None, init=None))
