"""Student's t and paired differences against scipy."""

import numpy as np
import pytest
from scipy import stats

from bsam.report.statistics import Difference, paired, pooled_std, seeds_needed, t_quantile, within

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
    std, df = pooled_std(samples)
    assert df == 3
    assert std == pytest.approx(np.sqrt((2 * variances[0] + variances[1]) / 3))
    assert pooled_std([[1.0], [2.0], []]) is None


def fewest_seeds(mean, spread, n):
    """How many more seeds, one by one and with scipy."""
    total = n + 1
    while stats.t.ppf(0.975, total - 1) * spread / np.sqrt(total) >= abs(mean):
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
