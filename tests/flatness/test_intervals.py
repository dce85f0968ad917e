import math

import pytest
import scipy.stats

from bsam.flatness.intervals import plus_minus, t_quantile


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 9, 10, 29, 200, 100_001])
def test_quantiles_equal_those_of_scipy(freedom):
    for probability in (0.5, 0.9, 0.975, 0.9995):
        expected = scipy.stats.t.ppf(probability, freedom)
        assert t_quantile(probability, freedom) == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        (43.8, 10.0, "44 ± 10"),
        (43.8, 9.96, "44 ± 10"),
        (3768.4, 250.3, "3770 ± 250"),
        (-0.01234, 0.00456, "-0.0123 ± 0.0046"),
        (-4.0, 120.0, "0 ± 120"),
        (1.5e7, 2.5e5, "(1.500 ± 0.025)e+07"),
        (2e-9, 3e-10, "(2.00 ± 0.30)e-09"),
        (14.0, 3e-14, "14 ± 3e-14"),
        (2.0, 0.0, "2 ± 0"),
        (0.0, 0.0, "0 ± 0"),
        (math.nan, 1.0, "nan ± 1"),
        (3.0, math.inf, "3 ± unknown"),
        (3.0, math.nan, "3 ± unknown"),
    ],
)
def test_numbers_have_as_many_digits_as_are_known(value, error, text):
    assert plus_minus(value, error) == text
