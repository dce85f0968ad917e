"""Compare two rows of an experiment over their shared seeds, and say in words what that decides."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from ..recipes.columns import seed_statistics
from .record import Record, Records
from .record_titles import model_title
from .statistics import LEVEL, Difference, paired, pooled_std, seeds_needed, t_quantile

Value: TypeAlias = Callable[[Record], float | None]

CONFIRMED, NOT_CONFIRMED, OPEN = "confirmed", "not confirmed", "open"
MIN_DF = 5  # degrees of freedom that a spread should have; Student's 95 % factor is 2.6 with 5 and 12.7 with 1


@dataclass(frozen=True)
class Verdict:
    """What runs say about a claim.

    Args:
        claim: the claim in words.
        at: ``"at the paper's radii"``, ``"at our radii"`` if the paper states none, ``"at matched radii"`` or ``"at
            tuned radii"``; empty for a user's runs.
        outcome: ``"confirmed"``, ``"not confirmed"`` or ``"open"``.
        evidence: sentences with the numbers.
        more_seeds: how many more seeds would decide an open claim if mean and spread stay as they are; None if that is
            not known or the claim is not open.
    """

    claim: str
    at: str
    outcome: str
    evidence: str
    more_seeds: int | None


@dataclass(frozen=True)
class Comparison:
    """Two rows of an experiment; ``ours`` is claimed to have the better value."""

    ours: Sequence[Record]
    theirs: Sequence[Record]
    our_title: str
    their_title: str
    records: Records
    value: Value = lambda record: record.score
    higher_is_better: bool | None = None  # None: as the score
    digits: int = 2

    def verdict(self, claim: str, at: str, gap: float | None = None, more: str = "") -> Verdict | None:
        """Return the verdict; None if a side has no finished runs and no run of either side diverged.

        Args:
            claim: the claim in words.
            at: at which radii.
            gap: the published difference, which is positive.
            more: what to add to the evidence.
        """
        ours, theirs = (values_by_seed(runs, self.value) for runs in (self.ours, self.theirs))
        we_failed = _failed(self.ours, self.our_title)
        failed = we_failed + _failed(self.theirs, self.their_title)
        if not ours or not theirs:
            outcome = NOT_CONFIRMED if we_failed and theirs else OPEN
            return Verdict(claim, at, outcome, failed.strip(), None) if failed else None
        titles = f"{self._text(ours, self.our_title)}, {self._text(theirs, self.their_title)}"
        difference = paired(ours, theirs)
        if difference is None:
            return Verdict(claim, at, OPEN, f"{titles}: no shared seeds.{failed}{more}", None)
        outcome, note, more_seeds = self._decide(difference, gap)
        published = "" if gap is None else f" Published: {self._signed(gap if self._higher else -gap)}."
        evidence = f"{titles}: {self._difference_text(difference)}.{note}{failed}{published}{more}"
        return Verdict(claim, at, outcome, evidence, more_seeds)

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

    def _decide(self, d: Difference, gap: float | None) -> tuple[str, str, int | None]:
        """Return the outcome, a sentence about it, and how many more seeds would decide it."""
        sign = 1 if self._higher else -1
        if d.is_point:
            return OPEN, " The differences of all seeds are equal, so their spread is unknown.", None
        if d.low is not None and d.high is not None and d.half_width is not None:
            if d.low > 0 or d.high < 0:
                return CONFIRMED if sign * d.mean > 0 else NOT_CONFIRMED, "", None
            if gap is not None and d.half_width < gap / 2:
                note = " The interval contains 0 and is narrow enough to detect half of the published difference."
                return NOT_CONFIRMED, note, None
            return OPEN, "", seeds_needed(d)
        spread = self._spread()
        if spread is None:
            return OPEN, " One seed decides nothing, and no comparable row has several.", None
        std, df, rows = spread
        limit = 2 * t_quantile(LEVEL, df) * math.sqrt(2) * std
        chance = f"{limit:.{self.digits}f}{self._unit} (twice the 95 % range of seed noise, estimated from {rows})"
        if abs(d.mean) > limit:
            note = f" One seed, but a difference of more than {chance}."
            return CONFIRMED if sign * d.mean > 0 else NOT_CONFIRMED, note, None
        note = f" With one seed, only a difference of more than {chance} would count."
        return OPEN, note, seeds_needed(d, math.sqrt(2) * std)

    def _spread(self) -> tuple[float, int, str] | None:
        """Return the pooled standard deviation over seeds, its degrees of freedom, and its rows in words.

        The rows are those of the experiment, or, if these have too few seeds, all rows with the same network and unit.
        """
        first, spread = self.ours[0], None
        for same in (
            lambda record: record.experiment == first.experiment,
            lambda record: bool(first.settings) and record.settings.get("model") == first.settings["model"],
        ):
            runs = [record for record in self.records.runs if record.unit == first.unit and same(record)]
            rows = group_by(runs, lambda record: (record.experiment, record.method))
            samples = {row: list(values_by_seed(group, self.value).values()) for row, group in rows.items()}
            if (pooled := pooled_std(list(samples.values()))) is not None:
                experiments = [experiment for (experiment, _), values in samples.items() if len(values) > 1]
                spread = *pooled, self._rows_text(experiments)
                if pooled[1] >= MIN_DF:
                    break
        return spread

    def _rows_text(self, experiments: Sequence[str]) -> str:
        """Return how many rows there are and where they come from, given the experiment of each."""
        first, count = self.ours[0], f"{len(experiments)} row{'s' * (len(experiments) > 1)}"
        if set(experiments) == {first.experiment}:
            return count
        which = "this and other" if first.experiment in experiments else "other"
        return f"{count} of {which} {model_title(first.settings['model'])} experiments"


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


def _failed(runs: Sequence[Record], title: str) -> str:
    states = [record.state for record in runs if record.state != "unfinished"]
    count = states.count("diverged")
    return f" {title} diverged with {count} of {len(states)} seeds." if count else ""
