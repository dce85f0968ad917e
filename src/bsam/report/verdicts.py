"""Verdicts in words: claims of the paper and comparisons with a baseline, with their evidence."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from ..common.errors import BsamValueError
from ..recipes.columns import seed_statistics
from ..recipes.paper import POSE
from ..recipes.variants import BSAMS, MATCHED, variant_of, variants
from ..training.config import Run
from .record import Record, Records
from .record_titles import TUNED, of_paper, paper_variant, published_numbers
from .statistics import LEVEL, Difference, paired, pooled_std, seeds_needed, t_quantile

Value: TypeAlias = Callable[[Record], float | None]
Rows: TypeAlias = Mapping[str, Sequence[Record]]  # the runs of each row of an experiment

CONFIRMED, NOT_CONFIRMED, OPEN = "confirmed", "not confirmed", "open"
PAPER_RADII, MATCHED_RADII, TUNED_RADII = "at the paper's radii", "at matched radii", "at tuned radii"


@dataclass(frozen=True)
class Verdict:
    """What runs say about a claim.

    Args:
        claim: the claim in words.
        at: ``"at the paper's radii"``, ``"at matched radii"`` or ``"at tuned radii"``; empty for a user's runs.
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


def paper_verdicts(records: Records) -> list[Verdict]:
    """Return a verdict on each claim of the paper on which there are runs.

    The claims are: a method has a better score than another one where the paper's table says so, and BSAM's networks
    have a smaller largest eigenvalue than others. At the paper's radii, BSAM is compared with SAM at the same rho; at
    matched radii, with SAM at rho_max + rho_min, fixed or falling as BSAM's total radius does; at tuned radii, each
    method has the radius that was best on held-out samples.
    """
    verdicts = []
    for title, group in _experiments(records.runs).items():
        runs = [(record, Run(**record.settings)) for record in group if record.settings]
        runs = [(record, run) for record, run in runs if of_paper(run)]
        if runs:
            paper = _PaperExperiment(title, runs, records)
            verdicts += [*paper.score_verdicts(), *paper.flatness_verdicts()]
    return verdicts


def baseline_verdicts(records: Records, baseline: str) -> list[Verdict]:
    """Return a verdict on each row of each experiment: whether it is better than the baseline.

    Args:
        records: the runs.
        baseline: a row, such as ``"SAM"``, or the name of a method on the command line, such as ``"sam"``.
    """
    verdicts, matched = [], False
    for title, group in _experiments(records.runs).items():
        rows = _by(group, lambda record: record.method)
        name = baseline_row(rows, baseline)
        if name is None:
            continue
        matched = True
        for row in rows:
            if row != name:
                comparison = _Comparison(rows[row], rows[name], row, name, records)
                if (verdict := comparison.verdict(f"{row} better than {name}: {title}", "")) is not None:
                    verdicts.append(verdict)
    if not matched:
        known = ", ".join(dict.fromkeys(record.method for record in records.runs)) or "none"
        raise BsamValueError(f"baseline must be one of the rows of an experiment ({known}); got {baseline!r}")
    return verdicts


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


