"""The tables of tuning: candidates, their scores, the choice, whether it is within the noise, and its cost."""

from __future__ import annotations

import math
from typing import Any

from ..common.printing import group_by
from ..common.progress import duration
from ..recipes.plan import setting_text
from ..recipes.study import Decision
from ..recipes.tuning import SPLITS, TUNING_FACTORS, Choice
from ..recipes.variants import passes_of, variant_of
from ..tasks import task_of
from .table import Cell, Table

NOISE = "~"
EDGE = "*"  # marks


def tuning_tables(decision: Decision) -> tuple[list[Table], list[str]]:
    """Return a table for the base optimizer, one per section and column of the recipe's table, and the lines below.

    Both are empty if nothing was tuned or no tuning run has ended.
    """
    listed = [choice for choice in (decision.base, *decision.choices) if choice is not None]
    begun = [choice for choice in listed if choice.begun]
    tables = []
    if begun and begun[0] is decision.base:
        tables.append(_base_table(begun[0]))
    places = group_by(
        (choice for choice in begun if choice is not decision.base),
        lambda choice: (choice.plan.about["section"], choice.plan.about["column"]),
    )
    columns = {choice.plan.about["column"] for choice in decision.choices}
    for (section, column), choices in places.items():
        labels = [f"candidate {number}" for number in range(1, len(choices[0].values) + 1)]
        if is_factor := choices[0].tuning.radii:
            labels = [f"x {factor:g}" for factor in TUNING_FACTORS]
        cells: list[dict[str, Any]] = []
        for choice in choices:
            row = {**dict(zip(labels, _scores(choice, not is_factor), strict=True)), **_last(choice)}
            cells += [{"method": choice.plan.about["row"], "factor": name, "": cell} for name, cell in row.items()]
        place = (section, column if len(columns) > 1 else "")
        title = f"Tuning: {', '.join(filter(None, place))}, score on {SPLITS[choices[0].tuning.split]} samples"
        tables.append(Table.pivot(title, cells, "method", "factor"))
    return tables, _notes(begun[0]) if begun else []


def _base_table(choice: Choice) -> Table:
    """Return a table with a row per learning rate and a column per weight decay; the first row has the choice."""
    tried = choice.plan.candidates
    scores = _scores(choice)
    cells: list[dict[str, Any]] = [
        {"lr": f"{values['lr']:g}", "weight decay": f"{values['weight_decay']:g}", "": score}
        for values, score in zip(tried, scores, strict=True)
    ]
    first, *others = dict.fromkeys(cell["lr"] for cell in cells)
    for name, cell in _last(choice).items():
        cells.append({"lr": first, "weight decay": name, "": cell})
        cells += [{"lr": rate, "weight decay": name, "": Cell("")} for rate in others]
    title = f"Tuning: {variant_of(choice.plan.run).title} alone, lr in rows, weight decay in columns"
    return Table.pivot(title, cells, "lr", "weight decay")


def _notes(first: Choice) -> list[str]:
    seeds = "one extra seed"
    and_seeds = ""
    if first.tuning.seeds > 1:
        seeds = f"the same {first.tuning.seeds} extra seeds; scores are their means"
        and_seeds = " and the seeds"
    labels = brackets = ""
    if _has_wrong_labels(first):
        labels = "; some of their labels are wrong, too"
        brackets = " In brackets: the score on the true labels, and the choice by them where it differs."
    halved = set(first.aims) != {first.plan.run.epochs}
    stops = ", or after the epoch given, where the worse half stops," if halved else ""
    unknown = ""
    if first.tuning.seeds == 1 and not task_of(first.plan.run).score.share:
        unknown = (
            " - The score is not the share of samples that are right, so one seed does not tell its standard error; "
            "several do (bsam compare --tune-seeds)."
        )
    return [
        f"Tuning: the score after the last epoch{stops} on {first.samples_text}, which the tuning runs did not train "
        f"on{labels}. All candidates use {seeds}. Ties go to the middle of the grid.{brackets}",
        f"Noise: the standard error of the best score, from the number of samples{and_seeds}. {NOISE} The choice is "
        f"within the noise: another candidate's score is within a standard error. {EDGE} At the edge of the grid: the "
        f"smallest or the largest candidate, a better one may lie beyond.{unknown}",
        "Cost: gradient passes over the training samples and training time of all candidates together.",
    ]


def _has_wrong_labels(choice: Choice) -> bool:
    run = choice.tuning.trial(choice.plan.run)
    return task_of(run).clean_score(run) is not None


def _scores(choice: Choice, with_values: bool = False) -> list[Cell]:
    cells = []
    for tried, values in zip(choice.table, choice.values, strict=True):
        text = _number(tried.score) + (f" ({_number(tried.clean)})" if _has_wrong_labels(choice) else "")
        marks = [f"epoch {tried.epoch}"] if tried.epoch < choice.plan.run.epochs else []
        marks += [f"{tried.diverged} diverged"] if tried.diverged else []
        if tried.diverged == choice.tuning.seeds:
            text = "diverged"
            marks = []
        value = f"{next(iter(values.values())):g}: " if with_values else ""
        cells.append(Cell(value + text, marks=tuple(marks)))
    return cells


def _last(choice: Choice) -> dict[str, Cell]:
    """Return noise, choice and cost."""
    chosen = "-"
    best = choice.best()
    if best is not None:
        marks = (NOISE if choice.is_noisy else "") + (EDGE if choice.table[best].edges else "")
        chosen = (setting_text(choice.values[best]) or "-") + marks
        if _has_wrong_labels(choice) and (true_best := choice.best("clean") or 0) != best:
            chosen += f" ({setting_text(choice.values[true_best])})"
    passes = sum(passes_of(state.run) * len(state.epochs) for state in choice.states)
    seconds = sum(metrics["seconds"] for state in choice.states for metrics in state.epochs)
    cost = f"{passes:g} passes, {duration(seconds)}"
    return {"noise": Cell(_number(choice.noise)), "chosen": Cell(chosen), "cost": Cell(cost)}


def _number(score: float | None) -> str:
    return "-" if score is None or math.isnan(score) else f"{score:.2f}"
