"""Tuned recipes, and the settings that tuning chose from the scores of finished tuning runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ...common.errors import BsamValueError
from ..training.config import BASE, Run
from ..training.run_dir import run_dir_name
from .choice import Choice as Choice
from .experiments import Recipe
from .scales import Scale
from .states import states_of
from .tuning import Tuning, radius_tuning
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


def base_tuning_runs(recipe: Recipe, runs: Sequence[Run]) -> list[Run]:
    """Return the tuning runs that choose the settings of the base optimizer, which come before all others."""
    if recipe.base_tuning is None:
        return []
    return [trial for seeds in recipe.base_tuning.runs(_base_run(runs)) for trial in seeds]


def base_choice(recipe: Recipe, runs: Sequence[Run], out: Path) -> Choice | None:
    """Return the choice of the base optimizer's settings; None if the recipe does not tune it."""
    return None if recipe.base_tuning is None else _choice(recipe.base_tuning, _base_run(runs), (), out)


def with_tuned_base(runs: Sequence[Run], base: Choice | None) -> list[Run]:
    """Return the runs with the settings that were chosen for the base optimizer; unchanged until they are chosen."""
    settings = (None if base is None else base.settings) or {}
    return [replace(run, **settings) for run in runs]


def tuning_runs(recipe: Recipe, runs: Sequence[Run]) -> list[Run]:
    """Return the tuning runs that choose the settings of ``runs``; empty if the recipe needs no tuning."""
    if (tuning := recipe.tuning) is None:
        return []
    first = _first_seed(runs)
    initial = {run.init for run in first}
    initial_runs = [tuning.run(run, n) for n in range(tuning.seeds) for run in first if run_dir_name(run) in initial]
    return initial_runs + [trial for run in first for seeds in tuning.runs(run, first) for trial in seeds]


def choices(recipe: Recipe, runs: Sequence[Run], out: Path) -> list[Choice]:
    """Return the choice for each run of the first seed; empty if the recipe needs no tuning."""
    if recipe.tuning is None:
        return []
    first = _first_seed(runs)
    return [_choice(recipe.tuning, run, first, out) for run in first]


def _choice(tuning: Tuning, run: Run, runs: Sequence[Run], out: Path) -> Choice:
    return Choice(run, tuning.settings(run), [states_of(seeds, out) for seeds in tuning.runs(run, runs)])


def _base_run(runs: Sequence[Run]) -> Run:
    return replace(_first_seed(runs)[0], method=BASE, arguments={}, probe=None)


def with_tuned_settings(recipe: Recipe, runs: Sequence[Run], out: Path) -> list[Run]:
    """Return the runs with the settings that tuning chose; runs whose tuning has not ended are unchanged."""
    chosen = _by_key(choices(recipe, runs, out))
    return [replace(run, **(chosen[_key(run)].settings or {})) if chosen else run for run in runs]


def choices_of(recipe: Recipe, runs: Sequence[Run], out: Path) -> dict[str, Choice]:
    """Return the choice behind the settings of each final run that has one, by the name of its directory."""
    chosen = _by_key(choices(recipe, runs, out))
    finals = zip(runs, with_tuned_settings(recipe, runs, out), strict=True)
    of_runs = {run_dir_name(final): chosen[_key(run)] for run, final in finals if chosen}
    return {name: choice for name, choice in of_runs.items() if choice.names}


def untuned(recipe: Recipe, runs: Sequence[Run], out: Path) -> dict[str, tuple[Run, list[str]]]:
    """Return the runs whose tuning has not ended, by directory name, with the directory names of their tuning runs."""
    chosen = _by_key(choices(recipe, runs, out))
    waiting = [(run, chosen[_key(run)]) for run in runs if chosen and chosen[_key(run)].settings is None]
    return {run_dir_name(run): (run, [state.path.name for state in choice.states]) for run, choice in waiting}


def _first_seed(runs: Sequence[Run]) -> list[Run]:
    seed = min((run.seed for run in runs), default=0)
    return [run for run in runs if run.seed == seed]


def _by_key(run_choices: Sequence[Choice]) -> dict[str, Choice]:
    return {_key(choice.run): choice for choice in run_choices}


def _key(run: Run) -> str:
    """Return a key that is equal for runs that differ only in their seed."""
    return run_dir_name(replace(run, seed=0, surface=None, init=None))