@dataclass(frozen=True)
class _Comparison:
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
        """Return the verdict; None if one side has no runs that ended.

        Args:
            claim: the claim in words.
            at: at which radii.
            gap: the published difference, which is positive.
            more: what to add to the evidence.
        """
        ours, theirs = (_values(runs, self.value) for runs in (self.ours, self.theirs))
        failed = _failed(self.ours, self.our_title) + _failed(self.theirs, self.their_title)
        if not theirs or not (ours or failed):
            return None
        if not ours:
            return Verdict(claim, at, NOT_CONFIRMED, failed.strip(), None)
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
        if d.low is not None and d.high is not None and d.half_width is not None:
            if d.low > 0 or d.high < 0:
                return CONFIRMED if sign * d.mean > 0 else NOT_CONFIRMED, "", None
            if gap is not None and d.half_width < gap / 2:
                return NOT_CONFIRMED, " The interval contains 0 and would show half of the published difference.", None
            return OPEN, "", seeds_needed(d)
        spread = self._spread()
        if spread is None:
            return OPEN, " One seed decides nothing, and no other row has several.", None
        std, df, rows = spread
        limit = 2 * t_quantile(LEVEL, df) * math.sqrt(2) * std
        chance = f"{limit:.{self.digits}f}{self._unit}, twice what chance gives by the spread of {rows} other row"
        if abs(d.mean) > limit:
            outcome = CONFIRMED if sign * d.mean > 0 else NOT_CONFIRMED
            return outcome, f" One seed, but the difference exceeds {chance}{'s' * (rows > 1)}.", None
        needed = seeds_needed(d, math.sqrt(2) * std)
        return OPEN, f" One seed decides only above {chance}{'s' * (rows > 1)}.", needed

    def _spread(self) -> tuple[float, int, int] | None:
        """Return the pooled standard deviation over seeds, its degrees of freedom, and the number of rows.

        The rows are those of the experiment; if all have one seed, those of the same network, or of the same unit.
        """
        first = self.ours[0]
        for same in (
            lambda record: record.experiment == first.experiment,
            lambda record: bool(first.settings) and record.settings.get("model") == first.settings["model"],
            lambda record: True,
        ):
            runs = [record for record in self.records.runs if record.unit == first.unit and same(record)]
            rows = _by(runs, lambda record: (record.experiment, record.method)).values()
            samples = [list(_values(row, self.value).values()) for row in rows]
            if (pooled := pooled_std(samples)) is not None:
                return *pooled, sum(len(values) > 1 for values in samples)
        return None


class _PaperExperiment:
    """The runs of an experiment of the paper, by the variant of their method."""

    def __init__(self, title: str, runs: Sequence[tuple[Record, Run]], records: Records) -> None:
        self.title, self.records = title, records
        first = runs[0][1]
        self.base, self.numbers, self.note = first.base, published_numbers(first), ""
        if first.task == "pose" and not self.numbers:
            mean = {key[1]: number for key, number in POSE.numbers.items() if key[2] == "pck"}
            self.numbers, self.note = mean, " The paper's data is MPII, and it does not state its radii."
        self.rows: dict[bool, dict[str, list[Record]]] = {False: {}, True: {}}  # by whether they are tuned
        for record, run in runs:
            tuned = record.chosen == TUNED
            name = variant_of(run).name if tuned else paper_variant(run)
            if name is not None:
                self.rows[tuned].setdefault(name, []).append(record)
        self.rows[True].setdefault(self.base, self.rows[False].get(self.base, []))

    def score_verdicts(self) -> list[Verdict]:
        """Return the verdicts on the order of SGD (or Adam), SAM and BSAM in the paper's table."""
        verdicts = []
        for higher, lower in (("sam", self.base), ("bsam", "sam")):
            gap = self.numbers[higher].mean - self.numbers[lower].mean
            pair = (higher, lower) if gap > 0 else (lower, higher)
            at_paper = self._score_verdict(*pair, PAPER_RADII, abs(gap))
            tuned = self._score_verdict(*pair, TUNED_RADII, abs(gap))
            matched = []
            if "bsam" in pair:
                others = [[name if method == "sam" else method for method in pair] for name in MATCHED]
                matched = [self._score_verdict(*other, MATCHED_RADII) for other in others]
                if at_paper is not None and not any((*matched, tuned)):
                    claim, evidence = self._claim(*pair), "No runs of SAM at BSAM's total radius, and none are tuned."
                    matched = [Verdict(claim, MATCHED_RADII, OPEN, evidence, None)]
            verdicts += [at_paper, *matched, tuned]
        return [verdict for verdict in verdicts if verdict is not None]

    def flatness_verdicts(self) -> list[Verdict]:
        """Return the verdicts on the largest eigenvalue of the Hessian."""
        pairs = [(other, PAPER_RADII) for other in (self.base, "sam")]
        pairs += [(other, MATCHED_RADII) for other in MATCHED] + [("sam", TUNED_RADII)]
        verdicts = []
        for other, at in pairs:
            ours, theirs = self._row("bsam", at), self._row(other, at)
            samples = {None, *(_samples(record) for record in (*ours, *theirs))}
            measured = [(lambda record, n=n: _eigenvalue(record, n), n) for n in samples]
            value, n = max(measured, key=lambda pair: (_shared(ours, theirs, pair[0]), pair[1] or 0))
            if _shared(ours, theirs, value):
                titles = _title("bsam"), _title(other)
                comparison = _Comparison(ours, theirs, *titles, self.records, value, higher_is_better=False, digits=1)
                claim = f"{titles[0]} flatter than {titles[1]} (largest eigenvalue of the Hessian): {self.title}"
                data = "training samples" if n is None else f"{n:,} training samples"
                verdicts.append(comparison.verdict(claim, at, more=f" On {data}; the paper used the test set."))
        return [verdict for verdict in verdicts if verdict is not None]

    def _row(self, name: str, at: str) -> list[Record]:
        return self.rows[at == TUNED_RADII].get(name, [])

    def _claim(self, better: str, worse: str) -> str:
        return f"{_title(better)} better than {_title(worse)}: {self.title}"

    def _score_verdict(self, better: str, worse: str, at: str, gap: float | None = None) -> Verdict | None:
        ours, theirs = self._row(better, at), self._row(worse, at)
        if not ours or not theirs:
            return None
        comparison = _Comparison(ours, theirs, _title(better), _title(worse), self.records)
        more = self.note + (self._variants(theirs, at) if better == "bsam" else "")
        return comparison.verdict(self._claim(better, worse), at, gap, more)

    def _variants(self, theirs: Sequence[Record], at: str) -> str:
        """Return the differences of the other variants of BSAM as a sentence."""
        texts = []
        for name in BSAMS[1:]:
            ours = _values(self._row(name, at), lambda record: record.score)
            difference = paired(ours, _values(theirs, lambda record: record.score))
            if difference is not None:
                seeds = f"{difference.n} seed{'s' * (difference.n > 1)}"
                texts.append(f"{variants()[name].title} {difference.mean:+.2f} ({seeds})")
        return f" Other variants: {', '.join(texts)}." if texts else ""


