"""Verdicts in words: claims of the paper and comparisons with a baseline, with their evidence."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

from ...common.errors import BsamValueError
from ..common.grouping import count_text, group_by
from ..recipes.columns import measured_on
from ..recipes.variants import BSAMS, MATCHED, variant_of, variants
from ..training.config import Run
from .paired_tests import MIN_SEEDS, paired
from .paper_numbers import claimed_numbers, of_paper, paper_variant
from .row_comparison import BETTER, TOO_FEW, WORSE, Comparison, Row, Verdict, verdicts_of
from .run_record import Record, Records

PAPER_RADII, OUR_RADII = "at the paper's radii", "at our radii"  # ours where the paper states none
MATCHED_RADII, TUNED_RADII = "at matched radii", "at tuned radii"


def paper_verdicts(records: Records) -> list[Verdict]:
    """Return a verdict on each claim of the paper for which there are runs.

    The claims are the order of the base optimizer, SAM and BSAM in the paper's table, and that the largest eigenvalue
    is smaller for BSAM than for the others. At the paper's radii, BSAM is compared with SAM at the same rho; at matched
    radii, with SAM at rho_max + rho_min, fixed or falling as BSAM's total radius does; at tuned radii, each method has
    the radius that was best on held-out samples. Each published order is one test. BSAM is compared with SAM at two
    matched radii, and its eigenvalues with those of several methods: these are corrected for each other (Holm).
    """
    verdicts = []
    for title, group in group_by(records.runs, lambda record: record.experiment).items():
        runs = [(record, Run(**record.settings)) for record in group if record.settings]
        runs = [(record, run) for record, run in runs if of_paper(run)]
        if runs:
            paper = _PaperExperiment(title, runs, records)
            verdicts += [*paper.score_verdicts(), *paper.flatness_verdicts()]
    return verdicts


def baseline_verdicts(records: Records, baseline: str) -> list[Verdict]:
    """Return a verdict on each row of each experiment: whether it is better than the baseline.

    The verdicts of an experiment are corrected for each other (Holm).

    Args:
        records: the runs.
        baseline: a row, such as ``"SAM"``, or the name of a method on the command line, such as ``"sam"``.
    """
    verdicts = []
    for title, group in group_by(records.runs, lambda record: record.experiment).items():
        rows = group_by(group, lambda record: record.method)
        name = baseline_row(rows, baseline)
        if name is None:
            continue
        theirs = Row(name, rows.pop(name))
        comparisons = []
        for row, runs in rows.items():
            claim, more = f"{row} against {name}: {title}", _tuning_sentence(runs) + _tuning_sentence(theirs.runs)
            comparisons.append(Comparison(claim, "", Row(row, runs), theirs, words=(BETTER, WORSE), more=more))
        verdicts += verdicts_of(comparisons, records)
    return verdicts


def _tuning_sentence(runs: Sequence[Record]) -> str:
    """Return a sentence on how the settings of a row were tuned; empty if they were not."""
    return f" {runs[0].method}: {runs[0].chosen}." if "tuned" in runs[0].chosen else ""


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


class _PaperExperiment:
    """The runs of an experiment of the paper, by the variant of their method."""

    def __init__(self, title: str, runs: Sequence[tuple[Record, Run]], records: Records) -> None:
        self.title, self.records = title, records
        first = runs[0][1]
        self.base = first.base
        self.numbers, self.note = claimed_numbers(first)
        self.radii = OUR_RADII if first.task == "pose" else PAPER_RADII
        self.rows: dict[bool, dict[str, list[Record]]] = {False: {}, True: {}}  # by whether they are tuned
        for record, run in runs:
            name = variant_of(run).name if record.tuned else paper_variant(run)
            if name is not None:
                self.rows[record.tuned].setdefault(name, []).append(record)
        self.rows[True].setdefault(self.base, self.rows[False].get(self.base, []))

    def score_verdicts(self) -> list[Verdict]:
        """Return the verdicts on the order of SGD (or Adam), SAM and BSAM in the paper's table."""
        verdicts = []
        for higher, lower in (("sam", self.base), ("bsam", "sam")):
            gap = self.numbers[higher].mean - self.numbers[lower].mean
            pair = (higher, lower) if gap > 0 else (lower, higher)
            at_paper = self._score_verdicts([pair], self.radii, abs(gap))
            tuned = self._score_verdicts([pair], TUNED_RADII, abs(gap))
            matched = []
            if "bsam" in pair:
                pairs = [("bsam", name) if pair[0] == "bsam" else (name, "bsam") for name in MATCHED]
                matched = self._score_verdicts(pairs, MATCHED_RADII)
                if at_paper and not matched and not tuned:
                    evidence = "No runs of SAM at BSAM's total radius, nor of both methods at tuned radii."
                    matched = [Verdict(self._claim(*pair), MATCHED_RADII, TOO_FEW, evidence, MIN_SEEDS)]
            verdicts += [*at_paper, *matched, *tuned]
        return verdicts

    def flatness_verdicts(self) -> list[Verdict]:
        """Return the verdicts on the largest eigenvalue of the Hessian."""
        others = {self.radii: (self.base, "sam"), MATCHED_RADII: MATCHED, TUNED_RADII: ("sam",)}
        verdicts = []
        for at, names in others.items():
            compared = (self._flatness_comparison(name, at) for name in names)
            verdicts += verdicts_of([comparison for comparison in compared if comparison is not None], self.records)
        return verdicts

    def _flatness_comparison(self, other: str, at: str) -> Comparison | None:
        """Compare the eigenvalues on those samples for which most seeds are shared; None without shared seeds."""
        ours, theirs = self._row("bsam", at), self._row(other, at)
        samples = {None, *(_samples(record) for record in (*ours.runs, *theirs.runs))}
        values = {n: partial(_eigenvalue, samples=n) for n in samples}
        shared = {n: len(ours.values(value).keys() & theirs.values(value).keys()) for n, value in values.items()}
        n = max(samples, key=lambda n: (shared[n], n or 0))
        if not shared[n]:
            return None
        measure = f"λmax, {measured_on(ours.runs[0].settings, n)}"
        claim = f"{ours.title} flatter than {theirs.title} ({measure}): {self.title}"
        more = " The paper used the test set."
        return Comparison(claim, at, ours, theirs, value=values[n], higher_is_better=False, digits=1, more=more)

    def _row(self, name: str, at: str) -> Row:
        return Row(_title(name), self.rows[at == TUNED_RADII].get(name, []))

    def _claim(self, better: str, worse: str) -> str:
        return f"{_title(better)} better than {_title(worse)}: {self.title}"

    def _score_verdicts(self, pairs: Iterable[tuple[str, str]], at: str, gap: float | None = None) -> list[Verdict]:
        """Compare the scores of the pairs for which there are runs."""
        comparisons = []
        for better, worse in pairs:
            ours, theirs = self._row(better, at), self._row(worse, at)
            if ours.runs and theirs.runs:
                more = self.note + (self._variants(theirs, at) if better == "bsam" else "")
                comparisons.append(Comparison(self._claim(better, worse), at, ours, theirs, gap=gap, more=more))
        return verdicts_of(comparisons, self.records)

    def _variants(self, theirs: Row, at: str) -> str:
        """Return a sentence with the differences between the other variants of BSAM and ``theirs``."""
        texts = []
        for row in (self._row(name, at) for name in BSAMS[1:]):
            difference = paired(row.values(), theirs.values())
            if difference is not None:
                texts.append(f"{row.title} {difference.mean:+.2f} ({count_text(difference.n, 'seed')})")
        return f" Other variants: {', '.join(texts)}." if texts else ""


def _title(name: str) -> str:
    """Return the name of a method in claims, where Algorithm 1 is just BSAM, as in the paper."""
    if name == "bsam":
        return "BSAM"
    return variants()[name].title if name in variants() else name.capitalize()


def _samples(record: Record) -> int | None:
    """Return the number of samples that ``bsam flatness`` measured a network on; None if it did not measure it."""
    return None if record.flatness is None else record.flatness["samples"]


def _eigenvalue(record: Record, samples: int | None) -> float | None:
    """Return the largest eigenvalue from ``bsam flatness`` on ``samples`` samples, or from training if that is None."""
    if samples is None:
        return record.top_eigenvalue
    return record.flatness["eigenvalues"]["maximum"] if record.flatness and _samples(record) == samples else None


def check_baseline(records: Records, baseline: str) -> None:
    """Raise unless the name matches a single row in at least one experiment."""
    groups = group_by(records.runs, lambda run: run.experiment)
    rows = [dict.fromkeys(run.method for run in group) for group in groups.values()]
    if all(baseline_row(names, baseline) is None for names in rows):
        known = "; ".join(dict.fromkeys(run.method for run in records.runs))
        raise BsamValueError(f"baseline must be one of the methods of the runs ({known}), got {baseline!r}")
