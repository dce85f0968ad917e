"""The tables of tuning: candidates, their scores, the choice, whether it is within the noise, and its cost."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

from ..analysis.choice_texts import samples_text
from ..common.grouping import group_by
from ..common.progress import duration
from ..recipes.candidates import chosen_text
from ..recipes.choices import Choice
from ..recipes.experiments import Recipe
from ..recipes.variants import passes_of, variant_of
from ..training.run_dir import RunState
from .recipe_table import TableSection

NOISE, EDGE = "~", "*"  # marks
BASE_NAMES = ("lr", "weight_decay")


def tuning_sections(recipe: Recipe, choices: Sequence[Choice], base: Choice | None = None) -> list[TableSection]:
    """Return a table per section and column of the recipe's table: candidates, their scores, the choice, its cost.

    The candidates of the base optimizer have a table before them. Empty if nothing was tuned or no tuning run has
    ended.
    """
    tables = [] if base is None or not _has_begun(base) else [_base_section(recipe, base)]
    if not recipe.tuned:
        return tables
    assert recipe.tuning is not None
    header = (recipe.rows, *recipe.tuning.labels, "noise", "chosen", "cost")
    place_of = attrgetter("section", "column")
    places = group_by(filter(_has_begun, choices), lambda choice: place_of(recipe.cell(choice.run)))
    for (section, column), group in places.items():
        title = f"Tuning: {section}" + (f", {column}" if column else "")
        tables.append(TableSection(recipe.titled(title), header, tuple(_row(recipe, choice) for choice in group)))
    return tables


def tuning_notes(recipe: Recipe, choices: Sequence[Choice], base: Choice | None = None) -> list[str]:
    """Return the lines below these tables."""
    if not tuning_sections(recipe, choices, base):
        return []
    shown = [choice for choice in (base, *choices) if choice is not None and _has_begun(choice)]
    first = shown[0]
    noisy = bool(first.run.label_noise) and first.split == "holdout"
    labels = "; some of their labels are wrong, too" if noisy else ""
    seeds = "one extra seed" if first.seeds == 1 else f"the same {first.seeds} extra seeds; scores are their means"
    and_seeds = " and the seeds" if first.seeds > 1 else ""
    radii = " Columns: the radius without tuning, times this factor." if len(shown) > (base is not None) else ""
    lines = [
        f"Tuning: the score after the last epoch on {samples_text(first)}, which the tuning runs did not train "
        f"on{labels}.{radii} All candidates use {seeds}. Ties go to the middle of the grid.",
        f"Noise: the standard error of the best score, from the number of samples{and_seeds}. {NOISE} The choice is "
        f"within the noise: another candidate's score is within a standard error. {EDGE} At the edge of the grid: the "
        "smallest or the largest candidate, a better one may lie beyond.",
        "Cost: gradient passes over the training samples and training time of all candidates together.",
    ]
    if noisy:
        lines.insert(1, "In brackets: the score on the true labels, and the choice by them where it differs.")
    return lines


def _has_begun(choice: Choice) -> bool:
    return any(state.ended for state in choice.states)


def _row(recipe: Recipe, choice: Choice) -> tuple[str, ...]:
    noisy = bool(choice.run.label_noise) and choice.split == "holdout"
    best, clean_best = choice.best(), choice.best(clean=True)
    chosen = marked_text(choice, best)
    if noisy and clean_best != best:
        chosen += f" ({marked_text(choice, clean_best, marks=False)})"
    row = recipe.cell(choice.run).row
    return (row, *_scores(choice, noisy), _number(choice.noise), chosen, _cost(choice.states))


def _base_section(recipe: Recipe, choice: Choice) -> TableSection:
    """Return a table with a row per learning rate and a column per weight decay."""
    rates, decays = (list(dict.fromkeys(candidate[name] for candidate in choice.candidates)) for name in BASE_NAMES)
    scores = iter(_scores(choice, noisy=False))  # candidates are in the order of this table
    last = _number(choice.noise), marked_text(choice, choice.best()), _cost(choice.states)
    body = [
        (f"{rate:g}", *(next(scores) for _ in decays), *(last if number == 0 else ("",) * len(last)))
        for number, rate in enumerate(rates)
    ]
    title = f"Tuning: {variant_of(choice.run).title} alone, lr in rows, weight decay in columns"
    header = ("lr", *(f"{decay:g}" for decay in decays), "noise", "chosen", "cost")
    return TableSection(recipe.titled(title), header, tuple(body))


def _scores(choice: Choice, noisy: bool) -> list[str]:
    texts = []
    for seeds, score, clean, diverged in zip(
        choice.trials, choice.scores(), choice.scores(clean=True), choice.diverged, strict=True
    ):
        text = _number(score) + (f" ({_number(clean)})" if noisy else "")
        some = f", {diverged} diverged" if diverged else ""
        texts.append("diverged" if diverged == len(seeds) else text + some)
    return texts


def _cost(states: Sequence[RunState]) -> str:
    passes = sum(passes_of(state.run) * len(state.epochs) for state in states)
    seconds = sum(metrics["seconds"] for state in states for metrics in state.epochs)
    return f"{passes:g} passes, {duration(seconds)}"


def _number(score: float | None) -> str:
    return "-" if score is None else f"{score:.2f}"


def marked_text(choice: Choice, number: int | None, marks: bool = True) -> str:
    """Return the settings of a candidate that differ between candidates as text, with marks."""
    if number is None:
        return "-"
    edges = choice.edges(number) if marks else []
    noise = NOISE if marks and choice.rivals else ""
    return chosen_text(choice.values(number)) + noise + (EDGE if edges else "")
