"""Verdicts in words: claims of the paper and comparisons with a baseline, with their evidence."""

from __future__ import annotations

from dataclasses import dataclass

from .records import Records


@dataclass(frozen=True)
class Verdict:
    """What runs say about a claim.

    Args:
        claim: the claim in words.
        at: ``"at the paper's radii"``, ``"at matched radii"`` or ``"at tuned radii"``; empty for a user's runs.
        outcome: ``"confirmed"``, ``"not confirmed"`` or ``"open"``.
        evidence: a sentence with the numbers.
        more_seeds: how many more seeds would decide an open claim; None if that is unknown or it is not open.
    """

    claim: str
    at: str
    outcome: str
    evidence: str
    more_seeds: int | None


def paper_verdicts(records: Records) -> list[Verdict]:
    """Return a verdict on each claim of the paper that the runs bear on."""
    return []


def baseline_verdicts(records: Records, baseline: str) -> list[Verdict]:
    """Return a verdict on each method of each experiment: whether it is better than the baseline."""
    return []
