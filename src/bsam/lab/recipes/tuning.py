"""Settings that are chosen before the final runs, by scores on a split other than the test set."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..common.grouping import count_text
from ..tasks import TASKS
from ..tasks.settings import Split
from ..training.config import BASE, Run
from ..training.run_dir import RunDir, RunState, run_dir_name
from .planning import TUNING_SEED, Planned, describe, experiment_title, setting_text, states_of
from .published_numbers import all_arguments, total_radius
from .variants import variant_of

if TYPE_CHECKING:  # `bsam list` works without pandas
    import pandas as pd

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
    rates = dict.fromkeys(float(f"{run.lr * factor:.6g}") for factor in LR_FACTORS)  # 0.03, not 0.030000000000000002
    decays = [float(f"{run.weight_decay * factor:.6g}") for factor in WEIGHT_DECAY_FACTORS]
    tried = decays if run.weight_decay else WITHOUT_WEIGHT_DECAY
    return [{"lr": lr, "weight_decay": decay} for lr in rates for decay in tried]


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


def settings_text(names: Sequence[str]) -> str:
    """Return the names of settings in words."""
    return " and ".join(name.replace("weight_decay", "weight decay") for name in names)


@dataclass(frozen=True)
class Choice:
    """A planned run with candidates for its settings, and their tuning runs.

    Args:
        plan: the run.
        tuning: how its settings are chosen.
        states: the states of the tuning runs: all seeds of the first candidate, then those of the second ...
    """

    plan: Planned
    tuning: Tuning
    states: Sequence[RunState]

    @cached_property
    def values(self) -> list[dict[str, Any]]:
        """For each candidate, the settings and arguments that differ between the candidates."""
        tried = [{**candidate, **candidate.get("arguments", {})} for candidate in self.plan.candidates]
        names = sorted({name for values in tried for name in values if values[name] != tried[0][name]} - {"arguments"})
        return [{name: values[name] for name in names} for values in tried]

    @cached_property
    def table(self) -> pd.DataFrame:
        """A row for each candidate.

        ``score`` and ``clean`` are the mean scores of the finished runs, by the labels and by the true labels,
        ``error`` the standard error over seeds, ``diverged`` the number of runs that diverged, ``centre`` the distance
        from the middle of the grid, and ``edges`` the settings that are the smallest (but not 0) or the largest tried.
        """
        import pandas as pd

        trials = pd.DataFrame([_score(state) for state in self.states])
        groups = trials.groupby(trials.index // self.tuning.seeds)
        scores = groups[["score", "clean"]].mean()
        scores = scores.assign(error=groups["score"].sem(), diverged=groups["diverged"].sum())
        values = pd.DataFrame(self.values, index=scores.index).select_dtypes("number")
        ranks = values.rank(method="dense")
        places = 2 * (ranks - 1) / (ranks.max() - 1) - 1  # -1 the smallest, 0 the middle, 1 the largest
        at_edge = (places == 1) | ((places == -1) & (values != 0))
        edges = [list(values.columns[flags]) for flags in at_edge.to_numpy(dtype=bool)]
        return scores.assign(centre=(places**2).sum(axis=1), edges=edges)

    def best(self, score: str = "score") -> int | None:
        """Return the number of the candidate with the highest score; None until all tuning runs have ended.

        On ties it is the one nearest to the middle of the grid, or the first of those. Candidates that diverged with
        fewer seeds come first. If all diverged with every seed, it is the first one, which has the smallest radii.
        """
        if not all(state.ended for state in self.states):
            return None
        if self.table[score].isna().all():
            return 0
        ranked = self.table.round(9).sort_values(["diverged", score, "centre"], ascending=[True, False, True])
        return int(ranked.index[0])

    @cached_property
    def samples(self) -> int | None:
        """The number of samples that a tuning run is evaluated on; None before any has begun, and for old runs."""
        known = (RunDir(state.path).note("identity").get("eval_samples") for state in self.states)
        return next((number for number in known if number is not None), None)

    @cached_property
    def noise(self) -> float | None:
        """The standard error of the best score, the larger of those over samples and over seeds; None if unknown.

        A share of n samples has the standard error sqrt(p (1 - p) / n), here with two more successes and failures
        (Agresti and Coull), so that it is not 0 for a score of 100 %. Each seed holds out other training samples.
        """
        if (best := self.best()) is None:
            return None
        score, factor = self.table["score"][best], TASKS[self.plan.run.task.name].measure.factor
        errors = [self.table["error"][best]]
        if self.samples is not None and 0 <= score <= factor:
            n = self.samples * (self.tuning.seeds if self.tuning.split == "holdout" else 1) + 4
            share = (score / factor * (n - 4) + 2) / n
            errors.append(factor * math.sqrt(share * (1 - share) / n))
        return max((float(error) for error in errors if not math.isnan(error)), default=None)

    @property
    def is_noisy(self) -> bool:
        """Whether the score of another candidate is within a standard error of the best, equal scores included."""
        best = self.best()
        reach = math.nan if best is None else self.table["score"][best] - (self.noise or 0.0) - 1e-9
        return bool((self.table["score"] >= reach).sum() > 1)

    @property
    def samples_text(self) -> str:
        """The number and the kind of the samples that scored the candidates, in words."""
        return f"{'' if self.samples is None else f'{self.samples:,} '}{SPLITS[self.tuning.split]} samples"

    @property
    def tuned_on(self) -> str:
        """Describe the tuning data and any warnings. Empty until all tuning runs have ended."""
        if (best := self.best()) is None:
            return ""
        edges = self.table["edges"][best]
        which = "" if edges == list(self.values[0]) else f"{settings_text(edges)} "
        warnings = {"within the noise": self.is_noisy, f"{which}at the edge of the grid": edges}
        given = ", ".join(text for text, is_given in warnings.items() if is_given)
        text = f"tuned on {self.samples_text}, {count_text(self.tuning.seeds, 'seed')}"
        return f"{text}; {given}" if given else text


def _score(state: RunState) -> dict[str, Any]:
    """Return the score of a tuning run and that on the true labels, NaN unless it is finished."""
    if not state.finished:
        return {"score": math.nan, "clean": math.nan, "diverged": state.diverged is not None}
    last, split = state.epochs[-1], state.run.eval_split
    score, clean = TASKS[state.run.task.name].measure.shown(last, split), last.get(f"{split}_clean_accuracy")
    return {"score": score, "clean": score if clean is None else 100 * clean, "diverged": False}


@dataclass(frozen=True)
class Tuned:
    """Planned runs, with the settings that tuning has chosen so far.

    Args:
        base: the choice of the base optimizer's settings; None if it is not tuned.
        choices: the choice for each run of the first seed that has candidates.
        base_trials, trials: the runs that tune the base optimizer, and then the others.
        finals: the final runs; unchanged if their tuning has not ended.
        waiting: the final runs whose tuning has not ended, by name, with the names of their tuning runs.
    """

    base: Choice | None
    choices: Sequence[Choice]
    base_trials: Sequence[Planned]
    trials: Sequence[Planned]
    finals: Sequence[Planned]
    waiting: Mapping[str, Sequence[str]]


def tune(planned: Sequence[Planned], tuning: Tuning | None, out: Path) -> Tuned:
    """Return planned runs with the settings that their tuning runs have chosen.

    Args:
        planned: the runs, before tuning.
        tuning: how their settings are chosen; None chooses nothing.
        out: the folder of the experiment.
    """
    tuning, base = tuning or Tuning(), None
    if tuning.base:
        run = replace(planned[0].run, method=BASE, arguments={}, probe=None, rho_warmup=0.0, rho_start=0.0)
        base = _choice(Planned(run, describe(run), base_candidates(run)), tuning, (), out)
        planned = [_with_settings(plan, base) for plan in planned]
    first = [plan for plan in planned if plan.run.seed == min(plan.run.seed for plan in planned)]
    choices = {_key(plan.run): _choice(plan, tuning, first, out) for plan in first if plan.candidates}
    initial = {choice.plan.run.init for choice in choices.values()}
    starts = [plan.run for plan in first if plan.name in initial]
    trials = [tuning.trial(run, number) for number in range(tuning.seeds) for run in starts]
    trials += [state.run for choice in choices.values() for state in choice.states]
    finals, waiting = [], {}
    for plan in planned:
        choice = choices.get(_key(plan.run))
        pending = [tried for tried in (base, choice) if tried is not None and tried.best() is None]
        if pending:
            waiting[plan.name] = [state.path.name for state in pending[0].states]
        finals.append(plan if pending else _final(plan, base, choice))
    base_trials = [] if base is None else [state.run for state in base.states]
    return Tuned(base, [*choices.values()], _trials(base_trials), _trials(trials), finals, waiting)


def _choice(plan: Planned, tuning: Tuning, others: Sequence[Planned], out: Path) -> Choice:
    """Return the choice for a run. If it starts from the weights of another run, its tuning runs start from a
    tuning run of that one, so that no weights were trained on the evaluation data.
    """
    start = next((other.run for other in others if other.name == plan.run.init), None)
    runs = []
    for candidate in plan.candidates:
        for number in range(tuning.seeds):
            init = {} if start is None else {"init": run_dir_name(tuning.trial(start, number))}
            runs.append(tuning.trial(plan.run, number, **candidate, **init))
    return Choice(plan, tuning, states_of(runs, out))


def _trials(runs: Sequence[Run]) -> list[Planned]:
    return [Planned(run, describe(run, trial=True)) for run in runs]


def _with_settings(plan: Planned, choice: Choice) -> Planned:
    """Return a planned run with the chosen settings; its radius changes, and the title that names its settings."""
    best = choice.best()
    run = plan.run if best is None else plan.run.changed(**choice.plan.candidates[best])
    about = {**plan.about, "radius": total_radius(run)}
    if about["experiment"] == experiment_title(plan.run):
        about["experiment"] = experiment_title(run)
    return replace(plan, run=run, about=about)


def _final(plan: Planned, base: Choice | None, choice: Choice | None) -> Planned:
    """Return a run with its chosen settings, which says how they were chosen."""
    parts = []
    if choice is not None:
        plan = _with_settings(plan, choice)
    if choice is not None and (chosen := choice.values[choice.best() or 0]):
        is_radius = all(name.startswith("rho") for name in chosen)
        parts.append(("" if is_radius else f"{setting_text(chosen)} ") + choice.tuned_on)
        row = f"{plan.about['row']}, tuned" if choice.tuning.radii else plan.about["row"]
        plan = replace(plan, chosen=chosen, about={**plan.about, "row": row})
    is_tuned = bool(parts) or (base is not None and plan.run.method == BASE)
    if base is not None:
        of_base = base.tuned_on if plan.run.method == BASE else f"as tuned for {variant_of(base.plan.run).title}"
        parts.append(f"{settings_text(list(base.values[0]))} {of_base}")
    if not parts:
        return plan
    as_planned = [] if is_tuned else [plan.about["chosen"]]  # the radius
    words = "; ".join(filter(None, (*as_planned, *parts)))
    return replace(plan, about={**plan.about, "chosen": words, "tuned": is_tuned})


def base_sentence(base: Choice | None) -> str:
    """Return a sentence on the settings that were chosen for the base optimizer; empty if there are none."""
    if base is None or (best := base.best()) is None:
        return ""
    settings = setting_text(base.values[best]).replace(", ", " and ")
    return (
        f"All methods use {settings}, which were chosen for {variant_of(base.plan.run).title} alone from "
        f"{len(base.values)} candidates ({base.tuned_on})."
    )


def _key(run: Run) -> str:
    """Return a key that is equal for runs that differ only in their seed."""
    return run_dir_name(replace(run, seed=0, surface=None, init=None))
