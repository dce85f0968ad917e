"""Comparisons in words: one template for each sentence, for the page, ``bsam compare`` and the demo."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from ..common.printing import count_text, group_by
from .significance import BETTER, MIN_SEEDS, NONE_SHOWN, NOT_LEARNED, TOO_FEW, WORSE, compare_pairs


def numbers_text(mean: float, std: float | None, n: int = 0, digits: int = 2) -> str:
    """Return mean, standard deviation if it is known, and the number of seeds unless it is 0.

    Example:
        >>> numbers_text(95.123, 0.1, 3), numbers_text(95.123, math.nan, digits=1)
        ('95.12 ± 0.10 (3)', '95.1')
    """
    spread = "" if std is None or math.isnan(std) else f" ± {std:.{digits}f}"
    return f"{mean:.{digits}f}{spread}" + (f" ({n})" if n else "")


def difference_text(row: Mapping[str, Any], digits: int = 2) -> str:
    """Return a difference with its interval, the number of shared seeds and the corrected p-value."""
    if not row["shared"]:
        return "no shared seeds"
    points = " points" if "%" in row["unit"] else ""
    text = f"{row['difference']:+.{digits}f}{points}"
    if row["low"] < row["high"]:
        text += f" [95 % interval {row['low']:+.{digits}f}, {row['high']:+.{digits}f}]"
    elif row["shared"] > 1:
        text += ", the same for every seed, so there is no spread to test"
    text += f", {count_text(row['shared'], 'shared seed')}"
    if row["tests"] > 1 and not math.isnan(row["p_holm"]):
        p = "< 0.001" if row["p_holm"] < 0.001 else f"= {row['p_holm']:.3g}"
        text += f", p {p} after Holm's correction for {row['tests']} comparisons"
    return text


def evidence(row: Mapping[str, Any], digits: int = 2) -> str:
    """Return the numbers behind a verdict: both rows, their difference, and what did not finish."""
    text = f"No finished runs of {row['against'] if row['n'] else row['row']}."
    if row["n"] and row["their_n"]:
        ours = numbers_text(row["mean"], row["std"], row["n"], digits)
        theirs = numbers_text(row["their_mean"], row["their_std"], row["their_n"], digits)
        difference = "" if row["verdict"] == NOT_LEARNED else f": {difference_text(row, digits)}"
        text = f"{row['row']} {ours}, {row['against']} {theirs}{difference}."
    return text + failures_text(row)


def failures_text(row: Mapping[str, Any]) -> str:
    """Return sentences on the seeds with which a row did not learn or diverged, to add to others."""
    text = ""
    if row["failed"]:
        text += f" {row['row']} did not learn with {row['failed']} of {count_text(row['n'], 'seed')}."
    if row["diverged"]:
        text += f" {row['row']} diverged with {count_text(row['diverged'], 'seed')}."
    return text


def seeds_sentence(row: Mapping[str, Any]) -> str:
    """Return how many more seeds would decide; empty if that is decided or not known."""
    if math.isnan(row["more_seeds"]):
        return ""
    seeds = count_text(int(row["more_seeds"]), "more seed")
    if row["verdict"] == TOO_FEW and row["more_seeds"] <= MIN_SEEDS - row["shared"]:
        return f"At least {seeds} needed."
    return f"About {seeds} would decide, if mean and spread stay."


def answer(table: pd.DataFrame) -> str:
    """Return one sentence on which rows are better than the baseline of an experiment.

    Args:
        table: the rows of one experiment in a table of ``compare_rows``.
    """
    baseline = table["against"].iloc[0]
    others = table[table["row"] != baseline]
    better = others[others["verdict"] == BETTER].sort_values("difference", key=abs, ascending=False)["row"].tolist()
    if not table["their_n"].any():
        return f"{baseline} has no finished run, so nothing can be compared with it."
    if better:
        return f"{listed(better)} {'are' if len(better) > 1 else 'is'} better than {baseline}, by more than chance."
    if set(others["verdict"]) == {TOO_FEW}:
        return f"Too few seeds: telling whether a method is better than {baseline} needs at least {MIN_SEEDS}."
    if set(others["verdict"]) == {NOT_LEARNED}:
        return f"Nothing can be compared with {baseline}: the networks did not learn."
    return f"No method is shown to be better than {baseline}."


def sentence(row: Mapping[str, Any]) -> str:
    """Return one sentence on a row of ``compare_rows``."""
    radius = row.get("radius", math.nan)
    passes = row.get("passes", math.nan)
    size = "" if math.isnan(radius) else f" at total radius {radius:g}"
    name = f"{row['row']}{size}" + (f" ({row['chosen']})" if row.get("chosen") else "")
    if row["verdict"] == NOT_LEARNED or not row["shared"]:
        return f"{name}: {row['verdict']}. {evidence(row)}"
    verdict = f" is {row['verdict']}" if row["verdict"] in (BETTER, WORSE) else f": {row['verdict']}"
    cost = "" if math.isnan(passes) else f", at {passes:.3g} {'pass' if passes == 1 else 'passes'} per step"
    return f"{name}{verdict} ({difference_text(row)}){cost}. {seeds_sentence(row)}".rstrip()


def pairs_sentence(pairs: Iterable[Mapping[str, Any]]) -> str:
    """Return sentences on the methods other than the baseline, compared with each other; empty without a verdict."""
    rows = group_by(pairs, lambda row: row["verdict"] in (BETTER, WORSE) or row["verdict"])
    parts = [
        f"{row['row']} is {row['verdict']} than {row['against']} ({difference_text(row)})."
        for row in rows.get(True, [])
    ]
    if level := [f"{row['against']} and {row['row']}" for row in rows.get(NONE_SHOWN, [])]:
        parts.append(f"No difference shown between {'; '.join(level)}.")
    return " ".join(parts)


def listed(names: Sequence[str]) -> str:
    """Return names in words.

    Example:
        >>> listed(["SAM"]), listed(["SAM", "GSAM", "BSAM"]), listed(["SGD, tuned", "SAM"])
        ('SAM', 'SAM, GSAM and BSAM', 'SGD, tuned; SAM')
    """
    if any("," in name for name in names):
        return "; ".join(names)
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


@dataclass(frozen=True)
class ComparisonResult:
    """Methods compared with a baseline. ``str`` gives the answer as a paragraph.

    Args:
        table: a row for each method: the columns of ``compare_rows``, and ``radius``, ``chosen``, ``passes`` and
            ``seconds`` of its runs.
        pairs: the other methods, compared with each other and corrected together: the columns of ``compare_rows``.
        shared: a sentence on the tuned settings that all methods share; empty if there are none.
        page: the report, an HTML file; None if it was not written.
    """

    table: pd.DataFrame
    pairs: pd.DataFrame
    shared: str = ""
    page: Path | None = None

    @property
    def baseline(self) -> str:
        """The row that the others are compared with, in the first experiment."""
        return str(self.table["against"].iloc[0])

    @property
    def nobody_learned(self) -> bool:
        """Whether no row can be compared because the networks did not learn, or all runs diverged."""
        others = self.table[self.table["row"] != self.table["against"]]
        has_finished = self.table["n"].any()
        return bool((others["verdict"] == NOT_LEARNED).all() if has_finished else self.table["diverged"].all())

    @property
    def sentences(self) -> list[str]:
        """The answer, the numbers of the baseline and of each method, and the methods compared with each other.

        If there are several experiments, a paragraph for each of them.
        """
        experiments = {title: self._sentences(table) for title, table in self.table.groupby("experiment", sort=False)}
        paragraphs = [f"{title}: {' '.join(sentences)}" for title, sentences in experiments.items()]
        found = paragraphs if len(paragraphs) > 1 else next(iter(experiments.values()))
        return list(filter(None, [*found, self.shared]))

    def _sentences(self, table: pd.DataFrame) -> list[str]:
        """Return the sentences on one experiment."""
        rows = table.to_dict("records")
        (base,) = (row for row in rows if row["row"] == row["against"])
        numbers = ""
        if base["n"]:
            numbers = f"{base['row']}: {base['unit']} {numbers_text(base['mean'], base['std'], base['n'])}."
        others = [sentence(row) for row in rows if row is not base]
        pairs = [pair for pair in self.pairs.to_dict("records") if pair["experiment"] == base["experiment"]]
        return list(filter(None, [answer(table), numbers, *others, pairs_sentence(pairs)]))

    def __str__(self) -> str:
        return " ".join(self.sentences)


def comparison(runs: pd.DataFrame, table: pd.DataFrame, shared: str = "", page: Path | None = None) -> ComparisonResult:
    """Return the result for a table of ``compare_rows`` of these runs."""
    first = dict.fromkeys(("radius", "chosen", "passes"), "first")
    about = runs.groupby(["experiment", "row"]).agg({**first, "seconds": "mean"})
    bases = dict(zip(table["experiment"], table["against"], strict=True))
    pairs = compare_pairs(runs[runs["row"] != runs["experiment"].map(bases)])
    return ComparisonResult(table.join(about, on=["experiment", "row"]), pairs, shared, page)
