"""Claims of the paper, and what runs say about them: the order of methods in its tables, and flatter minima."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd

from ..recipes.columns import measured_on
from ..recipes.variants import BSAMS, MATCHED, variants
from .significance import BETTER, MIN_SEEDS, NOT_LEARNED, TOO_FEW, WORSE, compare_rows

CONFIRMED = "confirmed"
CONTRADICTED = "contradicted"
OPEN = "open"
OUTCOMES = {BETTER: CONFIRMED, WORSE: CONTRADICTED}  # everything else is open
PAPER_RADII = "at the paper's radii"
OUR_RADII = "at our radii"  # where the paper states none
MATCHED_RADII = "at matched radii"
TUNED_RADII = "at tuned radii"


def paper_claims(runs: pd.DataFrame) -> pd.DataFrame:
    """Return a row for each claim of the paper for which there are runs: those of ``compare_rows``, and what is claimed.

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
    claimed = group.dropna(subset="claimed").drop_duplicates("variant").set_index("variant")["claimed"]
    radii = OUR_RADII if group["settings"].iloc[0]["task"] == "pose" else PAPER_RADII
    at_paper = group[~group["tuned"] & group["claimed"].notna()]
    matched = group[~group["tuned"] & group["variant"].isin(MATCHED) & (group["chosen"] == "BSAM's total radius")]
    bsam = at_paper[at_paper["variant"] == "bsam"]
    tuned = group[(group["tuned"] | (group["variant"] == base)) & group["claimed"].notna()]
    tuned = tuned if tuned["tuned"].any() else tuned.iloc[:0]
    parts = {radii: at_paper, MATCHED_RADII: pd.concat([bsam, matched]), TUNED_RADII: tuned}
    tables = []
    for ours, theirs in (("sam", base), ("bsam", "sam")):
        if {ours, theirs} <= set(claimed.index):
            gap = claimed[ours] - claimed[theirs]
            higher, lower = (ours, theirs) if gap > 0 else (theirs, ours)
            tables += [_scores(part, at, higher, lower, abs(gap)) for at, part in parts.items()]
    for at, part in parts.items():
        tables.append(_flatness(part, at))
    return [table for table in tables if not table.empty]


def _scores(part: pd.DataFrame, at: str, higher: str, lower: str, gap: float) -> pd.DataFrame:
    """Compare the scores of two methods; at matched radii, BSAM's with those of SAM at each matched radius."""
    is_matched = at == MATCHED_RADII
    if is_matched and "bsam" not in (higher, lower):
        return pd.DataFrame()
    against = "bsam" if is_matched else lower
    names = _titles(part, [against, *(MATCHED if is_matched else [higher])])
    if against not in names or len(names) < 2:
        return pd.DataFrame()
    table = _compared(part, names, against, "score")
    sign = -1 if is_matched and higher == "bsam" else 1  # positive differences are those that the paper has
    claim = f"{_name(higher)} better than {_name(lower)}"
    return _claim(table, at, sign, math.nan if is_matched else gap, claim)


def _flatness(part: pd.DataFrame, at: str) -> pd.DataFrame:
    """Compare the largest eigenvalues: those that ``bsam flatness`` measured, or those at the end of training."""
    names = _titles(part, ["bsam", *dict.fromkeys(part["variant"])])
    names = {name: title for name, title in names.items() if name not in BSAMS[1:]}
    if "bsam" not in names or len(names) < 2:
        return pd.DataFrame()
    entries = part["flatness"].map(lambda entry: entry["eigenvalues"]["maximum"] if entry else np.nan)
    samples = part["flatness"].map(lambda entry: entry["samples"] if entry else np.nan)
    n = samples.dropna().mode()
    measured = part.assign(
        end=part["top_eigenvalue"], flat=entries.where(samples == n.iloc[0]) if len(n) else np.nan
    )
    tables = {value: _compared(measured, names, "bsam", value) for value in ("end", "flat")}
    value = max(tables, key=lambda name: tables[name]["shared"].sum())
    table = tables[value][tables[value]["shared"] > 0]
    label = measured_on(part["settings"].iloc[0], int(n.iloc[0]) if value == "flat" else None)
    return _claim(table, at, 1, math.nan, f"BSAM flatter (λmax, {label})")


def _titles(part: pd.DataFrame, names: list[str]) -> dict[str, str]:
    rows = part.drop_duplicates("variant").set_index("variant")["row"]
    return {name: rows[name] for name in dict.fromkeys(names) if name in rows.index}


def _compared(part: pd.DataFrame, names: dict[str, str], pivot: str, value: str) -> pd.DataFrame:
    rows = part[part["row"].isin(names.values())]
    table = compare_rows(rows, names[pivot], value)
    return table[table["row"] != table["against"]]


def _claim(table: pd.DataFrame, at: str, sign: int, gap: float, claim: str) -> pd.DataFrame:
    """Return comparisons as claims; ``sign`` is 1 if a positive difference confirms it."""
    ends: dict[str, Any] = {"difference": sign * table["difference"]}
    low, high = sign * table["low"], sign * table["high"]
    ends |= {"low": np.minimum(low, high), "high": np.maximum(low, high)}
    verdicts = table["verdict"] if sign > 0 else table["verdict"].replace({BETTER: WORSE, WORSE: BETTER})
    outcome = verdicts.map(lambda verdict: OUTCOMES.get(verdict, OPEN))
    return table.assign(**ends, verdict=verdicts, outcome=outcome, at=at, gap=gap, claim=claim)


def _name(variant: str) -> str:
    """Return the name of a method in claims, where Algorithm 1 is just BSAM, as in the paper."""
    if variant == "bsam":
        return "BSAM"
    return variants()[variant].title if variant in variants() else variant.capitalize()
