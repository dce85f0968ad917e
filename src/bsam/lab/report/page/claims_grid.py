"""The claims of the paper as one grid: experiments in rows, differences in columns; a cell opens its evidence."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pandas as pd

from ...analysis.sentences import evidence, failures_text, seeds_sentence
from ...analysis.significance import MIN_SEEDS, NOT_LEARNED
from ...common.printing import count_text
from ...paper import CONFIRMED, CONTRADICTED, MATCHED_RADII, NO_MATCH, OPEN, TUNED_RADII, paper_claims
from ...recipes.variants import variants
from ..table import Cell, Row, Table

UNDECIDED_CLAIM = "undecided"
NOT_RUN = "not run"
CLAIM_SIGNS = {CONFIRMED: "✓ ", CONTRADICTED: "✗ "}
CLAIMS_TITLE = "Claims of the paper"
CLAIMS_LEGEND = (
    "Differences in points; λmax is the largest eigenvalue of the Hessian, and a negative difference is flatter. "
    "undecided: 3 seeds or more do not show a difference. 1 or 2 seeds decide nothing. Empty: no claim."
)
SAM_BASE = "SAM \u2212 base"
BSAM_BASE = "BSAM \u2212 base"
BSAM_SAM = "BSAM \u2212 SAM"
SAME = f"{BSAM_SAM}, same rho"
TOTAL = f"{BSAM_SAM}, same total rho"
BSAM_SAM_TUNED = f"{BSAM_SAM}, tuned"
SCHEDULE = f"{TOTAL} and schedule"
ORDER = (SAM_BASE, f"{SAM_BASE}, tuned", BSAM_BASE, SAME, TOTAL, SCHEDULE, BSAM_SAM_TUNED)
SWAPPED = {"row": "against", "n": "their_n", "mean": "their_mean", "std": "their_std"}


def claims_grid(runs: pd.DataFrame, ids: Mapping[str, str]) -> tuple[Table, str] | None:
    """Return the claims for which there are runs, and a sentence that counts them; None if there are none.

    Args:
        runs: a table of ``read_runs``.
        ids: the ids of experiments on the page, by title.
    """
    claims = paper_claims(runs).to_dict("records")
    if not claims:
        return None
    cells = [_cell(claim, ids.get(claim["experiment"], "")) for claim in claims]
    parts = [*ORDER, *(f"λmax: {name}" for name in ORDER)]
    for cell in cells:
        parts += [part for part in cell if part.startswith(("SAM", "BSAM", "λmax")) and part not in parts]
    return Table.pivot(CLAIMS_TITLE, cells, "experiment", "claim", parts, [CLAIMS_LEGEND]), _counts(claims)


def status(claim: Row) -> str:
    """Return the outcome of a claim or, if it is open, why."""
    if claim["outcome"] != OPEN:
        return str(claim["outcome"])
    if claim["verdict"] == NOT_LEARNED:
        return NOT_LEARNED
    if not min(claim["n"], claim["their_n"]):
        return NOT_RUN
    return count_text(claim["shared"], "seed") if claim["shared"] < MIN_SEEDS else UNDECIDED_CLAIM


def _counts(claims: list[dict[str, Any]]) -> str:
    """Return how many claims are confirmed, contradicted and open, and why they are open."""
    outcomes = Counter(claim["outcome"] for claim in claims)
    reasons = Counter(map(status, claims))
    parts = [f"{outcomes[name]} {'is' if outcomes[name] == 1 else 'are'} {name}" for name in (CONFIRMED, CONTRADICTED)]
    few = sum(count for reason, count in reasons.items() if "seed" in reason)
    words = {
        f"{few} with fewer than three seeds": few,
        f"{reasons[UNDECIDED_CLAIM]} undecided": reasons[UNDECIDED_CLAIM],
        f"{reasons[NOT_RUN]} not run": reasons[NOT_RUN],
        f"{reasons[NOT_LEARNED]} that did not learn": reasons[NOT_LEARNED],
    }
    why = ", ".join(text for text, number in words.items() if number)
    open_ = f"{outcomes[OPEN]} {'is' if outcomes[OPEN] == 1 else 'are'} open" + (f" ({why})" if why else "")
    return f"Of {count_text(len(claims), 'claim')}, {', '.join(parts)} and {open_}."


def _place(claim: Row) -> tuple[str, bool]:
    """Return the column of a claim, and whether the column has the opposite sign."""
    text = claim["claim"]
    at = claim["at"]
    flatter = " flatter than " in text
    turned = not flatter and text.startswith("SAM better than BSAM")
    other = claim["row"] if flatter or turned else claim["against"]
    if not flatter and "BSAM" not in text:
        name = f"{SAM_BASE}, tuned" if at == TUNED_RADII else SAM_BASE
        return name, not text.startswith("SAM better")
    known = {NO_MATCH: TOTAL, variants()["sam-sum"].title: TOTAL, variants()["sam-follow"].title: SCHEDULE}
    if at == MATCHED_RADII:
        name = known.get(other, f"BSAM \u2212 {other}")
    elif at == TUNED_RADII:
        name = BSAM_SAM_TUNED
    else:
        name = SAME if other.startswith("SAM") else BSAM_BASE
    return (f"λmax: {name}", True) if flatter else (name, turned)


def _turned(claim: Row) -> dict[str, Any]:
    """Return a comparison the other way round."""
    turned = dict(claim)
    for ours, theirs in SWAPPED.items():
        turned[ours] = claim[theirs]
        turned[theirs] = claim[ours]
    numbers = {"difference": -claim["difference"], "low": -claim["high"], "high": -claim["low"], "gap": -claim["gap"]}
    return {**turned, **numbers}


def _cell(claim: Row, link: str) -> dict[str, Any]:
    """Return a cell with its place for :meth:`Table.pivot`. Cell and evidence have the sign of the column."""
    name, is_turned = _place(claim)
    row = {**(_turned(claim) if is_turned else claim), "failed": 0, "diverged": 0}
    digits = 2 if claim["unit"] else 1  # eigenvalues have no unit
    word = status(claim)
    text = f"{row['difference']:+.{digits}f}" if row["shared"] else None
    published = "" if math.isnan(claim["gap"]) else f" Published: {row['gap']:+.2f}."
    lines = [
        f"{claim['claim']}, {claim['at']}: {word}.",
        f"{evidence(row, digits)}{published}{failures_text(claim)}",
        seeds_sentence(claim) if claim["outcome"] == OPEN else "",
    ]
    value = row["difference"] if row["shared"] else None
    cell = Cell(text, value, marks=(f"{CLAIM_SIGNS.get(word, '')}{word}",), more="\n".join(filter(None, lines)))
    title = Cell(claim["experiment"], link=f"#{link}" if link else "")
    return {"experiment": title, "claim": "", name: cell}
