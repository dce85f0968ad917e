import math

import numpy as np
import pytest
import scipy.stats
import torch
import torch.nn.functional as F
from torch import nn

from bsam.flatness import HessianOperator, trace
from bsam.flatness.trace import plus_minus, t_quantile

METHODS = pytest.mark.parametrize("method", ["hutchinson", "hutch++"])


@pytest.mark.parametrize(("dense", "method"), [("untrained", "hutchinson"), ("trained", "hutch++")], indirect=["dense"])
def test_errors_follow_the_t_distribution(dense, method):
    H, exact = dense[0], float(dense[1].trace())
    estimates = [trace(H, samples=30, seed=seed, method=method) for seed in range(50)]
    assert all(estimate.products == 30 for estimate in estimates)
    errors = np.array([estimate.value - exact for estimate in estimates])
    stated = np.array([estimate.standard_error for estimate in estimates])
    freedom = 29 if method == "hutchinson" else 9  # the samples that the error is taken from, less one
    rate = 2 * scipy.stats.t.sf(3, freedom)
    assert (np.abs(errors / stated) > 3).sum() <= scipy.stats.binom.ppf(0.999, 50, rate)
    assert 0.7 < np.linalg.norm(errors) / np.linalg.norm(stated) < 1.4  # nor are the errors stated too large


@pytest.mark.parametrize("dense", ["trained"], indirect=True)
def test_interval_contains_the_trace_in_19_of_20_cases(dense):
    H, exact = dense[0], float(dense[1].trace())
    estimates = [trace(H, samples=6, seed=seed) for seed in range(120)]
    low, high = scipy.stats.binom.ppf([0.001, 0.999], 120, 0.95)
    assert low <= sum(estimate.interval[0] <= exact <= estimate.interval[1] for estimate in estimates) <= high
    assert sum(abs(estimate.value - exact) <= 1.96 * estimate.standard_error for estimate in estimates) < low


PAIR = torch.tensor([[2.0, 0.7], [0.7, 1.0]], dtype=torch.float64)
CORRELATED = torch.eye(20, dtype=torch.float64).index_put(
    (torch.tensor([3, 7]), torch.tensor([7, 3])), torch.tensor(0.5).double()
)
COINCIDING = {  # matrices whose quadratic forms take few values, and the largest share of intervals that are unknown
    "two forms": (PAIR, "hutchinson", 2, 0.0),
    "equal forms of different vectors": (torch.block_diag(*[PAIR] * 4), "hutchinson", 2, 0.15),
    "equal terms": (CORRELATED, "hutchinson", 2, 0.6),
    "a zero among the forms": (
        torch.tensor([[1.0, -1.0, 0.0], [-1.0, 1.0, 0.0], [0.0, 0.0, 0.0]]).double(),
        "hutchinson",
        2,
        0.6,
    ),
}


@pytest.mark.parametrize(("matrix", "method", "samples", "unknown"), COINCIDING.values(), ids=COINCIDING)
def test_interval_contains_the_trace_if_samples_coincide(nets, matrix, method, samples, unknown):
    H = HessianOperator(nn.Linear(len(matrix), 1, bias=False).double(), F.mse_loss, [])
    nets["with dense products"](H, matrix)
    estimates = [trace(H, samples=samples, seed=seed, method=method) for seed in range(120)]
    low, exact = scipy.stats.binom.ppf(0.001, 120, 0.95), float(matrix.diagonal().sum())
    assert sum(estimate.interval[0] <= exact <= estimate.interval[1] for estimate in estimates) >= low
    without = [estimate for estimate in estimates if estimate.standard_error == np.inf]
    assert len(without) <= unknown * 120
    assert all(estimate.interval == (-np.inf, np.inf) for estimate in without)
    assert all("unknown" in repr(estimate) for estimate in without)
    assert all(estimate.products == samples for estimate in estimates)


@METHODS
def test_trace_is_exact_with_as_many_products_as_weights(method):
    torch.manual_seed(0)
    model, x = nn.Linear(3, 1).double(), torch.randn(50, 3, dtype=torch.float64)
    H, calls = HessianOperator(model, F.mse_loss, [(x, x[:, :1])]), []
    estimate = trace(H, samples=6, method=method, progress=lambda *call: calls.append(call))
    exact = 2 * float(x.square().mean(0).sum() + 1)  # of the weights, and of the bias
    assert estimate.value == pytest.approx(exact, rel=1e-14)
    assert estimate.interval[0] <= exact <= estimate.interval[1]
    assert estimate.standard_error < 1e-13
    assert calls == [(done, 4) for done in (1, 2, 3, 4)]
    assert estimate.products == 4


@pytest.mark.parametrize(
    ("method", "samples", "freedom"), [("hutchinson", 7, 6), ("hutch++", 7, 2), ("hutch++", 30, 9)]
)
def test_interval_is_that_of_the_t_distribution(dense, method, samples, freedom):
    estimate = trace(dense[0], samples=samples, method=method)
    half = scipy.stats.t.ppf(0.975, freedom) * estimate.standard_error
    assert estimate.interval == pytest.approx((estimate.value - half, estimate.value + half), rel=1e-9)


@pytest.mark.parametrize("dense", ["trained"], indirect=True)
def test_hutch_plus_plus_is_better_with_few_large_eigenvalues(dense):
    H, _ = dense
    plus, plain = (
        np.mean([trace(H, seed=seed, method=method).standard_error for seed in range(10)])
        for method in ("hutch++", "hutchinson")
    )
    assert plus < 0.9 * plain
    default = trace(H, samples=30, seed=3)
    assert default == trace(H, seed=3) == trace(H, seed=3, method="hutch++")
    assert default != trace(H, seed=4)


@pytest.mark.parametrize("eigenvalues", [[3.0, -2.0, 1.0] + [0.0] * 60, [0.0] * 5, [2.0]])
def test_trace_is_exact_if_the_sketch_contains_the_matrix(with_spectrum, eigenvalues):
    estimate = trace(with_spectrum(eigenvalues)[0], samples=12)
    assert estimate.value == pytest.approx(sum(eigenvalues), abs=1e-12)
    assert estimate.standard_error < 1e-12


@METHODS
def test_error_includes_rounding(with_spectrum, method):
    # The sketch contains all of the first matrix; every sign vector gives the trace of the second.
    eigenvalues = [3.0, 2.0, 1.0] + [0.0] * 60 if method == "hutch++" else [1.7] * 63
    H, A = with_spectrum(eigenvalues, torch.float32)
    estimates = [trace(H, samples=12, seed=seed, method=method) for seed in range(10)]
    stated = np.array([estimate.standard_error for estimate in estimates])
    assert (np.abs([estimate.value - float(A.trace()) for estimate in estimates]) < 5 * stated).all()
    assert (stated >= torch.finfo(torch.float32).eps * sum(eigenvalues) * 0.9).all()
    assert (stated < 1e-5 * sum(eigenvalues)).all()


@pytest.mark.parametrize(("dtype", "method"), [(torch.bfloat16, "hutch++"), (torch.float16, "hutchinson")])
def test_half_precision(with_spectrum, dtype, method):
    H, A = with_spectrum([9.0, 5.0, 2.0] + [0.1] * 60, dtype)
    estimates = [trace(H, samples=30, seed=seed, method=method) for seed in range(8)]
    errors = np.array([(estimate.value - float(A.trace())) / estimate.standard_error for estimate in estimates])
    assert (np.abs(errors) > 4).sum() <= 1
    assert np.mean([estimate.value for estimate in estimates]) == pytest.approx(float(A.trace()), rel=0.05)


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
