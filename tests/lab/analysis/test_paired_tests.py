"""Student's t and paired differences against scipy."""

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from bsam.common.errors import BsamValueError
from bsam.lab.analysis.paired_tests import (
    Difference,
    decide,
    holm,
    paired,
    pooled_std,
    seeds_needed,
    t_quantile,
    within,
)

DEGREES = [*range(1, 40), 99, 100, 998, 999]


@pytest.mark.parametrize("level", [0.5, 0.9, 0.95, 0.999])
def test_quantiles_are_those_of_scipy(level):
    ours = [t_quantile(level, df) for df in DEGREES]
    np.testing.assert_allclose(ours, stats.t.ppf((1 + level) / 2, DEGREES), rtol=1e-10)


@pytest.mark.parametrize("t", [0.0, 0.3, 1.0, 4.5, 60.0])
def test_probabilities_are_those_of_scipy(t):
    ours = [within(t, df) for df in DEGREES]
    np.testing.assert_allclose(ours, 1 - 2 * stats.t.sf(t, DEGREES), rtol=0, atol=1e-12)


@pytest.mark.parametrize("n", [2, 3, 5, 10, 31])
@pytest.mark.parametrize("level", [0.95, 0.8])
def test_paired_differences_are_those_of_scipy(n, level):
    random = np.random.default_rng(n)
    a, b = random.normal(90.3, 0.5, n), random.normal(90, 0.5, n)
    ours = paired(dict(enumerate(a)), dict(enumerate(b)), level)
    expected = stats.ttest_rel(a, b)
    interval = expected.confidence_interval(level)
    np.testing.assert_allclose((ours.mean, ours.n), (np.mean(a - b), n), rtol=1e-10)
    np.testing.assert_allclose(
        (ours.low, ours.high, ours.p), (interval.low, interval.high, expected.pvalue), rtol=1e-10
    )


def test_only_shared_seeds_count_whatever_their_order():
    ours = paired({3: 5.0, 0: 1.0, 7: 100.0}, {0: 0.5, 9: -100.0, 3: 3.0})
    expected = stats.ttest_rel([5.0, 1.0], [3.0, 0.5])
    assert (ours.n, ours.mean) == (2, 1.25)
    assert ours.p == pytest.approx(expected.pvalue, rel=1e-10)


def test_one_seed_has_no_interval_and_no_seed_no_difference():
    assert paired({0: 2.0}, {0: 0.5, 1: 3.0}) == Difference(1.5, None, None, 1, None)
    assert paired({0: 2.0}, {1: 2.0}) is None
    assert paired({}, {}) is None


def test_equal_differences():
    assert paired({0: 2.0, 1: 3.0}, {0: 1.0, 1: 2.0}) == Difference(1.0, 1.0, 1.0, 2, None)
    assert paired({0: 2.0, 1: 3.0}, {0: 2.0, 1: 3.0}) == Difference(0.0, 0.0, 0.0, 2, None)


@pytest.mark.parametrize("gap", [0.1, 0.0, -3.3])
def test_rounding_errors_are_no_spread(gap):
    theirs = {0: 30.7, 1: 60.2, 2: 90.3}
    ours = {seed: score + gap for seed, score in theirs.items()}
    ours[1] = np.nextafter(ours[1], 100)
    d = paired(ours, theirs)
    assert d.half_width > 0
    assert (d.is_point, d.p, seeds_needed(d)) == (True, None, None)
    assert d.mean == pytest.approx(gap)


def test_a_small_spread_is_one():
    d = paired({0: 1.0, 1: 1.0 + 1e-6}, {0: 0.0, 1: 0.0})
    assert not d.is_point
    assert d.p is not None
    assert not Difference(1.0, None, None, 1, None).is_point


def test_pooled_standard_deviation():
    samples = [[1.0, 2.0, 4.0], [5.0], [10.0, 13.0]]
    variances = np.var(samples[0], ddof=1), np.var(samples[2], ddof=1)
    assert pooled_std(samples) == pytest.approx(np.sqrt((2 * variances[0] + variances[1]) / 3))
    assert pooled_std([[1.0], [2.0], []]) is None


def fewest_seeds(mean, spread, n, level=0.95):
    """How many more seeds, one by one and with scipy."""
    total = n + 1
    while stats.t.ppf((1 + level) / 2, total - 1) * spread / np.sqrt(total) >= abs(mean):
        total += 1
    return total - n


@pytest.mark.parametrize("gaps", [[0.3, -0.2], [0.1, 0.2, -0.1, 0.15], [-1.0, 0.9, -1.1], [0.05, -0.06, 0.07, 0.02]])
def test_seeds_needed_with_an_interval(gaps):
    d = paired(dict(enumerate(gaps)), dict.fromkeys(range(len(gaps)), 0.0))
    assert seeds_needed(d) == fewest_seeds(np.mean(gaps), np.std(gaps, ddof=1), len(gaps))


@pytest.mark.parametrize(("mean", "spread"), [(0.5, 0.5), (-0.1, 0.4), (3.0, 0.1)])
def test_seeds_needed_after_one_seed(mean, spread):
    assert seeds_needed(Difference(mean, None, None, 1, None), spread) == fewest_seeds(mean, spread, 1)


