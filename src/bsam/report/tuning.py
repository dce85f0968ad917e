"""The tables of tuning: candidates, their scores, the choice and its cost."""

from __future__ import annotations

from collections.abc import Sequence

from ..common.progress import duration
from ..recipes.choices import Choice
from ..recipes.experiments import Recipe
from ..recipes.summaries import chosen_text
from ..recipes.tuning import differing
from ..recipes.variants import passes_of
from ..tasks.task import HOLDOUT
from .tables import TableSection


def tuning_sections(recipe: Recipe, choices: Sequence[Choice]) -> list[TableSection]:
    """Return a table per section and column of the recipe's table: candidates, their scores, the choice, its cost.

    Empty if ``--tune`` was not used or no tuning run has ended.
    """
    if not recipe.tuned:
        return []
    sections: dict[str, list[Choice]] = {}
    for choice in choices:
        if any(state.ended for state in choice.trials):
            sections.setdefault(_title(recipe, choice), []).append(choice)
    return [_section(recipe, title, group) for title, group in sections.items()]


def tuning_notes(recipe: Recipe, choices: Sequence[Choice]) -> list[str]:
    """Return the lines below these tables."""
    if not tuning_sections(recipe, choices):
        return []
    noisy = any(choice.run.label_noise for choice in choices)
    labels = "; some of their labels are wrong, too" if noisy else ""
    lines = [
        f"Tuning: the score after the last epoch on {HOLDOUT:.0%} of the training samples, which the tuning runs did "
        f"not train on{labels}. Columns: the radius without tuning, times this factor. All candidates use one extra "
        "seed. Ties go to the smaller radius. * The chosen radius is the smallest or the largest candidate: a better "
        "one may lie beyond.",
        "Cost: gradient passes over the training samples and training time of all candidates together.",
    ]
    if noisy:
        lines.insert(1, "In brackets: the score on the true labels, and the choice by them where it differs.")
    return lines


def _title(recipe: Recipe, choice: Choice) -> str:
    cell = recipe.cell(choice.run)
    return f"Tuning: {cell.section}" + (f", {cell.column}" if cell.column else "")


def _section(recipe: Recipe, title: str, choices: Sequence[Choice]) -> TableSection:
    assert recipe.tuning is not None
    header = (recipe.rows, *recipe.tuning.labels, "chosen", "cost")
    return TableSection(recipe.titled(title), header, tuple(_row(recipe, choice) for choice in choices))


def _row(recipe: Recipe, choice: Choice) -> tuple[str, ...]:
    noisy, best, clean_best = bool(choice.run.label_noise), choice.best(), choice.best(clean=True)
    pairs = zip(choice.trials, choice.scores(), choice.scores(clean=True), strict=True)
    scores = [
        "diverged" if state.diverged is not None else _number(score) + (f" ({_number(clean)})" if noisy else "")
        for state, score, clean in pairs
    ]
    chosen = _radii(choice, best) + "*" * (best in (0, len(choice.trials) - 1))
    if noisy and clean_best != best:
        chosen += f" ({_radii(choice, clean_best)})"
    passes = sum(passes_of(state.run) * len(state.epochs) for state in choice.trials)
    seconds = sum(metrics["seconds"] for state in choice.trials for metrics in state.epochs)
    return (recipe.cell(choice.run).row, *scores, chosen, f"{passes:g} passes, {duration(seconds)}")


def _number(score: float | None) -> str:
    return "-" if score is None else f"{score:.2f}"


def _radii(choice: Choice, number: int | None) -> str:
    """Return the settings of a candidate that differ between candidates, as text."""
    if number is None:
        return "-"
    names, arguments = differing(choice.candidates), choice.candidates[number]["arguments"]
    return chosen_text({name: value for name, value in arguments.items() if name in names})
