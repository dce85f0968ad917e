"""Which rows of an experiment are better than others: one criterion for the page, ``compare``, the demo and the docs.

Runs are paired by seed. A difference is shown if a paired t-test over at least three shared seeds has a p-value below
0.05, corrected for all methods that are compared (Holm).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
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


def paired_difference(ours: pd.Series, theirs: pd.Series) -> dict[str, float]:
    """Return the mean of ``ours - theirs`` over the shared index, with its 95 % interval and p-value.

    The interval is NaN with fewer than two pairs; the p-value also if all differences are equal, since their spread is
    then unknown: accuracies change in steps of one sample.

    Example:
        >>> found = paired_difference(pd.Series([3.0, 5.0, 1.0]), pd.Series([1.0, 2.0]))
        >>> {name: round(value, 3) for name, value in found.items()}
        {'shared': 2, 'difference': 2.5, 'low': -3.853, 'high': 8.853, 'p': 0.126}
    """
    pairs = pd.concat([ours, theirs], axis=1, join="inner").dropna().to_numpy(dtype=float)
    gaps = pairs[:, 0] - pairs[:, 1]
    found = {"shared": len(gaps), "difference": math.nan, "low": math.nan, "high": math.nan, "p": math.nan}
    if len(gaps):
        found["difference"] = float(gaps.mean())
    if len(gaps) > 1 and np.ptp(gaps) <= 1e-9 * max(1.0, np.abs(pairs).max()):
        found |= {"low": found["difference"], "high": found["difference"]}
    elif len(gaps) > 1:
        test = stats.ttest_rel(pairs[:, 0], pairs[:, 1])
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
        runs: a table of :func:`bsam.lab.analysis.runs_table.read_runs`.
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
    finished = group[group["state"] == "finished"]
    scores = {row: runs.set_index("seed")[value].dropna() for row, runs in finished.groupby("row", sort=False)}
    failed = {row for row, runs in finished.groupby("row") if runs["failure"].any()}
    none = pd.Series(dtype=float)
    theirs = scores.get(against, none)
    freedom = sum(len(values) - 1 for values in scores.values() if len(values) > 1)
    squares = sum((len(values) - 1) * values.var() for values in scores.values() if len(values) > 1)
    rows = []
    for row, runs in group.groupby("row", sort=False):
        ours = scores.get(row, none)
        usable = row != against and not failed & {row, against}
        lost = set(runs.loc[runs["state"] == "diverged", "seed"]) & set(theirs.index)
        rows.append(
            {
                "experiment": group["experiment"].iloc[0],
                "row": row,
                "unit": group["unit"].iloc[0],
                "n": len(ours),
                "mean": ours.mean(),
                "std": ours.std(),
                "diverged": int((runs["state"] == "diverged").sum()),
                "unfinished": int(runs["state"].isin(["unfinished", "not started"]).sum()),
                "failed": int((runs["failure"] != "").sum()),
                "against": against,
                "their_n": len(theirs),
                "their_mean": theirs.mean(),
                "their_std": theirs.std(),
                "usable": usable,
                "pooled": math.sqrt(squares / freedom) if freedom else math.nan,
                "lost": len(lost) if ours.empty else 0,
                **paired_difference(ours if usable else none, theirs),
            }
        )
    return _decided(pd.DataFrame(rows))


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