def test_seeds_needed_is_none_where_it_cannot_be_estimated():
    assert seeds_needed(Difference(0.5, None, None, 1, None)) is None
    assert seeds_needed(Difference(0.0, None, None, 1, None), 1.0) is None
    assert seeds_needed(Difference(0.001, None, None, 1, None), 1.0) is None  # millions
    assert seeds_needed(paired({0: 1.0, 1: 1.1}, {0: 0.0, 1: 0.0})) is None  # decided


def difference(*gaps):
    return paired(dict(enumerate(gaps)), dict.fromkeys(range(len(gaps)), 0.0))


def test_holm_by_hand():
    """The sorted p-values 0.005, 0.011, 0.02, 0.04, 0.13 times 5, 4, 3, 2, 1."""
    given = [0.011, 0.02, 0.04, 0.005, 0.13]
    assert holm(given) == pytest.approx([0.044, 0.06, 0.08, 0.025, 0.13])
    assert holm([0.011, None, 0.04, None]) == [pytest.approx(0.022), None, pytest.approx(0.04), None]
    assert holm([0.03, 0.031]) == pytest.approx([0.06, 0.06])  # never below that of a smaller p-value
    assert holm([0.6, 0.7, 0.01]) == pytest.approx([1, 1, 0.03])
    assert (holm([]), holm([None])) == ([], [None])


def closed_testing(p_values):
    """Holm's corrected p-values as the closure of Bonferroni's tests: the largest over all subsets with this one."""
    n = len(p_values)
    subsets = [s for size in range(1, n + 1) for s in itertools.combinations(range(n), size)]
    tests = {s: min(1.0, len(s) * min(p_values[i] for i in s)) for s in subsets}
    return [max(p for s, p in tests.items() if i in s) for i in range(n)]


@pytest.mark.parametrize("seed", range(5))
def test_holm_is_the_closure_of_bonferroni(seed):
    p_values = (np.random.default_rng(seed).uniform(0, 1, 6) ** 3).tolist()
    assert holm(p_values) == pytest.approx(closed_testing(p_values))


def test_decisions_are_corrected_t_tests():
    gaps = [(1.5, 2.0, 2.8), (0.4, -0.3, 0.1), (-2.0, -2.1, -2.2)]
    p = [stats.ttest_1samp(values, 0).pvalue for values in gaps]
    assert 0.05 > p[0] > 0.025
    decisions = decide([difference(*values) for values in gaps])
    assert [d.p for d in decisions] == pytest.approx([2 * p[0], p[1], 3 * p[2]])
    assert [d.is_significant for d in decisions] == [False, False, True]
    assert {d.tests for d in decisions} == {3}
    assert decisions[0].correction == f"p = {2 * p[0]:.3g} after Holm's correction for 3 comparisons"
    (alone,) = decide([difference(*gaps[0])])
    assert (alone.p, alone.tests, alone.is_significant) == (pytest.approx(p[0]), 1, True)
    assert (alone.correction, alone.more_seeds) == ("", None)


def test_seeds_that_decide_among_several_tests():
    """By Bonferroni's level, the strictest of Holm's."""
    gaps = [(1.5, 2.0, 2.8), (0.4, -0.3, 0.1), (-2.0, -2.1, -2.2)]
    decisions = decide([difference(*values) for values in gaps])
    level = 1 - 0.05 / 3
    expected = [fewest_seeds(np.mean(values), np.std(values, ddof=1), 3, level) for values in gaps[:2]]
    assert [d.more_seeds for d in decisions] == [*expected, None]


def test_fewer_than_three_seeds_decide_nothing_and_are_no_tests():
    sure, one, two = (5.0, 5.1, 5.2), (1000.0,), (7.0, 7.001)
    decisions = decide([difference(*sure), difference(*one), difference(*two), None])
    assert [d.is_significant for d in decisions] == [True, False, False, False]
    assert [d.p for d in decisions[1:]] == [None] * 3
    assert {d.tests for d in decisions} == {1}
    assert [d.more_seeds for d in decisions] == [None, 2, 1, 3]
    wide = [difference(1.0), difference(1.0, 3.0)]
    decisions = decide(wide, [2.0, 100.0])  # the spread of a difference of two seeds is its own
    assert [d.more_seeds for d in decisions] == [
        fewest_seeds(1.0, 2.0, 1, level=0.975),
        fewest_seeds(2.0, math.sqrt(2), 2, level=0.975),
    ]
    assert decide(wide, [0.001, None])[0].more_seeds == 2
    assert decide([difference(2.0, 2.0)])[0].more_seeds == 1


def test_equal_differences_are_no_test():
    decisions = decide([difference(2.0, 2.0, 2.0), difference(1.0, 1.1, 1.2)])
    assert (decisions[0].p, decisions[0].is_significant, decisions[0].more_seeds) == (None, False, None)
    assert decisions[1].tests == 1


@pytest.mark.parametrize("score", [math.nan, math.inf, -math.inf])
def test_scores_that_are_not_finite(score):
    """Only those of shared seeds are compared."""
    assert paired({0: 1.0, 1: 2.0, 2: score}, {0: 0.0, 1: 0.5}).n == 2
    for pair in (({0: 1.0, 3: score}, {0: 0.0, 3: 1.0}), ({0: 1.0, 3: 1.0}, {0: 0.0, 3: score})):
        with pytest.raises(BsamValueError, match=f"must be finite numbers, got {score} for seed 3"):
            paired(*pair)
