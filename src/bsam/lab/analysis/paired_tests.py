"""Paired differences over seeds, with intervals by Student's t, and what several of them decide."""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from ...common.errors import BsamValueError

LEVEL = 0.95
MIN_SEEDS = 3  # shared seeds that a verdict needs
MOST_SEEDS = 1000  # more are not worth estimating


@dataclass(frozen=True)
class Difference:
    """A paired difference over the seeds that two methods share.

    Args:
        mean: the mean of the differences.
        low: the lower end of the confidence interval; None with one seed.
        high: the upper end.
        n: the number of shared seeds.
        p: the two-sided p-value of the paired t-test; None with one seed, and if all differences are equal.
    """

    mean: float
    low: float | None
    high: float | None
    n: int
    p: float | None

    @property
    def half_width(self) -> float | None:
        """Half the length of the interval; None with one seed."""
        return None if self.low is None or self.high is None else (self.high - self.low) / 2

    @property
    def is_point(self) -> bool:
        """Whether the differences of several seeds are equal except for rounding errors, so their spread is unknown."""
        if self.low is None or self.high is None:
            return False
        return math.isclose(self.low, self.high, rel_tol=1e-9, abs_tol=1e-12)


def within(t: float, df: int) -> float:
    """Return the probability that the absolute value of Student's t with ``df`` degrees of freedom is below ``t``.

    The finite series for integer degrees of freedom (Abramowitz and Stegun, 26.7.3 and 26.7.4).
    """
    angle = math.atan(t / math.sqrt(df))
    cosine, sine = math.cos(angle), math.sin(angle)
    odd = df % 2
    total = 0.0
    term = cosine if odd else 1.0
    for k in range(1 + odd, df, 2):
        total += term
        term *= cosine * cosine * k / (k + 1)
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


@cache
def t_quantile(level: float, df: int) -> float:
    """Return the ``t`` for which ``within(t, df)`` is ``level``."""
    low, high = 0.0, 1.0
    while within(high, df) < level:
        high *= 2
    while (middle := (low + high) / 2) not in (low, high):
        low, high = (middle, high) if within(middle, df) < level else (low, middle)
    return high


def paired(ours: Mapping[int, float], theirs: Mapping[int, float], level: float = LEVEL) -> Difference | None:
    """Return the mean of ``ours - theirs`` over the shared seeds, with a confidence interval; None without any.

    Args:
        ours: scores by seed.
        theirs: scores by seed.
        level: the confidence level of the interval.

    Example:
        >>> paired({0: 3.0, 1: 5.0, 2: 1.0}, {0: 1.0, 1: 2.0})  # doctest: +ELLIPSIS
        Difference(mean=2.5, low=-3.85..., high=8.85..., n=2, p=0.125...)
    """
    shared = [seed for seed in ours if seed in theirs]
    for seed, score in ((seed, scores[seed]) for seed in shared for scores in (ours, theirs)):
        if not math.isfinite(score):
            raise BsamValueError(f"scores must be finite numbers, got {score} for seed {seed}: leave this run out")
    gaps = [ours[seed] - theirs[seed] for seed in shared]
    if not gaps:
        return None
    mean, n = statistics.fmean(gaps), len(gaps)
    if n == 1:
        return Difference(mean, None, None, n, None)
    error = statistics.stdev(gaps) / math.sqrt(n)
    half = t_quantile(level, n - 1) * error
    d = Difference(mean, mean - half, mean + half, n, None)
    return d if d.is_point else replace(d, p=max(0.0, 1 - within(abs(mean) / error, n - 1)))


def pooled_std(samples: Sequence[Sequence[float]]) -> float | None:
    """Return the pooled standard deviation of samples; None if no sample has two values."""
    several = [values for values in samples if len(values) > 1]
    if not several:
        return None
    df = sum(len(values) - 1 for values in several)
    return math.sqrt(sum((len(values) - 1) * statistics.variance(values) for values in several) / df)


def seeds_needed(d: Difference, spread: float | None = None, level: float = LEVEL) -> int | None:
    """Return how many more seeds make the interval exclude 0, if mean and spread stay as they are.

    Args:
        d: a difference, with a 95 % interval.
        spread: the standard deviation of single differences, for a difference of one seed.
        level: the confidence level of the interval that should exclude 0.

    Returns:
        None if the interval already excludes 0, the mean is 0, the spread is unknown, or more than 1,000 seeds in total
        would be needed.
    """
    if d.half_width is not None:
        spread = d.half_width * math.sqrt(d.n) / t_quantile(LEVEL, d.n - 1)
    if d.is_point or spread is None or not d.mean:
        return None

    def excludes_zero(n: int) -> bool:
        return t_quantile(level, n - 1) * spread / math.sqrt(n) < abs(d.mean)

    if (d.n > 1 and excludes_zero(d.n)) or not excludes_zero(MOST_SEEDS):
        return None
    more = range(1, MOST_SEEDS - d.n + 1)
    return more[bisect_left(more, True, key=lambda n: excludes_zero(d.n + n))]  # the half-width falls with n


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Return p-values corrected for each other with Holm's method; None stays None and does not count.

    Example:
        >>> holm([0.02, None, 0.01, 0.5])
        [0.04, None, 0.03, 0.5]
    """
    ranked = sorted((p, place) for place, p in enumerate(p_values) if p is not None)
    corrected: list[float | None] = [None] * len(p_values)
    largest = 0.0
    for rank, (p, place) in enumerate(ranked):
        corrected[place] = largest = max(largest, min(1.0, (len(ranked) - rank) * p))
    return corrected


@dataclass(frozen=True)
class Decision:
    """What the shared seeds say about a difference.

    Args:
        p: the p-value of the paired t-test, corrected for all tests (Holm); None with fewer than three shared seeds,
            and if all differences are equal.
        tests: the number of tests that ``p`` is corrected for.
        more_seeds: how many more seeds would make the difference significant if mean and spread stay as they are; with
            fewer than three seeds, at least as many as are missing. None if it is significant or that is not known.
    """

    p: float | None
    tests: int
    more_seeds: int | None

    @property
    def is_significant(self) -> bool:
        """Whether the difference is more than chance."""
        return self.p is not None and self.p < 1 - LEVEL

    @property
    def correction(self) -> str:
        """The corrected p-value in words; empty if there is one test, which the interval shows."""
        if self.p is None or self.tests < 2:
            return ""
        p = "< 0.001" if self.p < 0.001 else f"= {self.p:.3g}"
        return f"p {p} after Holm's correction for {self.tests} comparisons"


def decide(differences: Sequence[Difference | None], spreads: Sequence[float | None] | None = None) -> list[Decision]:
    """Test differences that belong together, such as those of several methods from one baseline.

    Args:
        differences: the differences; None for those without shared seeds.
        spreads: the standard deviations of single differences, to estimate the seeds that a difference of one seed
            needs.
    """
    corrected = holm([d.p if d is not None and d.n >= MIN_SEEDS else None for d in differences])
    tests = sum(p is not None for p in corrected)
    compared = sum(d is not None for d in differences)  # with more seeds, all of them are tested
    level = 1 - (1 - LEVEL) / max(compared, 1)  # what all tests need at most: Holm's method asks less of some
    decisions = []
    for d, p, spread in zip(differences, corrected, spreads or [None] * len(differences), strict=True):
        needed = None if d is None else seeds_needed(d, spread, level)
        missing = MIN_SEEDS - (0 if d is None else d.n)
        decision = Decision(p, tests, max(missing, needed or 0) if missing > 0 else needed)
        decisions.append(replace(decision, more_seeds=None) if decision.is_significant else decision)
    return decisions
