"""Compare methods with a baseline over the same seeds, in numbers and in a paragraph."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..common.grouping import count_text, group_by
from ..recipes.choices import Choice
from ..recipes.columns import score_of
from ..recipes.variants import passes_of, variant_of
from ..training.run_dir import RunDir, RunState
from .choice_texts import base_sentence, tuned_on
from .outcome import failure, score_title
from .paired_tests import MIN_SEEDS, Decision, Difference, decide, paired
from .paper_numbers import total_radius
from .read_runs import read_records
from .row_comparison import failures_text


@dataclass(frozen=True)
class ComparedMethod:
    """The runs of one method.

    Args:
        method: its title in tables.
        scores: the score after the last epoch of each finished run, by seed.
        difference: the scores minus those of the baseline over the shared seeds: mean and 95 % interval; None for the
            baseline and without shared seeds.
        decision: whether the difference is more than chance, corrected for the number of methods, and how many more
            seeds would decide that; None for the baseline.
        diverged: the number of runs that diverged.
        unfinished: the number of runs that have neither finished nor diverged.
        radius: the total radius: rho, or rho_max + rho_min; None if the method has none.
        chosen: how the radius was chosen: ``"not tuned"``, or for example ``"tuned on 400 validation samples, 1 seed;
            within the noise"``.
        passes: forward and backward passes per step.
        seconds: seconds per epoch; None if unknown or if runs shared the device.
        failures: a sentence on each finished run whose network is no better than chance, by seed. A method with such
            runs is not compared, and nothing is compared with a baseline that has them.
    """

    method: str
    scores: Mapping[int, float]
    difference: Difference | None
    decision: Decision | None
    diverged: int
    unfinished: int
    radius: float | None
    chosen: str
    passes: float
    seconds: float | None
    failures: Mapping[int, str] = field(default_factory=dict)

    @property
    def n(self) -> int:
        """The number of finished runs."""
        return len(self.scores)

    @property
    def mean(self) -> float | None:
        """The mean score; None without finished runs."""
        return statistics.fmean(self.scores.values()) if self.scores else None

    @property
    def std(self) -> float | None:
        """The sample standard deviation of the scores; None with fewer than two."""
        return statistics.stdev(self.scores.values()) if self.n > 1 else None

    @property
    def is_decided(self) -> bool:
        """Whether the difference is more than chance.

        It has at least three shared seeds, and its p-value, corrected for the number of methods, is below 0.05. If all
        differences are equal, this is not decided: accuracies change in steps of one sample, so a few seeds may have
        equal differences by coincidence.
        """
        return self.decision is not None and self.decision.is_significant

    @property
    def is_better(self) -> bool:
        """Whether the method is better than the baseline by more than chance."""
        return self.is_decided and self.gain > 0

    @property
    def gain(self) -> float:
        """The mean difference from the baseline, without rounding errors; 0 if there is none."""
        return 0.0 if self.difference is None else round(self.difference.mean, 9)


@dataclass(frozen=True)
class ComparisonResult:
    """Methods compared with a baseline. ``str`` gives the answer as a paragraph.

    Args:
        baseline: the title of the baseline.
        unit: the unit of the scores; higher is better.
        methods: the methods, in the order in which they were given.
        page: the report, an HTML file; None if it was not written.
        shared: a sentence on the tuned settings that all methods share; empty if there are none.
    """

    baseline: str
    unit: str
    methods: tuple[ComparedMethod, ...]
    page: Path | None = None
    shared: str = ""

    def __str__(self) -> str:
        (baseline,) = (row for row in self.methods if row.method == self.baseline)
        others = [row for row in self.methods if row is not baseline]
        if baseline.mean is None:
            return f"{self.baseline} has no finished run{_not_finished(baseline)}, so nothing can be compared with it."
        if baseline.failures:
            texts = "".join(failures_text(row.method, row.failures, row.n) for row in self.methods)
            return f"Nothing can be compared with {self.baseline}, which did not learn.{texts}"
        spread = "" if baseline.std is None else f" ± {baseline.std:.2f}"
        seeds = count_text(baseline.n, "seed")
        numbers = f"{self.baseline}: {self.unit} {baseline.mean:.2f}{spread}, {seeds}{_not_finished(baseline)}."
        sentences = [self._answer(others), numbers, *(self._sentence(row, baseline) for row in others), self.shared]
        return " ".join(filter(None, sentences))

    def _answer(self, others: Sequence[ComparedMethod]) -> str:
        seeds = [row.difference.n for row in others if row.difference is not None]
        if better := sorted((row for row in others if row.is_better), key=lambda row: row.gain, reverse=True):
            names = [row.method for row in better]
            are = "are" if len(names) > 1 else "is"
            listed = " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
            return f"{listed} {are} better than {self.baseline}, by more than chance."
        if seeds and max(seeds) < MIN_SEEDS:
            return f"Too few seeds: telling whether a method is better than {self.baseline} needs at least {MIN_SEEDS}."
        learned = " that learned" if any(row.failures for row in others) else ""
        if any(row.gain > 0 for row in others):
            return f"No method{learned} is better than {self.baseline} by more than chance."
        if all(row.failures for row in others):
            return f"No method can be compared with {self.baseline}: none of them learned."
        return f"No method{learned} is better than {self.baseline}."

    def _sentence(self, row: ComparedMethod, baseline: ComparedMethod) -> str:
        d, decision = row.difference, row.decision
        radius = "" if row.radius is None else f" at total radius {row.radius:g} ({row.chosen})"
        if row.failures:
            return f"No verdict on {row.method}{radius}.{failures_text(row.method, row.failures, row.n)}"
        if d is None or decision is None:
            return f"{row.method} has no finished run to compare{_not_finished(row)}."
        points = " points" if "%" in self.unit else ""
        by = f"{'better' if row.gain > 0 else 'worse'} by {abs(row.gain):.2f}{points}"
        text = f"{row.method}{radius} is {by if row.gain else 'equal'} "
        if d.low is None or d.high is None:
            interval = "one seed"
        elif d.is_point:
            interval = f"equal differences with all {d.n} seeds, so their spread is unknown"
        else:
            interval = f"95 % interval {d.low:+.2f} to {d.high:+.2f}, {d.n} seeds"
        correction = f"; {decision.correction}" if decision.correction else ""
        text += f"({interval}{correction}), {'more than chance' if row.is_decided else 'which may be chance'}"
        if decision.more_seeds is not None:
            seeds = count_text(decision.more_seeds, "more seed")
            is_least = decision.more_seeds <= MIN_SEEDS - d.n
            text += f" (at least {seeds} needed to decide)" if is_least else f" (about {seeds} would decide)"
        passes = f"{row.passes:.3g} {'pass' if row.passes == 1 else 'passes'} per step"
        same = row.passes == baseline.passes
        text += f", at the same {passes}" if same else f", at {passes} instead of {baseline.passes:.3g}"
        if row.seconds is not None and baseline.seconds is not None:
            text += f" and {row.seconds:.3g} s per epoch instead of {baseline.seconds:.3g} s"
        return f"{text}{_not_finished(row)}."


def compare_states(
    states: Sequence[RunState],
    baseline: str,
    choices: Mapping[str, Choice] | None = None,
    base: Choice | None = None,
    page: Path | None = None,
) -> ComparisonResult:
    """Compare the finished runs of each method with those of a baseline.

    Args:
        states: runs that differ in their method and seed only.
        baseline: the title of the baseline.
        choices: the choice of their radii, by the name of the run directory.
        base: the choice of the base optimizer's settings.
        page: the report, an HTML file.
    """
    groups = group_by(states, lambda state: variant_of(state.run).title)
    # read together, because a run is timed only if none of the others may have shared its device
    records = read_records([state.path for state in states if state.epochs]).runs
    seconds = {record.folder: record.seconds for record in records if record.seconds is not None}
    scores: dict[str, dict[int, float]] = {}
    failures: dict[str, dict[int, str]] = {}
    for title, group in groups.items():
        finished = [state for state in group if state.finished]
        scores[title] = {state.run.seed: score_of(state) for state in finished}
        sentences = {state.run.seed: failure(state.run, RunDir(state.path), state.epochs) for state in finished}
        failures[title] = {seed: sentence for seed, sentence in sentences.items() if sentence is not None}
    compared = {
        title: None if failures[title] or failures[baseline] else paired(scores[title], scores[baseline])
        for title in groups
        if title != baseline
    }
    decisions = dict(zip(compared, decide(list(compared.values())), strict=True))
    rows = []
    for title, group in groups.items():
        choice = (choices or {}).get(group[0].path.name)
        times = [seconds[state.path] for state in group if state.path in seconds]
        row = ComparedMethod(
            method=title,
            scores=scores[title],
            difference=compared.get(title),
            decision=decisions.get(title),
            diverged=sum(state.diverged is not None for state in group),
            unfinished=sum(not state.ended for state in group),
            radius=total_radius(group[0].run),
            chosen="not tuned" if choice is None or choice.best() is None else tuned_on(choice),
            passes=passes_of(group[0].run),
            seconds=statistics.fmean(times) if times else None,
            failures=failures[title],
        )
        rows.append(row)
    return ComparisonResult(baseline, score_title(states[0].run), tuple(rows), page, base_sentence(base))


def _not_finished(row: ComparedMethod) -> str:
    counts = {"diverged": row.diverged, "not finished": row.unfinished}
    listed = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
    return f" ({listed})" if listed else ""
