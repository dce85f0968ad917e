"""Which rows of an experiment are better than others: one criterion for the page, ``compare``, the demo and the docs.

Runs are paired by seed. A difference is shown if a paired t-test over at least three shared seeds has a p-value below
0.05, corrected for all methods that are compared (Holm).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy import stats

from ...common.errors import BsamValueError
from ..recipes.variants import variants

LEVEL = 0.95
MIN_SEEDS = 3  # shared seeds that a verdict needs
MOST_SEEDS = 1000  # more are not worth estimating
BETTER = "better"
WORSE = "worse"
NONE_SHOWN = "no difference shown"
TOO_FEW = "too few seeds"
NOT_LEARNED = "did not learn"


def paired_difference(ours: Mapping[Any, float], theirs: Mapping[Any, float]) -> dict[str, float]:
    """Return the mean of ``ours - theirs`` over the shared seeds, with its 95 % interval and p-value.

    The interval is NaN with fewer than two pairs; the p-value also if all differences are equal, since their spread is
    then unknown: accuracies change in steps of one sample.

    Example:
        >>> found = paired_difference({0: 3.0, 1: 5.0, 2: 1.0}, {0: 1.0, 1: 2.0})
        >>> {name: round(value, 3) for name, value in found.items()}
        {'shared': 2, 'difference': 2.5, 'low': -3.853, 'high': 8.853, 'p': 0.126}
    """
    shared = [seed for seed in ours if seed in theirs]
    a, b = (np.array([values[seed] for seed in shared], dtype=float) for values in (ours, theirs))
    found = {"shared": len(shared), "difference": math.nan, "low": math.nan, "high": math.nan, "p": math.nan}
    if shared:
        found["difference"] = float((a - b).mean())
    if len(shared) > 1 and np.ptp(a - b) <= 1e-9 * max(1.0, np.abs(a).max()):
        found |= {"low": found["difference"], "high": found["difference"]}
    elif len(shared) > 1:
        test = stats.ttest_rel(a, b)
        low, high = test.confidence_interval(LEVEL)
        found |= {"low": float(low), "high": float(high), "p": float(test.pvalue)}
    return found


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


def seeds_needed(found: dict[str, float], tests: int) -> float:
    """Return how many more seeds make the interval exclude 0, if mean and spread stay as they are; NaN if unknown.

    Args:
        found: a result of :func:`paired_difference`, with the ``pooled`` standard deviation of rows over their seeds.
        tests: the number of tests, whose correction asks at most for an interval at the level 1 - 0.05 / tests.
    """
    n, mean = int(found["shared"]), abs(found["difference"])
    missing = max(MIN_SEEDS - n, 0)
    spread = math.sqrt(2) * found["pooled"]  # of a single difference
    if n > 1:
        spread = (found["high"] - found["low"]) / 2 * math.sqrt(n) / stats.t.ppf((1 + LEVEL) / 2, n - 1)
    if not n or not mean or not spread > 0:
        return missing or math.nan
    counts = np.arange(n + 1, MOST_SEEDS + 1)
    level = 1 - (1 - LEVEL) / max(tests, 1)
    enough = counts[stats.t.ppf((1 + level) / 2, counts - 1) * spread / np.sqrt(counts) < mean]
    return max(missing, int(enough[0]) - n) if len(enough) else math.nan


def compare_rows(runs: pd.DataFrame, baseline: str | None = None, value: str = "score") -> pd.DataFrame:
    """Return a table with a row for each experiment and row of runs, compared with the baseline of the experiment.

    Its columns: ``n``, ``mean`` and ``std`` of finished runs, ``diverged``, ``unfinished`` and ``failed`` (no better
    than chance) runs, ``against`` (the baseline) with ``their_n``, ``their_mean`` and ``their_std``, ``shared`` seeds,
    ``difference`` with its 95 % interval ``low`` and ``high``, ``p``, ``p_holm``, ``tests``, ``verdict``, and
    ``more_seeds``, which would decide if mean and spread stay as they are.

    Args:
        runs: a table of :func:`bsam.lab.read_runs`.
        baseline: a row, or the name of a method on the command line, such as ``"sam"``; None, and in experiments
            without it, the base optimizer or the first row.
        value: the column that is compared; higher is better.
    """
    tables = [_compare(group, _baseline(group, baseline), value) for _, group in runs.groupby("experiment", sort=False)]
    return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame()


def compare_pairs(runs: pd.DataFrame, value: str = "score") -> pd.DataFrame:
    """Return the comparisons of all pairs of rows of an experiment, corrected together; columns as ``compare_rows``."""
    tables = []
    for _, group in runs.groupby("experiment", sort=False):
        rows = list(dict.fromkeys(group["row"]))
        parts = [_compare(group[group["row"].isin(rows[i:])], row, value) for i, row in enumerate(rows[:-1])]
        tables += [_decided(pd.concat(parts, ignore_index=True).query("row != against"))] if parts else []
    return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame()


def _compare(group: pd.DataFrame, against: str, value: str) -> pd.DataFrame:
    runs_of: dict[str, list[Any]] = {}
    for run in group[["row", "seed", "state", "failure", value]].itertuples(index=False, name=None):
        runs_of.setdefault(run[0], []).append(run)
    scores = {
        row: {seed: float(score) for _, seed, state, _, score in runs if state == "finished" and not math.isnan(score)}
        for row, runs in runs_of.items()
    }
    failed = {row: sum(run[3] != "" for run in runs) for row, runs in runs_of.items()}
    theirs = scores[against]
    spreads = {row: np.var(list(values.values()), ddof=1) for row, values in scores.items() if len(values) > 1}
    freedom = sum(len(scores[row]) - 1 for row in spreads)
    squares = sum((len(scores[row]) - 1) * variance for row, variance in spreads.items())
    shared = {"experiment": group["experiment"].iloc[0], "unit": group["unit"].iloc[0], "against": against}
    shared |= {f"their_{name}": number for name, number in _statistics(theirs).items()}
    shared["pooled"] = math.sqrt(squares / freedom) if freedom else math.nan
    rows = []
    for row, runs in runs_of.items():
        ours, states = scores[row], [run[2] for run in runs]
        usable = row != against and not failed[row] and not failed[against]
        lost = sum(run[2] == "diverged" and run[1] in theirs for run in runs)
        counts = {
            "diverged": states.count("diverged"),
            "unfinished": states.count("unfinished") + states.count("not started"),
            "failed": failed[row],
            "usable": usable,
            "lost": 0 if ours else lost,
        }
        difference = paired_difference(ours if usable else {}, theirs)
        rows.append({**shared, "row": row, **_statistics(ours), **counts, **difference})
    return _decided(pd.DataFrame(rows))


def _statistics(scores: Mapping[Any, float]) -> dict[str, float]:
    values = list(scores.values())
    mean = float(np.mean(values)) if values else math.nan
    return {"n": len(values), "mean": mean, "std": float(np.std(values, ddof=1)) if len(values) > 1 else math.nan}


def _decided(table: pd.DataFrame) -> pd.DataFrame:
    """Return the comparisons with corrected p-values, verdicts, and the number of seeds that would decide."""
    compared = table["usable"] & (table["shared"] > 0)
    corrected = holm(table["p"].where(table["shared"] >= MIN_SEEDS))
    table = table.assign(p_holm=corrected, tests=int(np.isfinite(corrected).sum()))
    conditions = [
        table["row"] == table["against"],
        ~table["usable"],
        table["lost"] >= MIN_SEEDS,
        table["shared"] < MIN_SEEDS,
        (table["p_holm"] < 1 - LEVEL) & (table["difference"] > 0),
        table["p_holm"] < 1 - LEVEL,
    ]
    words = np.select(conditions, ["", NOT_LEARNED, WORSE, TOO_FEW, BETTER, WORSE], NONE_SHOWN)
    needed = [
        seeds_needed(row, int(compared.sum())) if word in (NONE_SHOWN, TOO_FEW) else math.nan
        for row, word in zip(table.to_dict("records"), words, strict=True)
    ]
    return table.assign(verdict=words, more_seeds=needed)


def _baseline(group: pd.DataFrame, name: str | None) -> str:
    rows = list(dict.fromkeys(group["row"]))
    bases = list(dict.fromkeys(group.loc[group["method"] == "base", "row"]))
    return (name and baseline_row(rows, name)) or (bases or rows)[0]


def baseline_row(rows: Iterable[str], baseline: str) -> str | None:
    """Return the row that a user calls ``baseline``; None if there is none, or if several rows could be meant.

    Example:
        >>> baseline_row(["SGD", "BSAM (Algorithm 1)"], "bsam")
        'BSAM (Algorithm 1)'
        >>> baseline_row(["SGD", "SAM, rho 0.1", "SAM, rho 0.2"], "sam")
    """
    rows = list(rows)
    names = {baseline.casefold(), variants()[baseline].title.casefold() if baseline in variants() else ""}
    exact = [row for row in rows if row.casefold() in names]
    similar = [row for row in rows if row.partition(", ")[0].casefold() in names]
    return exact[0] if exact else similar[0] if len(similar) == 1 else None


def check_baseline(runs: pd.DataFrame, baseline: str) -> None:
    """Raise unless the name matches a single row in at least one experiment."""
    rows = runs.groupby("experiment")["row"].unique()
    if all(baseline_row(names, baseline) is None for names in rows):
        known = "; ".join(dict.fromkeys(runs["row"]))
        raise BsamValueError(f"baseline must be one of the methods of the runs ({known}), got {baseline!r}")