def _title(name: str) -> str:
    """Return the name of a method in claims: the paper has one BSAM."""
    if name == "bsam":
        return "BSAM"
    return variants()[name].title if name in variants() else name.capitalize()


def _experiments(runs: Sequence[Record]) -> Rows:
    return _by(runs, lambda record: record.experiment)


def _by(runs: Sequence[Record], key: Callable[[Record], Any]) -> dict[Any, list[Record]]:
    groups: dict[Any, list[Record]] = {}
    for record in runs:
        groups.setdefault(key(record), []).append(record)
    return groups


def _values(runs: Sequence[Record], value: Value) -> dict[int, float]:
    """Return the value of each finished run that has one, by seed."""
    return {
        record.seed: number for record in runs if record.state == "finished" and (number := value(record)) is not None
    }


def _failed(runs: Sequence[Record], title: str) -> str:
    count = sum(record.state == "diverged" for record in runs)
    return f" {title} diverged with {count} of {len(runs)} seeds." if count else ""


def _samples(record: Record) -> int | None:
    """Return on how many samples ``bsam flatness`` measured a network; None if it did not."""
    return None if record.flatness is None else record.flatness["samples"]


def _eigenvalue(record: Record, samples: int | None) -> float | None:
    """Return the largest eigenvalue that ``bsam flatness`` computed on so many samples; None: that of training."""
    if samples is None:
        return record.top_eigenvalue
    return record.flatness["eigenvalues"]["maximum"] if record.flatness and _samples(record) == samples else None


def _shared(ours: Sequence[Record], theirs: Sequence[Record], value: Value) -> int:
    return len(_values(ours, value).keys() & _values(theirs, value).keys())
