"""Settings that are chosen before the final runs, by scores on a split other than the test set."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..config import BASE, Run
from ..training.run_dir import run_dir_name
from .choice import Choice as Choice
from .choice import Tuning as Tuning
from .choice import settings_text
from .planning import Planned, describe, experiment_title, setting_text, state_of
from .variants import all_arguments, radius_choice, total_radius, variant_of

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


def with_tuned_radii(planned: Iterable[Planned]) -> list[Planned]:
    """Return planned runs whose radii are chosen from multiples of theirs."""
    return [replace(plan, candidates=radius_candidates(plan.run)) for plan in planned]


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
    trials = [_trial(tuning.trial(run, number)) for number in range(tuning.seeds) for run in starts]
    trials += [_trial(state.run, state.until) for choice in choices.values() for state in choice.trials]
    finals, waiting = [], {}
    for plan in planned:
        choice = choices.get(_key(plan.run))
        pending = [tried for tried in (base, choice) if tried is not None and tried.best() is None]
        if pending:
            waiting[plan.name] = [state.path.name for state in pending[0].states]
        finals.append(plan if pending else _final(plan, base, choice))
    base_trials = [] if base is None else [_trial(state.run, state.until) for state in base.trials]
    return Tuned(base, [*choices.values()], base_trials, trials, finals, waiting)


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
    return Choice(plan, tuning, [state_of(run, out) for run in runs])


def _trial(run: Run, until: int | None = None) -> Planned:
    return Planned(run, describe(run, trial=True), until=until)


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
    as_planned = [] if is_tuned else [plan.about.get("chosen", radius_choice(plan.run))]
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
