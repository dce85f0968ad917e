"""The tables of tuning: candidates, their scores, the choice, whether it is within the noise, and its cost."""

from __future__ import annotations

from ..common.grouping import group_by
from ..common.progress import duration
from ..recipes.tuning import TUNING_FACTORS, Choice, TunedRuns, Tuning, chosen_text
from ..recipes.variants import passes_of, variant_of
from .recipe_table import TableSection

NOISE, EDGE = "~", "*"  # marks


def tuning_sections(tuned: TunedRuns, tuning: Tuning | None) -> list[TableSection]:
    """Return a table for the base optimizer, and one per section and column of the recipe's table.

    Empty if nothing was tuned or no tuning run has ended.
    """
    tables = [_base_section(tuned.base)] if tuned.base is not None and _has_begun(tuned.base) else []
    begun = filter(_has_begun, tuned.choices)
    places = group_by(begun, lambda choice: (choice.plan.about["section"], choice.plan.about["column"]))
    for place, choices in places.items():
        is_factor = tuning is not None and tuning.radii
        labels = [f"x {factor:g}" for factor in TUNING_FACTORS]
        if not is_factor:
            labels = [f"candidate {number}" for number in range(1, len(choices[0].trials) + 1)]
        rows = [(choice.plan.about["row"], *_scores(choice, not is_factor), *_last(choice)) for choice in choices]
        title = f"Tuning: {', '.join(filter(None, place))}"
        tables.append(TableSection(title, ("method", *labels, "noise", "chosen", "cost"), tuple(rows)))
    return tables


def _base_section(choice: Choice) -> TableSection:
    """Return a table with a row per learning rate and a column per weight decay."""
    rates, decays = (
        list(dict.fromkeys(tried[name] for tried in choice.plan.candidates)) for name in ("lr", "weight_decay")
    )
    scores = iter(_scores(choice))  # candidates are in the order of this table
    body = [(f"{rate:g}", *(next(scores) for _ in decays), "", "", "") for rate in rates]
    body[0] = (*body[0][:-3], *_last(choice))
    title = f"Tuning: {variant_of(choice.plan.run).title} alone, lr in rows, weight decay in columns"
    return TableSection(title, ("lr", *(f"{decay:g}" for decay in decays), "noise", "chosen", "cost"), tuple(body))


def tuning_notes(tuned: TunedRuns) -> list[str]:
    """Return the lines below these tables."""
    shown = [choice for choice in (tuned.base, *tuned.choices) if choice is not None and _has_begun(choice)]
    if not shown:
        return []
    first = shown[0]
    labels = "; some of their labels are wrong, too" if _is_noisy(first) else ""
    seeds = (
        "one extra seed"
        if first.tuning.seeds == 1
        else f"the same {first.tuning.seeds} extra seeds; scores are their means"
    )
    and_seeds = " and the seeds" if first.tuning.seeds > 1 else ""
    brackets = " In brackets: the score on the true labels, and the choice by them where it differs." if labels else ""
    return [
        f"Tuning: the score after the last epoch on {first.samples_text}, which the tuning runs did not train "
        f"on{labels}. All candidates use {seeds}. Ties go to the middle of the grid.{brackets}",
        f"Noise: the standard error of the best score, from the number of samples{and_seeds}. {NOISE} The choice is "
        f"within the noise: another candidate's score is within a standard error. {EDGE} At the edge of the grid: the "
        "smallest or the largest candidate, a better one may lie beyond.",
        "Cost: gradient passes over the training samples and training time of all candidates together.",
    ]


def _has_begun(choice: Choice) -> bool:
    return any(state.ended for state in choice.states)


def _is_noisy(choice: Choice) -> bool:
    return bool(choice.plan.run.task.label_noise) and choice.tuning.split == "holdout"


def _scores(choice: Choice, with_values: bool = False) -> list[str]:
    texts = []
    numbers = zip(choice.trials, choice.scores(), choice.scores(clean=True), choice.diverged, strict=True)
    for index, (seeds, score, clean, diverged) in enumerate(numbers):
        text = _number(score) + (f" ({_number(clean)})" if _is_noisy(choice) else "")
        text = "diverged" if diverged == len(seeds) else text + (f", {diverged} diverged" if diverged else "")
        texts.append(f"{next(iter(choice.values[index].values())):g}: {text}" if with_values else text)
    return texts


def _last(choice: Choice) -> tuple[str, str, str]:
    """Return noise, choice and cost as text."""
    best, clean_best = choice.best(), choice.best(clean=True)
    chosen = "-"
    if best is not None and clean_best is not None:
        marks = (NOISE if choice.rivals else "") + (EDGE if choice.edges(best) else "")
        chosen = chosen_text(choice.values[best]) + marks
        chosen += f" ({chosen_text(choice.values[clean_best])})" if _is_noisy(choice) and clean_best != best else ""
    passes = sum(passes_of(state.run) * len(state.epochs) for state in choice.states)
    seconds = sum(metrics["seconds"] for state in choice.states for metrics in state.epochs)
    return _number(choice.noise), chosen, f"{passes:g} passes, {duration(seconds)}"


def _number(score: float | None) -> str:
    return "-" if score is None else f"{score:.2f}"
