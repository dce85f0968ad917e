"""Claims of the paper, and what runs say about them: the order of methods in its tables, and flatter minima."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from ..recipes.planning import measured_on
from ..recipes.variants import variants
from .significance import BETTER, MIN_SEEDS, TOO_FEW, WORSE, compare_rows

CONFIRMED = "confirmed"
CONTRADICTED = "contradicted"
OPEN = "open"
OUTCOMES = {BETTER: CONFIRMED, WORSE: CONTRADICTED}  # everything else is open
PAPER_RADII = "at the paper's radii"
OUR_RADII = "at our radii"  # where the paper states none
MATCHED_RADII = "at matched radii"
TUNED_RADII = "at tuned radii"
MATCHED_CHOICE = "BSAM's total radius"  # how the radius of such a run was chosen


def paper_claims(runs: pd.DataFrame) -> pd.DataFrame:
    """Return a row for each claim of the paper for which there are runs, with the columns of ``compare_rows``.

    The claims are the order of the base optimizer, SAM and BSAM in the paper's table, and that the largest eigenvalue
    is smaller for BSAM than for the others. At the paper's radii, BSAM is compared with SAM at the same rho; at matched
    radii, with SAM at rho_max + rho_min, fixed or falling as BSAM's total radius does; at tuned radii, each method has
    the radius that was best on held-out samples. Comparisons with one method at several radii are corrected for each
    other (Holm). ``ours`` and ``theirs`` name the methods, ``at`` the radii, ``gap`` is the published difference, and
    ``outcome`` is confirmed, contradicted or open.
    """
    found = []
    for _, group in runs[runs["settings"].notna()].groupby("experiment", sort=False):
        if group["claimed"].notna().any():
            found += _claims(group)
    return pd.concat(found, ignore_index=True) if found else pd.DataFrame()


def _claims(group: pd.DataFrame) -> list[pd.DataFrame]:
    """Return the claims of an experiment."""
    base = next(iter(group.loc[group["method"] == "base", "variant"]), "")
    paper = group[group["claimed"].notna()]
    numbers = paper.drop_duplicates("variant").set_index("variant")["claimed"]
    radii = OUR_RADII if group["settings"].iloc[0]["task"] == "pose" else PAPER_RADII
    tuned = {False: paper[~paper["tuned"]], True: paper[paper["tuned"] | (paper["variant"] == base)]}
    rows = {
        at: dict(part.drop_duplicates("variant")[["variant", "row"]].itertuples(index=False))
        for at, part in ((radii, tuned[False]), (TUNED_RADII, tuned[True]))
    }
    matched = list(dict.fromkeys(group.loc[group["chosen"] == MATCHED_CHOICE, "row"]))
    tables = []
    for ours, theirs in (("sam", base), ("bsam", "sam")):
        if {ours, theirs} <= set(numbers.index):
            gap = numbers[ours] - numbers[theirs]
            higher, lower = (ours, theirs) if gap > 0 else (theirs, ours)
            claim = f"{_name(higher)} better than {_name(lower)}"
            for at, titles in rows.items():
                if {higher, lower} <= set(titles):
                    table = _compared(group, [titles[higher]], titles[lower], "score")
                    tables.append(_claim(table, at, 1, abs(gap), claim))
            if ours == "bsam" and "bsam" in rows[radii] and matched:
                table = _compared(group, matched, rows[radii]["bsam"], "score")
                tables.append(_claim(table, MATCHED_RADII, -1 if higher == "bsam" else 1, math.nan, claim))
            elif ours == "bsam" and tables and not group["tuned"].any():
                missing = {
                    "row": "SAM at BSAM's total radius",
                    "n": 0,
                    "shared": 0,
                    "verdict": TOO_FEW,
                    "outcome": OPEN,
                }
                tables.append(tables[-1].assign(at=MATCHED_RADII, gap=math.nan, more_seeds=MIN_SEEDS, **missing))
    for at, titles in rows.items():
        others = [titles[name] for name in (base, "sam") if name in titles]
        tables.append(_flatness(group, at, titles.get("bsam"), others if at == radii else others[1:]))
    tables.append(_flatness(group, MATCHED_RADII, rows[radii].get("bsam"), matched))
    return [table for table in tables if not table.empty]


def _flatness(group: pd.DataFrame, at: str, bsam: str | None, others: list[str]) -> pd.DataFrame:
    """Compare the largest eigenvalues: those that ``bsam flatness`` measured, or those at the end of training."""
    if bsam is None or not others:
        return pd.DataFrame()
    samples = group["flatness"].map(lambda entry: entry["samples"] if entry else np.nan)
    tables: dict[int | None, pd.DataFrame] = {None: _compared(group, others, bsam, "top_eigenvalue")}
    for n in samples.dropna().unique():
        maxima = group["flatness"].map(lambda entry: entry["eigenvalues"]["maximum"] if entry else np.nan)
        tables[int(n)] = _compared(group.assign(maximum=maxima.where(samples == n)), others, bsam, "maximum")
    n = max(tables, key=lambda number: (tables[number]["shared"].sum(), number or 0))
    label = measured_on(group["settings"].iloc[0], n)
    table = tables[n][tables[n]["shared"] > 0]
    return _claim(table, at, 1, math.nan, "BSAM flatter than " + table["row"] + f" (λmax, {label})")


def _compared(group: pd.DataFrame, rows: list[str], against: str, value: str) -> pd.DataFrame:
    table = compare_rows(group[group["row"].isin([*rows, against])], against, value)
    return table[table["row"] != table["against"]]


def _claim(table: pd.DataFrame, at: str, sign: int, gap: float, claim: str | pd.Series) -> pd.DataFrame:
    """Return comparisons as claims; ``sign`` is -1 if the paper has the baseline above the rows."""
    if sign < 0:
        pairs = {"row": "against", "n": "their_n", "mean": "their_mean", "std": "their_std"}
        swapped = table.rename(columns={**pairs, **{theirs: ours for ours, theirs in pairs.items()}})
        ends = {"difference": -table["difference"], "low": -table["high"], "high": -table["low"]}
        ends |= {"diverged": 0, "failed": 0, "unfinished": 0}  # those counts belong to the other row
        table = swapped.assign(**ends, verdict=table["verdict"].replace({BETTER: WORSE, WORSE: BETTER}))
    outcome = table["verdict"].map(lambda verdict: OUTCOMES.get(verdict, OPEN))
    return table.assign(outcome=outcome, at=at, gap=gap, claim=claim)


def _name(variant: str) -> str:
    """Return the name of a method in claims, where Algorithm 1 is just BSAM, as in the paper."""
    if variant == "bsam":
        return "BSAM"
    return variants()[variant].title if variant in variants() else variant.capitalize()
