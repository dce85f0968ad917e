"""Compare rows of an experiment over their shared seeds, and say in words what that decides."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from ..common.grouping import count_text, group_by
from ..recipes.columns import seed_statistics
from .paired_tests import MIN_SEEDS, Decision, Difference, decide, paired, pooled_std
from .run_record import Record, Records

Value: TypeAlias = Callable[[Record], float | None]

CONFIRMED, CONTRADICTED = "confirmed", "contradicted"  # claims of the paper
NOT_CONFIRMED = "not confirmed"
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
class Row:
    """The runs of a row of an experiment, one for each seed."""

    title: str
    runs: Sequence[Record]

    def values(self, value: Value = lambda record: record.score) -> dict[int, float]:
        """Return the value of each finished run that has one, by seed."""
        finished = (record for record in self.runs if record.state == "finished")
        return {record.seed: number for record in finished if (number := value(record)) is not None}

    @property
    def failure_text(self) -> str:
        """Sentences on the networks that did not learn; empty without any."""
        failures = {record.seed: record.failure for record in self.runs if record.failure is not None}
        return failures_text(self.title, failures, sum(record.state == "finished" for record in self.runs))

    @property
    def divergence_text(self) -> str:
        """A sentence on the runs that diverged; empty without any."""
        states = [record.state for record in self.runs if record.state != "unfinished"]
        count = states.count("diverged")
        return f" {self.title} diverged with {count} of {len(states)} seeds." if count else ""


@dataclass(frozen=True)
class Comparison:
    """Two rows of an experiment; the question is whether ``ours`` has the better value.

    Args:
        claim: the claim or the comparison in words.
        at: at which radii; as in :class:`Verdict`.
        ours: the row that may be better.
        theirs: the other row.
        words: the outcomes if ``ours`` is better and if it is worse.
        value: the value that is compared.
        higher_is_better: whether a higher value is better; None: as for the score.
        digits: the digits of numbers after the point.
        gap: the published difference, which is positive.
        more: what to add to the evidence.
    """

    claim: str
    at: str
    ours: Row
    theirs: Row
    words: tuple[str, str] = (CONFIRMED, CONTRADICTED)
    value: Value = lambda record: record.score
    higher_is_better: bool | None = None
    digits: int = 2
    gap: float | None = None
    more: str = ""

    @cached_property
    def difference(self) -> Difference | None:
        """The difference over the shared seeds; None without any, and if a network of either side did not learn."""
        if self.ours.failure_text or self.theirs.failure_text:
            return None
        return paired(self.ours.values(self.value), self.theirs.values(self.value))

    def verdict(self, decision: Decision) -> Verdict | None:
        """Return the verdict; None if a side has no finished runs and no run of either side diverged."""
        diverged = self.ours.divergence_text + self.theirs.divergence_text
        if not self.ours.values(self.value) or not self.theirs.values(self.value):
            return self._without_scores(diverged.strip()) if diverged else None
        if not_learned := self.ours.failure_text + self.theirs.failure_text:
            return Verdict(self.claim, self.at, NOT_LEARNED, f"No verdict.{not_learned}{diverged}", None)
        rows = f"{self._text(self.ours)}, {self._text(self.theirs)}"
        if self.difference is None:
            return Verdict(self.claim, self.at, TOO_FEW, f"{rows}: no shared seeds.{diverged}{self.more}", MIN_SEEDS)
        outcome, note = self._outcome(self.difference, decision)
        published = "" if self.gap is None else f" Published: {self._signed(self.gap if self._higher else -self.gap)}."
        evidence = f"{rows}: {self._difference_text(self.difference)}.{note}{diverged}{published}{self.more}"
        more_seeds = decision.more_seeds if outcome in (OPEN, TOO_FEW) else None
        return Verdict(self.claim, self.at, outcome, evidence, more_seeds)

    def _without_scores(self, evidence: str) -> Verdict:
        """Return the verdict if all runs of a side diverged, or have not finished yet."""
        ours, theirs = (
            {record.seed: record.state for record in row.runs if record.state != "unfinished"}
            for row in (self.ours, self.theirs)
        )
        shared = ours.keys() & theirs.keys()
        if len(shared) < MIN_SEEDS:
            return Verdict(self.claim, self.at, TOO_FEW, evidence, MIN_SEEDS - len(shared))
        lost = sum((ours[seed], theirs[seed]) == ("diverged", "finished") for seed in shared)
        return Verdict(self.claim, self.at, self.words[1] if lost >= MIN_SEEDS else OPEN, evidence, None)

    @property
    def _higher(self) -> bool:
        return self.ours.runs[0].higher_is_better if self.higher_is_better is None else self.higher_is_better

    def _signed(self, number: float) -> str:
        return f"{number:+.{self.digits}f}"

    def _text(self, row: Row) -> str:
        numbers = seed_statistics(list(row.values(self.value).values()))
        std = "" if numbers.std is None else f" ± {numbers.std:.{self.digits}f}"
        return f"{row.title} {numbers.mean:.{self.digits}f}{std} ({numbers.n})"

    def _difference_text(self, d: Difference) -> str:
        interval = ""
        unit = " points" if self.higher_is_better is None and "%" in self.ours.runs[0].unit else ""
        if d.low is not None and d.high is not None:
            interval = f" [95 % interval {self._signed(d.low)}, {self._signed(d.high)}]"
        return f"{self._signed(d.mean)}{unit}{interval}, {count_text(d.n, 'shared seed')}"

    def _outcome(self, d: Difference, decision: Decision) -> tuple[str, str]:
        """Return the outcome and a sentence about it."""
        if d.n < MIN_SEEDS:
            return TOO_FEW, ""
        if decision.p is None or d.half_width is None:
            return OPEN, " The differences of all seeds are equal, so their spread is unknown."
        note = f" {decision.correction}; the interval is not corrected." if decision.correction else ""
        if decision.is_significant:
            better, worse = self.words
            return better if (d.mean > 0) == self._higher else worse, note
        if self.gap is not None and d.half_width < self.gap / 2:
            note += " The interval contains 0 and is narrow enough to detect half of the published difference."
            return NOT_CONFIRMED, note
        return OPEN, note

    def spread(self, records: Records) -> float | None:
        """Return the pooled standard deviation over seeds of the experiment's rows; None if all have one seed.

        In that case, the rows are all those with the same network and unit.
        """
        first = self.ours.runs[0]
        runs = [record for record in records.runs if record.unit == first.unit]
        pooled = self._pooled([record for record in runs if record.experiment == first.experiment])
        if pooled is not None or not first.settings:
            return pooled
        return self._pooled([record for record in runs if record.settings.get("model") == first.settings["model"]])

    def _pooled(self, records: Sequence[Record]) -> float | None:
        rows = group_by(records, lambda record: (record.experiment, record.method)).values()
        return pooled_std([list(Row("", runs).values(self.value).values()) for runs in rows])


def verdicts_of(comparisons: Sequence[Comparison], records: Records) -> list[Verdict]:
    """Return the verdicts on comparisons that are corrected for each other.

    Args:
        comparisons: the comparisons.
        records: all runs, to estimate the spread over seeds.
    """
    pooled = [comparison.spread(records) for comparison in comparisons]
    spreads = [None if std is None else math.sqrt(2) * std for std in pooled]
    decisions = decide([comparison.difference for comparison in comparisons], spreads)
    verdicts = (comparison.verdict(d) for comparison, d in zip(comparisons, decisions, strict=True))
    return [verdict for verdict in verdicts if verdict is not None]


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
    advice = sentence.replace("--set ", "")  # a flag of bsam train, which bsam compare does not have
    return f" {title} did not learn with {len(failures)} of {count_text(finished, 'seed')}. Seed {seed}: {advice}"
