"""Which rows of an experiment are better than others: one criterion for the page, ``compare``, the demo and the docs.

Runs are paired by seed. A difference is shown if a paired t-test over at least three shared seeds has a p-value below
0.05 after Holm's correction: for all methods that are compared with the baseline, or for all pairs of the others.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, combinations
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy import stats

from ...common.errors import BsamValueError
from ..common.printing import group_by
from ..recipes.variants import baseline_row as baseline_row
from .runs_table import STATES

LEVEL = 0.95
MIN_SEEDS = 3  # shared seeds that a verdict needs
MOST_SEEDS = 1000  # more are not worth estimating
BETTER = "better"
WORSE = "worse"
NONE_SHOWN = "no difference shown"
TOO_FEW = "too few seeds"
NOT_LEARNED = "did not learn"
COMPARISON_COLUMNS = (
    *("experiment", "unit", "pooled", "row", "n", "mean", "std", "failed", *STATES[1:], "against", "usable"),
    *("their_n", "their_mean", "their_std", "lost", "shared", "difference", "low", "high", "p", "p_holm", "tests"),
    *("verdict", "more_seeds"),
)


def paired_difference(ours: Mapping[Any, float], theirs: Mapping[Any, float]) -> dict[str, float]:
    """Return the mean of ``ours - theirs`` over the shared seeds, with its 95 % interval and p-value.

    Interval and p-value are NaN with fewer than two pairs, and if the difference is the same for every seed: without a
    spread there is nothing to test, and accuracies change in steps of one sample.

    Example:
        >>> result = paired_difference({0: 3.0, 1: 5.0, 2: 1.0}, {0: 1.0, 1: 2.0})
        >>> {name: round(value, 3) for name, value in result.items()}
        {'shared': 2, 'difference': 2.5, 'low': -3.853, 'high': 8.853, 'p': 0.126}
    """
    shared = [seed for seed in ours if seed in theirs]
    a = np.array([ours[seed] for seed in shared], dtype=float)
    b = np.array([theirs[seed] for seed in shared], dtype=float)
    result = {"shared": len(shared), "difference": math.nan, "low": math.nan, "high": math.nan, "p": math.nan}
    if shared:
        result["difference"] = float((a - b).mean())
    if len(shared) > 1 and np.ptp(a - b) > 1e-9 * max(1.0, np.abs(a).max()):
        test = stats.ttest_rel(a, b)
        low, high = test.confidence_interval(LEVEL)
        result |= {"low": float(low), "high": float(high), "p": float(test.pvalue)}
    return result


def holm(p_values: Iterable[float]) -> NDArray[Any]:
    """Return p-values corrected for each other with Holm's method; NaN stays NaN and does not count.

    Example:
        >>> holm([0.02, float("nan"), 0.01, 0.5]).tolist()
        [0.04, nan, 0.03, 0.5]
    """
    p = np.array(list(p_values), dtype=float)
    order = p.argsort()[: np.isfinite(p).sum()]  # NaN comes last
    corrected = np.full_like(p, math.nan)
    corrected[order] = np.maximum.accumulate(np.minimum(1.0, np.arange(len(order), 0, -1) * p[order]))
    return corrected


def seeds_needed(result: Mapping[str, Any], tests: int) -> float:
    """Return how many more seeds make the interval exclude 0, if mean and spread stay as they are; NaN if unknown.

    Args:
        result: from :func:`paired_difference`, with the ``pooled`` standard deviation of rows over their seeds.
        tests: the number of tests, whose correction asks at most for an interval at the level 1 - 0.05 / tests.
    """
    n = int(result["shared"])
    mean = abs(result["difference"])
    missing = max(MIN_SEEDS - n, 0)
    spread = math.sqrt(2) * result["pooled"]  # of a single difference
    if n > 1:
        spread = (result["high"] - result["low"]) / 2 * math.sqrt(n) / stats.t.ppf((1 + LEVEL) / 2, n - 1)
    if not n or not mean or not spread > 0:
        return missing or math.nan
    counts = np.arange(n + 1, MOST_SEEDS + 1)
    level = 1 - (1 - LEVEL) / max(tests, 1)
    enough = counts[stats.t.ppf((1 + level) / 2, counts - 1) * spread / np.sqrt(counts) < mean]
    return max(missing, int(enough[0]) - n) if len(enough) else math.nan


def compare_rows(runs: pd.DataFrame, baseline: str | None = None, value: str = "score") -> pd.DataFrame:
    """Return a table with a row for each experiment and row of runs, compared with the baseline of the experiment.

    Its columns: ``n``, ``mean`` and ``std`` of finished runs, the number of runs that are ``diverged``, ``unfinished``,
    ``not started`` and ``failed`` (no better than chance), ``against`` (the baseline) with ``their_n``, ``their_mean``
    and ``their_std``, ``shared`` seeds, ``difference`` with its 95 % interval ``low`` and ``high``, ``p``, ``p_holm``,
    ``tests``, ``verdict``, and ``more_seeds``, which would decide if mean and spread stay as they are.

    Args:
        runs: a table of :func:`bsam.lab.read_runs`.
        baseline: a row, or the name of a method on the command line, such as ``"sam"``, in at least one experiment.
            If None, and in experiments without it, the base optimizer or the first row.
        value: the column that is compared; higher is better, except for scores that say otherwise (``higher``).
    """
    if baseline is not None:
        check_baseline(runs, baseline)
    table = []
    for _, group in runs.groupby("experiment", sort=False):
        rows = group["row"].unique()
        bases = group.loc[group["method"] == "base", "row"]
        against = (baseline and baseline_row(rows, baseline)) or next(iter(bases), rows[0])
        table += compare_family(group, [(row, against) for row in rows], value)
    return pd.DataFrame(table, columns=list(COMPARISON_COLUMNS))


def compare_pairs(runs: pd.DataFrame, value: str = "score") -> pd.DataFrame:
    """Return the comparisons of all pairs of rows of an experiment, corrected together; columns as ``compare_rows``."""
    table = []
    for _, group in runs.groupby("experiment", sort=False):
        pairs = [(row, against) for against, row in combinations(group["row"].unique(), 2)]
        table += compare_family(group, pairs, value)
    return pd.DataFrame(table, columns=list(COMPARISON_COLUMNS))


def compare_family(group: pd.DataFrame, pairs: Sequence[tuple[str, str]], value: str = "score") -> list[dict[str, Any]]:
    """Return the comparisons of pairs of rows, corrected for each other; columns as ``compare_rows``.

    Args:
        group: the runs of an experiment.
        pairs: the names of rows, and of those that they are compared with.
        value: the column that is compared; higher is better, except for scores that say otherwise (``higher``).
    """
    columns = group[["row", "seed", "state", "failure", value]].itertuples(index=False, name=None)
    runs_of = group_by(columns, lambda run: run[0])
    rows = {name: _Row(runs_of.get(name, [])) for name in dict.fromkeys(chain(*pairs))}
    squares = sum(row.numbers["std"] ** 2 * (len(row.scores) - 1) for row in rows.values() if len(row.scores) > 1)
    freedom = sum(max(len(row.scores) - 1, 0) for row in rows.values())
    about = {"experiment": group["experiment"].iloc[0], "unit": group["unit"].iloc[0] if value == "score" else ""}
    higher = value != "score" or "higher" not in group or bool(group["higher"].iloc[0])
    about["pooled"] = math.sqrt(squares / freedom) if freedom else math.nan
    table = []
    for name, against in pairs:
        ours = rows[name]
        theirs = rows[against]
        usable = name != against and not ours.numbers["failed"] and not theirs.numbers["failed"]
        row = {**about, "row": name, **ours.numbers, "against": against, "usable": usable}
        row |= {f"their_{name}": theirs.numbers[name] for name in ("n", "mean", "std")}
        row["lost"] = len(ours.lost & theirs.scores.keys()) - len(theirs.lost & ours.scores.keys())
        table.append(row | paired_difference(ours.scores if usable else {}, theirs.scores))
    corrected = holm(row["p"] if row["shared"] >= MIN_SEEDS else math.nan for row in table)
    compared = sum(row["usable"] and row["shared"] > 0 for row in table)
    for row, p in zip(table, corrected.tolist(), strict=True):
        row |= {"p_holm": p, "tests": int(np.isfinite(corrected).sum())}
        row["verdict"] = _verdict(row, higher)
        is_open = row["verdict"] in (NONE_SHOWN, TOO_FEW)
        row["more_seeds"] = seeds_needed(row, compared) if is_open else math.nan
    return table


class _Row:
    """The scores of a row by seed, the seeds that it lost if it has no score (it diverged with them), and counts."""

    def __init__(self, runs: Sequence[tuple[Any, ...]]) -> None:
        finished = [(seed, float(score)) for _, seed, state, _, score in runs if state == "finished"]
        self.scores = {seed: score for seed, score in finished if not math.isnan(score)}
        self.lost = {seed for _, seed, state, *_ in runs if state == "diverged" and not self.scores}
        states = [state for _, _, state, *_ in runs]
        scores = list(self.scores.values())
        self.numbers = {
            "n": len(scores),
            "mean": float(np.mean(scores)) if scores else math.nan,
            "std": float(np.std(scores, ddof=1)) if len(scores) > 1 else math.nan,
            "failed": sum(failure != "" for _, _, _, failure, _ in runs),
            **{state: states.count(state) for state in STATES[1:]},
        }


def _verdict(row: Mapping[str, Any], higher: bool) -> str:
    if row["row"] == row["against"]:
        return ""
    if not row["usable"]:
        return NOT_LEARNED
    if abs(row["lost"]) >= MIN_SEEDS:
        return WORSE if row["lost"] > 0 else BETTER
    if row["shared"] < MIN_SEEDS:
        return TOO_FEW
    if row["p_holm"] < 1 - LEVEL:
        return BETTER if (row["difference"] > 0) == higher else WORSE
    return NONE_SHOWN


def check_baseline(runs: pd.DataFrame, baseline: str) -> None:
    """Raise if there are runs, but the name matches a single row in none of their experiments."""
    rows = runs.groupby("experiment")["row"].unique()
    if len(rows) and all(baseline_row(names, baseline) is None for names in rows):
        known = "; ".join(dict.fromkeys(runs["row"]))
        raise BsamValueError(f"baseline must be one of the methods of the runs ({known}), got {baseline!r}")
