"""Tuning: the candidates for settings, and the choice by the scores of tuning runs, which may stop early."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean, stdev
from typing import Any, NamedTuple

from ...common.checks import is_number
from ..common.printing import count_text
from ..config import Run, Split
from ..tasks import task_of
from ..training.run_dir import RunState
from .plan import TUNING_SEED, Plan
from .variants import all_arguments

TUNING_FACTORS = (0.5, 1, 2, 4)  # multiples of a run's radii
LR_FACTORS = (0.3, 1, 3)  # multiples of the learning rate
WEIGHT_DECAY_FACTORS = (0.1, 1, 10, 100)  # weight decay helps most where SAM does, far above the usual values
WITHOUT_WEIGHT_DECAY = (0, 1e-3, 1e-2)  # the candidates if it is 0
RUNGS = (0.325, 0.375)  # shares of the epochs after the first and the last halving: results/tuning has the comparison
WINDOW = 0.05  # the share of the epochs over which the scores before the last epoch are averaged
SCORE_DECIMALS = 9  # scores that agree so far are equal
SPLITS = {"validation": "validation", "holdout": "held-out"}


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
    candidates = []
    for factor in TUNING_FACTORS if radii else ():
        multiplied = {name: factor * value for name, value in scaled.items()}
        candidates.append({"arguments": {**run.arguments, **multiplied}})
    return tuple(candidates)


def with_tuned_radii(plans: Iterable[Plan]) -> list[Plan]:
    """Return plans of runs whose radii are chosen from multiples of theirs."""
    return [replace(plan, candidates=radius_candidates(plan.run)) for plan in plans]


@dataclass(frozen=True)
class Tuning:
    """How settings are chosen: by the score on a split, with some seeds for each candidate.

    Args:
        split: the split that the tuning runs are evaluated on.
        seeds: the number of seeds that each candidate is trained with.
        radii: whether the candidates are multiples of radii (``--tune``).
        base: whether learning rate and weight decay are chosen first, for the base optimizer alone (``--tune-base``).
        halving: whether only the better half of the candidates goes on after a third of the epochs, and training stops
            when one is left; otherwise all candidates are trained to the end and compared after the last epoch.
    """

    split: Split = "validation"
    seeds: int = 1
    radii: bool = False
    base: bool = False
    halving: bool = False

    def trial(self, run: Run, number: int = 0, **candidate: Any) -> Run:
        """Return a tuning run, which measures nothing but its score, with the tuning seed of this number."""
        unset: dict[str, Any] = dict.fromkeys(("sharpness_rho", "surface", "probe", "limit_test"))
        unset["curvature"] = False
        return run.changed(seed=run.seed + TUNING_SEED + number, eval_split=self.split, **unset, **candidate)


def settings_text(names: Sequence[str]) -> str:
    """Return the names of settings in words."""
    return " and ".join(name.replace("weight_decay", "weight decay") for name in names)


def rungs(epochs: int, candidates: int, start: float = 0) -> list[int]:
    """Return the epochs after which the worse half of the candidates stops; after the last one, one candidate is left.

    They are shares of the epochs after ``start``, before which candidates do not differ.

    Example:
        >>> rungs(40, 4), rungs(40, 12), rungs(40, 4, start=20)
        ([13, 15], [13, 14, 15, 15], [27, 28])
    """
    count = (candidates - 1).bit_length()  # halvings, with the larger half going on
    first, last = RUNGS
    steps = [first + (last - first) * n / max(count - 1, 1) for n in range(count)]
    return [math.ceil(round(start + (epochs - start) * step, 9)) for step in steps]


def start_of(run: Run) -> float:
    """Return the number of epochs before a method has its full effect: its start, its warm-up, or its first epoch."""
    first = all_arguments(run.method, run.arguments).get("start_epoch", 0)
    return min(run.rho_start + run.rho_warmup + first, run.epochs)


class Tried(NamedTuple):
    """A candidate after an epoch.

    Args:
        epoch: the epoch.
        score: the mean score of its runs by the labels; NaN if none has come so far.
        clean: the same by the true labels.
        error: the standard error over seeds; NaN with one seed.
        diverged: the number of its runs that diverged.
        centre: the distance from the middle of the grid.
        edges: the settings that are the smallest (but not 0) or the largest tried.
    """

    epoch: int
    score: float
    clean: float
    error: float
    diverged: int
    centre: float
    edges: tuple[str, ...]


def ranked(candidates: Mapping[int, Tried], higher: bool = True, score: str = "score") -> list[int]:
    """Return the numbers of candidates from the best to the worst.

    Fewer diverged runs come first, then better scores: the higher ones, unless ``higher`` is False. On ties it is the
    candidate nearest to the middle of the grid, or the first of those in ``candidates``: the smallest or, after a rung,
    the one that was better there.

    Example:
        >>> equal = [Tried(1, 90.0, 90.0, math.nan, 0, centre, ()) for centre in (1, 0.1, 0.1)]
        >>> ranked(dict(enumerate(equal)))
        [1, 2, 0]
    """

    sign = -1 if higher else 1

    def key(number: int) -> tuple[int, float, float]:
        tried = candidates[number]
        value = getattr(candidates[number], score)
        return (
            tried.diverged,
            math.inf if math.isnan(value) else sign * round(value, SCORE_DECIMALS),
            round(tried.centre, SCORE_DECIMALS),
        )

    return sorted(candidates, key=key)


def places_in_grid(candidates: Sequence[Mapping[str, Any]]) -> list[tuple[float, tuple[str, ...]]]:
    """Return for each candidate its distance from the middle of the grid, and the settings at whose edges it lies.

    Settings that are no numbers have neither a middle nor edges.

    Example:
        >>> places_in_grid([{"rho": 0.1}, {"rho": 0.2}, {"rho": 0.4}])
        [(1.0, ('rho',)), (0.0, ()), (1.0, ('rho',))]
    """
    centres = [0.0 for _ in candidates]
    edges: list[list[str]] = [[] for _ in candidates]
    for name in candidates[0]:
        column = [values[name] for values in candidates]
        steps = sorted({value for value in column if is_number(value)})
        if len(steps) < 2 or not all(value is None or is_number(value) for value in column):
            continue
        for number, value in enumerate(column):
            if value is not None:
                place = 2 * steps.index(value) / (len(steps) - 1) - 1  # -1 the smallest, 0 the middle, 1 the largest
                centres[number] += place**2
                if place == 1 or (place == -1 and value != 0):
                    edges[number].append(name)
    return [(centre, tuple(names)) for centre, names in zip(centres, edges, strict=True)]


@dataclass(frozen=True)
class Choice:
    """A run with candidates for its settings, and their tuning runs.

    Args:
        plan: the run.
        tuning: how its settings are chosen.
        states: the tuning runs as they are on disk: all seeds of the first candidate, then those of the second ...
    """

    plan: Plan
    tuning: Tuning
    states: Sequence[RunState]

    @cached_property
    def values(self) -> list[dict[str, Any]]:
        """For each candidate, the settings and arguments that differ between the candidates."""
        tried = [{**candidate, **candidate.get("arguments", {})} for candidate in self.plan.candidates]
        names = sorted({name for values in tried for name in values if values[name] != tried[0][name]} - {"arguments"})

        def different(values: Mapping[str, Any]) -> dict[str, Any]:
            return {name: values[name] for name in names}

        return list(map(different, tried))

    @property
    def higher(self) -> bool:
        """Whether a higher score is better."""
        return task_of(self.plan.run).score.higher

    @cached_property
    def table(self) -> list[Tried]:
        """Each candidate after the epoch that it is trained up to."""
        return [self.tried(number, epoch) for number, epoch in enumerate(self.aims)]

    @cached_property
    def aims(self) -> list[int]:
        """The epoch that each candidate is trained up to, as far as the scores decide.

        Halving treats a candidate that has diverged as the worst in all rungs, so that another one takes its place. A
        rung at which no candidate beats chance tells nothing of them: all go on to the next one, or to the end.
        """
        epochs = self.plan.run.epochs
        left = list(range(len(self.values)))  # the candidates that go on; after a rung, from the best to the worst
        aims = [epochs] * len(left)
        if not self.tuning.halving or all(state.ended for state in self.states):
            return aims
        for rung in rungs(epochs, len(left), start_of(self.plan.run)):
            for number in left:
                aims[number] = rung
            if not all(state.ended for state in self._trials(aims)):
                return aims
            tried = {number: self.tried(number, rung) for number in left}
            going = [number for number in ranked(tried, self.higher) if tried[number].diverged < self.tuning.seeds]
            if self._beats_chance(tried.values()):
                left = going[: (len(left) + 1) // 2]
            else:
                left = [number for number in left if number in going]
            if len(left) < 2:
                return aims
        for number in left:
            aims[number] = epochs
        return aims

    def _beats_chance(self, tried: Iterable[Tried]) -> bool:
        """Return whether a score is better than chance, a share by two standard errors; True if that is unknown."""
        score = task_of(self.plan.run).score
        known = [state.chance for state in self.states if state.chance is not None]
        if not known:
            return True
        chance = score.factor * known[0]
        error = self._sampling_error(chance)
        if error is None and score.share:
            return True
        sign = 1 if score.higher else -1
        return any(sign * (one.score - chance) > 2 * (error or 0.0) for one in tried)

    def _trials(self, aims: Sequence[int]) -> list[RunState]:
        """Return the states of the tuning runs that are trained up to these epochs."""
        untils = [aim if aim < self.plan.run.epochs else None for aim in aims for _ in range(self.tuning.seeds)]
        return [replace(state, until=until) for state, until in zip(self.states, untils, strict=True)]

    @property
    def trials(self) -> list[RunState]:
        """The tuning runs, each with the epoch that it is trained up to."""
        return self._trials(self.aims)

    @property
    def begun(self) -> bool:
        """Whether a tuning run has ended."""
        return any(state.ended for state in self.trials)

    def tried(self, number: int, epoch: int) -> Tried:
        """Return a candidate after an epoch."""
        seeds = self.tuning.seeds
        states = self.states[number * seeds : (number + 1) * seeds]
        scores = [_score(state, epoch) for state in states if _is_scored(state, epoch)]
        labels = [score for score, _ in scores]
        clean = [score for _, score in scores]
        error = stdev(labels) / math.sqrt(len(labels)) if len(labels) > 1 else math.nan
        diverged = sum(state.diverged is not None for state in states)
        centre, edges = self._places[number]
        return Tried(epoch, _mean(labels), _mean(clean), error, diverged, centre, edges)

    @cached_property
    def _places(self) -> list[tuple[float, tuple[str, ...]]]:
        return places_in_grid(self.values)

    def best(self, score: str = "score") -> int | None:
        """Return the number of the candidate with the best score; None until the tuning runs have ended.

        Ties are decided as by :func:`ranked`. If all diverged with every seed, it is the first one, which has the
        smallest radii.
        """
        if not all(state.ended for state in self.trials):
            return None
        if all(math.isnan(getattr(one, score)) for one in self.table):
            return 0
        last = max(self.aims)
        tried = {number: one for number, one in enumerate(self.table) if one.epoch == last}
        return ranked(tried, self.higher, score)[0]

    @property
    def samples(self) -> int | None:
        """The number of samples that a tuning run is evaluated on; None before any has begun, and for old runs."""
        return next((state.eval_samples for state in self.states if state.eval_samples is not None), None)

    def _sampling_error(self, score: float) -> float | None:
        """Return the standard error of a score over samples; None if it is unknown.

        A share of n samples has the standard error sqrt(p (1 - p) / n), here with two more successes and failures
        (Agresti and Coull), so that it is not 0 for a score of 100 %. Each seed holds out other training samples.
        """
        measure = task_of(self.plan.run).score
        factor = measure.factor
        if not measure.share or self.samples is None or not 0 <= score <= factor:
            return None
        n = self.samples * (self.tuning.seeds if self.tuning.split == "holdout" else 1) + 4
        share = (score / factor * (n - 4) + 2) / n
        return factor * math.sqrt(share * (1 - share) / n)

    @cached_property
    def noise(self) -> float | None:
        """The standard error of the best score, the larger of those over samples and over seeds; None if unknown."""
        if (best := self.best()) is None:
            return None
        errors = [self.table[best].error, self._sampling_error(self.table[best].score)]
        return max((error for error in errors if error is not None and not math.isnan(error)), default=None)

    @property
    def is_noisy(self) -> bool:
        """Whether another candidate's score is within a standard error of that of the chosen one after as many epochs,
        equal scores included.
        """
        if (best := self.best()) is None:
            return False
        noise = (self.noise or 0.0) + 10**-SCORE_DECIMALS
        sign = 1 if self.higher else -1
        others = [one for number, one in enumerate(self.table) if number != best]
        return any(sign * (self.tried(best, one.epoch).score - one.score) <= noise for one in others)

    @property
    def samples_text(self) -> str:
        """The number and the kind of the samples that scored the candidates, in words."""
        return f"{'' if self.samples is None else f'{self.samples:,} '}{SPLITS[self.tuning.split]} samples"

    @property
    def tuned_on(self) -> str:
        """Describe the tuning data and any warnings. Empty until all tuning runs have ended."""
        if (best := self.best()) is None:
            return ""
        edges = self.table[best].edges
        which = "" if edges == tuple(self.values[0]) else f"{settings_text(edges)} "
        warnings = {"within the noise": self.is_noisy, f"{which}at the edge of the grid": edges}
        given = ", ".join(text for text, is_given in warnings.items() if is_given)
        text = f"tuned on {self.samples_text}, {count_text(self.tuning.seeds, 'seed')}"
        return f"{text}; {given}" if given else text


def _mean(scores: Sequence[float]) -> float:
    return fmean(scores) if scores else math.nan


def _is_scored(state: RunState, epoch: int) -> bool:
    """Return whether a tuning run has reached an epoch and not diverged."""
    return state.diverged is None and len(state.epochs) >= epoch


def _score(state: RunState, epoch: int) -> tuple[float, float]:
    """Return the score of a tuning run after an epoch, and that on the true labels.

    With a large learning rate, scores differ by points from one epoch to the next: before the last epoch, it is the
    mean over a few epochs.
    """
    window = 1 if epoch == state.run.epochs else max(1, round(WINDOW * state.run.epochs))
    rows = state.epochs[max(0, epoch - window) : epoch]
    split = state.run.eval_split
    task = task_of(state.run)
    score = fmean(task.score.shown(row, split) for row in rows)
    clean = task.clean_score(state.run)
    if clean is None or clean.metric(split) not in rows[-1]:
        return score, score
    return score, clean.factor * fmean(row[clean.metric(split)] for row in rows)
