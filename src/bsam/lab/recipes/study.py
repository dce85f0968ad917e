"""Studies: runs to train, how their settings are chosen, and which of them to train next."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..config import BASE, Run
from ..training.run_dir import RunState, run_dir_name
from .plan import Plan, setting_text, state_of, with_seed
from .tuning import Choice, Tuning, base_candidates, settings_text
from .variants import radius_choice, variant_of


class Snapshot:
    """One look at the runs of a folder: a directory is read when it is first asked for, and only then.

    Args:
        out: the folder.
        states: the states that are known, by the name of the run directory.
    """

    def __init__(self, out: Path, states: Mapping[str, RunState] | None = None) -> None:
        self.out = out
        self._states = dict(states or {})

    def state(self, run: Run, until: int | None = None) -> RunState:
        """Return the state of a run that is trained up to an epoch; None is its last one."""
        name = run_dir_name(run)
        if name not in self._states:
            self._states[name] = state_of(run, self.out)
        return replace(self._states[name], until=until)

    def states(self, plans: Iterable[Plan]) -> list[RunState]:
        """Return the state of the run of each plan."""
        return [self.state(plan.run, plan.until) for plan in plans]

    def again(self, names: Collection[str]) -> Snapshot:
        """Return a new look at these directories; the states of the others stay as they are."""
        return Snapshot(self.out, {name: state for name, state in self._states.items() if name not in names})


@dataclass(frozen=True)
class Stage:
    """Runs that are trained together, those that have ended included.

    Args:
        title: what they are for.
        plans: the runs.
    """

    title: str
    plans: Sequence[Plan]


@dataclass(frozen=True)
class Decision:
    """What the scores in a folder have decided so far.

    Args:
        now: the states that it follows from.
        base: the choice of the base optimizer's settings; None if it is not tuned.
        choices: the choice for each run of the first seed that has candidates.
        trials: the tuning runs, those of the base optimizer first.
        finals: the final run of each plan; unchanged if its tuning has not ended.
        selected_trials, selected_finals: those of the selected runs, in the order of the selection.
        waiting: the selected runs whose tuning has not ended, by name, with the names of their tuning runs.
        stage: the runs to train next; None if there are none.
    """

    now: Snapshot
    base: Choice | None
    choices: Sequence[Choice]
    trials: Sequence[Plan]
    finals: Sequence[Plan]
    selected_trials: Sequence[Plan]
    selected_finals: Sequence[Plan]
    waiting: Mapping[str, Sequence[str]]
    stage: Stage | None

    @property
    def selected_states(self) -> list[RunState]:
        """The states of the selected runs, in the order in which they are trained."""
        return self.now.states([*self.selected_trials, *self.selected_finals])


@dataclass(frozen=True)
class Study:
    """Runs to train and to compare, and the words of their results.

    Args:
        name: the name of the recipe, or ``"compare"``.
        title: the title of the results.
        plans: all its runs before tuning, seed by seed.
        scale: the name of its scale.
        settings: the settings that its runs share; a folder holds the results of one scale and its settings.
        weights: files with initial weights, by network; the same holds for them.
        tuning: how settings are chosen before the final runs; None keeps them as they are.
        selected: the names of the runs to train, in order; None trains all.
        published: a table of ``published.json``.
        notes: lines below the table.
        baseline: the row that sentences below the table compare the others with.
        at_equal_radii: whether they compare rows of equal total radius with the first of these.
        timed: whether the table has a column with the seconds of the training; by default, runs then share no device.
        threads: the number of torch's threads on a CPU; None leaves it unchanged.
        workers: the number of processes that train at the same time on a CPU.
    """

    name: str
    title: str
    plans: Sequence[Plan]
    scale: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    weights: Mapping[str, str] = field(default_factory=dict)
    tuning: Tuning | None = None
    selected: Sequence[str] | None = None
    published: str = ""
    notes: Sequence[str] = ()
    baseline: str | None = None
    at_equal_radii: bool = False
    timed: bool = False
    threads: int | None = None
    workers: int = 1

    @property
    def selected_plans(self) -> list[Plan]:
        """The plans of the runs to train, in order."""
        return self._picked(self.plans)

    def decide(self, now: Snapshot, failed: Collection[str] = ()) -> Decision:
        """Return the choices that follow from the states of the runs, the final runs, and the next runs to train.

        Args:
            now: the folder of the study.
            failed: names of runs that are not tried again.
        """
        tuning = self.tuning or Tuning()
        plans = list(self.plans)
        base = None
        if tuning.base:
            run = replace(plans[0].run, method=BASE, arguments={}, probe=None, rho_warmup=0.0, rho_start=0.0)
            base = _choice(Plan(run, candidates=base_candidates(run)), tuning, (), now)
            plans = [_with_settings(plan, base) for plan in plans]
        first_seed = min(plan.run.seed for plan in plans)
        first = [plan for plan in plans if plan.run.seed == first_seed]
        choices = {_key(plan.run): _choice(plan, tuning, first, now) for plan in first if plan.candidates}
        finals = []
        waiting = {}
        for plan in plans:
            choice = choices.get(_key(plan.run)) if choices else None
            pending = [tried for tried in (base, choice) if tried is not None and tried.best() is None]
            if pending:
                waiting[plan.name] = [state.path.name for state in pending[0].states]
            finals.append(plan if pending else _final(plan, base, choice))
        base_trials = [] if base is None else [_trial(state.run, state.until) for state in base.trials]

        names = {plan.name for plan in self._picked(plans)}
        trials = _trials([choice for choice in choices.values() if choice.plan.name in names], first)
        picked_finals = self._picked(finals)
        stages = {"tuning the base optimizer": base_trials}
        if base is None or base.best() is not None:
            stages["tuning"] = trials
        stages["runs"] = [plan for plan in picked_finals if plan.name not in waiting]
        return Decision(
            now=now,
            base=base,
            choices=list(choices.values()),
            trials=[*base_trials, *_trials(list(choices.values()), first)],
            finals=finals,
            selected_trials=[*base_trials, *trials],
            selected_finals=picked_finals,
            waiting={name: tried for name, tried in waiting.items() if name in names},
            stage=_next_stage(stages, now, failed),
        )

    def _picked(self, plans: Sequence[Plan]) -> list[Plan]:
        """Return those of the selected runs, in order; ``plans`` has one for each plan of the study."""
        if self.selected is None:
            return list(plans)
        by_name = {before.name: plan for before, plan in zip(self.plans, plans, strict=True)}
        return [by_name[name] for name in self.selected]


def _next_stage(stages: Mapping[str, Sequence[Plan]], now: Snapshot, failed: Collection[str]) -> Stage | None:
    """Return the first stage in which a run has neither ended nor failed."""
    for title, plans in stages.items():
        tried = [plan for plan in plans if plan.name not in failed]
        if not all(state.ended for state in now.states(tried)):
            return Stage(title, tried)
    return None


def seed_by_seed(first: Sequence[Plan], seeds: int, first_seed: int = 0) -> list[Plan]:
    """Return the runs with each seed: the first seed of every run comes before the second of any.

    A loss surface is computed for the first seed only.
    """
    plans = with_seed(first, first_seed)
    for seed in range(first_seed + 1, first_seed + seeds):
        plans += with_seed(first, seed, surface=None)
    return plans


def _choice(plan: Plan, tuning: Tuning, others: Sequence[Plan], now: Snapshot) -> Choice:
    """Return the choice for a run. If it starts from the weights of another run, its tuning runs start from a
    tuning run of that one, so that no weights were trained on the evaluation data.
    """
    start = next((other.run for other in others if other.name == plan.run.init), None)
    runs = []
    for candidate in plan.candidates:
        for number in range(tuning.seeds):
            init = {} if start is None else {"init": run_dir_name(tuning.trial(start, number))}
            runs.append(tuning.trial(plan.run, number, **candidate, **init))
    return Choice(plan, tuning, [now.state(run) for run in runs])


def _trials(choices: Sequence[Choice], first: Sequence[Plan]) -> list[Plan]:
    """Return the tuning runs of choices, after those that they start from."""
    initial = {choice.plan.run.init for choice in choices}
    starts = [plan.run for plan in first if plan.name in initial]
    tuning = choices[0].tuning if choices else Tuning()
    trials = [_trial(tuning.trial(run, number)) for number in range(tuning.seeds) for run in starts]
    return trials + [_trial(state.run, state.until) for choice in choices for state in choice.trials]


def _trial(run: Run, until: int | None = None) -> Plan:
    return Plan(run, section="", column="", trial=True, until=until)


def _with_settings(plan: Plan, choice: Choice) -> Plan:
    """Return the plan of a run with the chosen settings, in the row that it was planned for."""
    if (best := choice.best()) is None:
        return plan
    return replace(plan, run=plan.run.changed(**choice.plan.candidates[best]), row=plan.about["row"])


def _final(plan: Plan, base: Choice | None, choice: Choice | None) -> Plan:
    """Return a run with its chosen settings, which says how they were chosen."""
    parts = []
    if choice is not None:
        plan = _with_settings(plan, choice)
    if choice is not None and (chosen := choice.values[choice.best() or 0]):
        is_radius = all(name.startswith("rho") for name in chosen)
        parts.append(("" if is_radius else f"{setting_text(chosen)} ") + choice.tuned_on)
        row = f"{plan.about['row']}, tuned" if choice.tuning.radii else plan.about["row"]
        plan = replace(plan, settings_chosen=chosen, row=row)
    is_tuned = bool(parts) or (base is not None and plan.run.method == BASE)
    if base is not None:
        of_base = base.tuned_on if plan.run.method == BASE else f"as tuned for {variant_of(base.plan.run).title}"
        parts.append(f"{settings_text(list(base.values[0]))} {of_base}")
    if not parts:
        return plan
    as_planned = [] if is_tuned else [radius_choice(plan.run) if plan.chosen is None else plan.chosen]
    words = "; ".join(filter(None, (*as_planned, *parts)))
    return replace(plan, chosen=words, tuned=is_tuned)


def base_sentence(base: Choice | None) -> str:
    """Return a sentence on the settings that were chosen for the base optimizer; empty if there are none."""
    if base is None or (best := base.best()) is None:
        return ""
    settings = setting_text(base.values[best]).replace(", ", " and ")
    return (
        f"All methods use {settings}, which were chosen for {variant_of(base.plan.run).title} alone from "
        f"{len(base.values)} candidates ({base.tuned_on})."
    )


def _key(run: Run) -> Run:
    """Return what is equal for runs that differ only in their seed."""
    return replace(run, seed=0, surface=None, init=None)
