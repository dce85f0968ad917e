"""Select runs of a recipe."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ...common.errors import BsamValueError
from ..common.names import find_name
from ..training.config import Run
from ..training.run_dir import run_dir_name
from .variants import variant_of


def with_initial_runs(chosen: Sequence[Run], runs: Iterable[Run]) -> list[Run]:
    """Return the chosen runs of a recipe, preceded by the runs that they start from."""
    needed = {run.init for run in chosen} - {None}
    first = [run for run in runs if run not in chosen and run_dir_name(run) in needed]
    return [*first, *chosen]


def select(
    runs: Iterable[Run], methods: Sequence[str] = (), models: Sequence[str] = (), data: Sequence[str] = ()
) -> list[Run]:
    """Return the runs with these methods (as in the tables), networks and data sets; an empty selection takes all."""
    runs = list(runs)
    kinds: dict[str, tuple[Sequence[str], Callable[[Run], str]]] = {
        "method": (methods, lambda run: variant_of(run).name),
        "model": (models, lambda run: run.model),
        "data set": (data, lambda run: run.data),
    }
    chosen = runs
    for kind, (names, name_of) in kinds.items():
        known = dict.fromkeys(map(name_of, runs))
        selected = [find_name(f"{kind} of the recipe", name, known) for name in names]
        chosen = [run for run in chosen if not names or name_of(run) in selected]
    if not chosen:
        raise BsamValueError(
            "no run of the recipe has the chosen methods, models and data sets together: leave out --only, --models or "
            "--data"
        )
    return chosen
