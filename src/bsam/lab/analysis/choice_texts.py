"""What tuning chose, and on what, in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..common.grouping import count_text
from ..recipes.candidates import chosen_text, settings_text
from ..recipes.choices import Choice
from ..recipes.variants import variant_of
from ..training.config import BASE
from ..training.run_dir import RunState

SPLITS = {"validation": "validation", "holdout": "held-out"}


def tuned_on(choice: Choice) -> str:
    """Return what the settings were tuned on, and warnings, in words.

    Such as ``"tuned on 400 validation samples, 3 seeds; within the noise, at the edge of the grid"``.
    """
    warnings = ["within the noise"] if choice.rivals else []
    if edges := choice.edges(choice.best()):
        which = "" if edges == choice.names else f"{settings_text(edges)} "
        warnings.append(f"{which}at the edge of the grid")
    doubts = f"; {', '.join(warnings)}" if warnings else ""
    return f"tuned on {samples_text(choice)}, {count_text(choice.seeds, 'seed')}{doubts}"


def samples_text(choice: Choice) -> str:
    """Return the number and the kind of the samples that scored the candidates."""
    number = "" if choice.samples is None else f"{choice.samples:,} "
    return f"{number}{SPLITS.get(choice.split, choice.split)} samples"


def base_sentence(choice: Choice | None) -> str:
    """Return a sentence on the settings that were chosen for the base optimizer; empty if there are none."""
    if choice is None or (best := choice.best()) is None:
        return ""
    base, values = variant_of(choice.run).title, choice.values(best)
    settings = " and ".join(chosen_text({name: values[name]}) for name in values)
    return (
        f"All methods use {settings}, which were chosen for {base} alone from {len(choice.candidates)} candidates "
        f"({tuned_on(choice)})."
    )


def how_chosen(states: Sequence[RunState], choices: Mapping[str, Choice], base: Choice | None) -> dict[str, str]:
    """Return how the settings of tuned runs were chosen, in words, by the name of the run directory.

    Args:
        states: the final runs.
        choices: the choice of each run that has one, by the name of its directory.
        base: the choice of the base optimizer's settings, which all runs use.
    """
    how = {}
    for state in states:
        parts, choice = [], choices.get(state.path.name)
        if choice is not None and choice.best() is not None:
            is_radius = all(name.startswith("rho") for name in choice.names)
            parts.append(("" if is_radius else f"{settings_text(choice.names)} ") + tuned_on(choice))
        if base is not None and base.best() is not None:
            of_base = f"as tuned for {variant_of(base.run).title}" if state.run.method != BASE else tuned_on(base)
            parts.append(f"{settings_text(base.names)} {of_base}")
        if parts:
            how[state.path.name] = "; ".join(parts)
    return how
