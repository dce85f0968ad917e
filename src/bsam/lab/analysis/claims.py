"""Claims of the paper, and what runs say about them: the order of methods in its tables, and flatter minima."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd

from ..recipes.planning import measured_on
from ..recipes.variants import variants
from .significance import BETTER, WORSE, compare_family

CONFIRMED = "confirmed"
CONTRADICTED = "contradicted"
OPEN = "open"
OUTCOMES = {BETTER: CONFIRMED, WORSE: CONTRADICTED}  # everything else is open
PAPER_RADII = "at the paper's radii"
OUR_RADII = "at our radii"  # where the paper states none
MATCHED_RADII = "at matched radii"
TUNED_RADII = "at tuned radii"
NO_MATCH = "SAM at BSAM's total radius"  # no such run exists
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
    table = []
    for _, group in runs[runs["settings"].notna()].groupby("experiment", sort=False):
        if group["claimed"].notna().any():
            table += _claims(group)
    return pd.DataFrame(table)


def _claims(group: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the claims of an experiment."""
    base = next(iter(group.loc[group["method"] == "base", "variant"]), "")
    paper = group[group["claimed"].notna()]
    numbers = paper.drop_duplicates("variant").set_index("variant")["claimed"]
    radii = OUR_RADII if group["settings"].iloc[0]["task"] == "pose" else PAPER_RADII
    parts = {radii: ~paper["tuned"], TUNED_RADII: paper["tuned"] | (paper["variant"] == base)}
    rows = {at: paper[part].drop_duplicates("variant").set_index("variant")["row"] for at, part in parts.items()}
    matched = group.loc[group["chosen"] == MATCHED_CHOICE, "row"].unique().tolist()
    claims = []
    for ours, theirs in (("sam", base), ("bsam", "sam")):
        if {ours, theirs} <= set(numbers.index):
            gap = numbers[ours] - numbers[theirs]
            higher, lower = (ours, theirs) if gap > 0 else (theirs, ours)
            families = [
                (at, abs(gap), [(titles[higher], titles[lower])])
                for at, titles in rows.items()
                if {higher, lower} <= set(titles.index)
            ]
            if ours == "bsam" and "bsam" in rows[radii] and (matched or not group["tuned"].any()):
                pairs = [(rows[radii]["bsam"], row) for row in matched or [NO_MATCH]]
                pairs = pairs if higher == "bsam" else [(row, against) for against, row in pairs]
                families.append((MATCHED_RADII, math.nan, pairs))
            claim = f"{_name(higher)} better than {_name(lower)}"
            for at, gap, pairs in families:
                claims += [_claim(row, at, gap, claim) for row in compare_family(group, pairs)]
    for at, titles in rows.items():
        others = [titles[name] for name in ((base, "sam") if at == radii else ("sam",)) if name in titles]
        claims += _flatness(group, at, titles.get("bsam"), others)
    return claims + _flatness(group, MATCHED_RADII, rows[radii].get("bsam"), matched)


def _flatness(group: pd.DataFrame, at: str, bsam: str | None, others: list[str]) -> list[dict[str, Any]]:
    """Compare the largest eigenvalues: those that ``bsam flatness`` measured, or those at the end of training."""
    if bsam is None or not others:
        return []
    pairs = [(row, bsam) for row in others]
    tables = {0: compare_family(group, pairs, "top_eigenvalue")}
    measured = pd.DataFrame([entry or {} for entry in group["flatness"]], group.index)
    for n in measured.get("samples", pd.Series(dtype=float)).dropna().unique():
        maxima = measured["eigenvalues"].where(measured["samples"] == n).str["maximum"]
        tables[int(n)] = compare_family(group.assign(maximum=maxima.astype(float)), pairs, "maximum")
    n = max(tables, key=lambda n: (sum(row["shared"] for row in tables[n]), n))
    label = measured_on(group["settings"].iloc[0], n or None)
    shown = [row for row in tables[n] if row["shared"]]
    return [_claim(row, at, math.nan, f"BSAM flatter than {row['row']} (λmax, {label})") for row in shown]


def _claim(row: dict[str, Any], at: str, gap: float, claim: str) -> dict[str, Any]:
    return {**row, "outcome": OUTCOMES.get(row["verdict"], OPEN), "at": at, "gap": gap, "claim": claim}


def _name(variant: str) -> str:
    """Return the name of a method in claims, where Algorithm 1 is just BSAM, as in the paper."""
    if variant == "bsam":
        return "BSAM"
    return variants()[variant].title if variant in variants() else variant.capitalize()
