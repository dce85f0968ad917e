"""Compare rows of an experiment over their shared seeds, and say in words what that decides."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

from ..recipes.columns import seed_statistics
from .record import Record, Records
from .statistics import MIN_SEEDS, Decision, Difference, decide, paired, pooled_std

Value: TypeAlias = Callable[[Record], float | None]

CONFIRMED, CONTRADICTED, NOT_CONFIRMED = "confirmed", "contradicted", "not confirmed"  # claims of the paper
BETTER, WORSE = "better", "worse"  # than a baseline
OPEN, TOO_FEW = "open", "too few seeds"
NOT_LEARNED = "did not learn"  # a network is no better than chance, so there is no verdict


@dataclass(frozen=True)
class Verdict:
    """What runs say about a claim of the paper, or about a comparison with a baseline.

    Args:
        claim: the claim or the comparison in words.
        at: ``"at the paper's radii"``, ``"at our radii"`` if the paper states none, ``"at matched radii"`` or ``"at
            tuned radii"``; empty for a user's runs.
        outcome: ``"confirmed"``, ``"contradicted"`` or ``"not confirmed"`` for a claim of the paper, ``"better"`` or
            ``"worse"`` for a comparison with a baseline; for both ``"open"``, ``"too few seeds"`` with fewer than three
            shared seeds, or ``"did not learn"`` if a network of either side is no better than chance.
        evidence: sentences with the numbers.
        more_seeds: how many more seeds would decide if mean and spread stay as they are, and at least as many as are
            missing to three; None if that is not known or the claim is decided.
    """

    claim: str
    at: str
    outcome: str
    evidence: str
    more_seeds: int | None


@dataclass(frozen=True)
class Comparison:
    """Two rows of an experiment; the question is whether ``ours`` has the better value.

    Args:
        claim: the claim or the comparison in words.
        at: at which radii; as in :class:`Verdict`.
        ours: the runs of the row that may be better.
        theirs: the runs of the other row.
        our_title: the title of the first row.
        their_title: the title of the other row.
        records: all runs, to estimate the spread over seeds.
        words: the outcomes if ``ours`` is better and if it is worse.
        value: the value that is compared.
        higher_is_better: whether a higher value is better; None: as for the score.
        digits: the digits of numbers after the point.
        gap: the published difference, which is positive.
        more: what to add to the evidence.
    """

    claim: str
    at: str
    ours: Sequence[Record]
    theirs: Sequence[Record]
    our_title: str
    their_title: str
    records: Records
    words: tuple[str, str] = (CONFIRMED, CONTRADICTED)
    value: Value = lambda record: record.score
    higher_is_better: bool | None = None
    digits: int = 2
    gap: float | None = None
    more: str = ""

    @cached_property
    def difference(self) -> Difference | None:
        """The difference over the shared seeds; None without any, and if a network of either side did not learn."""
        if failed_seeds(self.ours) or failed_seeds(self.theirs):
            return None
        return paired(values_by_seed(self.ours, self.value), values_by_seed(self.theirs, self.value))

    def verdict(self, decision: Decision) -> Verdict | None:
        """Return the verdict; None if a side has no finished runs and no run of either side diverged."""
        ours, theirs = (values_by_seed(runs, self.value) for runs in (self.ours, self.theirs))
        failed = _failed(self.ours, self.our_title) + _failed(self.theirs, self.their_title)
        if not ours or not theirs:
            return self._without_scores(failed.strip()) if failed else None
        titles = f"{self._text(ours, self.our_title)}, {self._text(theirs, self.their_title)}"
        if not_learned := failure_text(self.ours, self.our_title) + failure_text(self.theirs, self.their_title):
            return Verdict(self.claim, self.at, NOT_LEARNED, f"No verdict.{not_learned}{failed}", None)
        if self.difference is None:
            return Verdict(self.claim, self.at, TOO_FEW, f"{titles}: no shared seeds.{failed}{self.more}", MIN_SEEDS)
        outcome, note = self._outcome(self.difference, decision)
        published = "" if self.gap is None else f" Published: {self._signed(self.gap if self._higher else -self.gap)}."
        evidence = f"{titles}: {self._difference_text(self.difference)}.{note}{failed}{published}{self.more}"
        more_seeds = decision.more_seeds if outcome in (OPEN, TOO_FEW) else None
        return Verdict(self.claim, self.at, outcome, evidence, more_seeds)

    def _without_scores(self, failed: str) -> Verdict:
        """Return the verdict if all runs of a side diverged, or have not finished yet."""
        ours, theirs = ({r.seed: r.state for r in runs if r.state != "unfinished"} for runs in (self.ours, self.theirs))
        shared = ours.keys() & theirs.keys()
        if len(shared) < MIN_SEEDS:
            return Verdict(self.claim, self.at, TOO_FEW, failed, MIN_SEEDS - len(shared))
        lost = sum((ours[seed], theirs[seed]) == ("diverged", "finished") for seed in shared)
        return Verdict(self.claim, self.at, self.words[1] if lost >= MIN_SEEDS else OPEN, failed, None)

    @property
    def _higher(self) -> bool:
        return self.ours[0].higher_is_better if self.higher_is_better is None else self.higher_is_better

    @property
    def _unit(self) -> str:
        return " points" if self.higher_is_better is None and "%" in self.ours[0].unit else ""

    def _signed(self, number: float) -> str:
        return f"{number:+.{self.digits}f}"

    def _text(self, values: Mapping[int, float], title: str) -> str:
        numbers = seed_statistics(list(values.values()))
        std = "" if numbers.std is None else f" ± {numbers.std:.{self.digits}f}"
        return f"{title} {numbers.mean:.{self.digits}f}{std} ({numbers.n})"

    def _difference_text(self, d: Difference) -> str:
        interval = ""
        if d.low is not None and d.high is not None:
            interval = f" [95 % interval {self._signed(d.low)}, {self._signed(d.high)}]"
        return f"{self._signed(d.mean)}{self._unit}{interval}, {d.n} shared seed{'s' * (d.n > 1)}"

    def _outcome(self, d: Difference, decision: Decision) -> tuple[str, str]:
        """Return the outcome and a sentence about it."""
        if d.n < MIN_SEEDS:
            return TOO_FEW, ""
        if decision.p is None or d.half_width is None:
            return OPEN, " The differences of all seeds are equal, so their spread is unknown."
        note = f" {decision.correction}; the interval is not corrected." if decision.correction else ""
        if decision.is_significant:
            return self.words[(d.mean > 0) != self._higher], note
        if self.gap is not None and d.half_width < self.gap / 2:
            note += " The interval contains 0 and is narrow enough to detect half of the published difference."
            return NOT_CONFIRMED, note
        return OPEN, note

    def spread(self) -> float | None:
        """Return the pooled standard deviation over seeds of the experiment's rows; None if all have one seed.

        In that case, the rows are all those with the same network and unit.
        """
        first = self.ours[0]
        for same in (
            lambda record: record.experiment == first.experiment,
            lambda record: bool(first.settings) and record.settings.get("model") == first.settings["model"],
        ):
            runs = [record for record in self.records.runs if record.unit == first.unit and same(record)]
            rows = group_by(runs, lambda record: (record.experiment, record.method)).values()
            pooled = pooled_std([list(values_by_seed(row, self.value).values()) for row in rows])
            if pooled is not None:
                return pooled
        return None


def verdicts_of(comparisons: Sequence[Comparison]) -> list[Verdict]:
    """Return the verdicts on comparisons that are corrected for each other."""
    spreads = [None if (spread := comparison.spread()) is None else math.sqrt(2) * spread for comparison in comparisons]
    decisions = decide([comparison.difference for comparison in comparisons], spreads)
    verdicts = (comparison.verdict(d) for comparison, d in zip(comparisons, decisions, strict=True))
    return [verdict for verdict in verdicts if verdict is not None]


def group_by(runs: Sequence[Record], key: Callable[[Record], Any]) -> dict[Any, list[Record]]:
    """Return the runs by key, in order of appearance."""
    groups: dict[Any, list[Record]] = {}
    for record in runs:
        groups.setdefault(key(record), []).append(record)
    return groups


def values_by_seed(runs: Sequence[Record], value: Value) -> dict[int, float]:
    """Return the value of each finished run that has one, by seed."""
    return {
        record.seed: number for record in runs if record.state == "finished" and (number := value(record)) is not None
    }


def failed_seeds(runs: Sequence[Record]) -> dict[int, str]:
    """Return the sentences on finished runs whose network did not learn, by seed."""
    return {record.seed: record.failure for record in runs if record.failure is not None}


def failure_text(runs: Sequence[Record], title: str) -> str:
    """Return sentences on the networks of a row that did not learn; empty without any."""
    return failures_text(title, failed_seeds(runs), sum(record.state == "finished" for record in runs))


def failures_text(title: str, failures: Mapping[int, str], finished: int) -> str:
    """Return sentences on the networks of a row that did not learn, after a space; empty without any.

    Args:
        title: the row.
        failures: a sentence on each of these networks, by seed; that of the first is shown.
        finished: the number of finished seeds.
    """
    if not failures:
        return ""
    seed, sentence = min(failures.items())
    seeds = f"{len(failures)} of {finished} seed{'s' * (finished > 1)}"
    advice = sentence.replace("--set ", "")  # a flag of bsam train, which bsam compare does not have
    return f" {title} did not learn with {seeds}. Seed {seed}: {advice}"


def _failed(runs: Sequence[Record], title: str) -> str:
    states = [record.state for record in runs if record.state != "unfinished"]
    count = states.count("diverged")
    return f" {title} diverged with {count} of {len(states)} seeds." if count else ""
