from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from bsam.flatness import HessianOperator, spectral_density, spectrum, top_eigenvalues, trace

ALL_ENDS = pytest.mark.parametrize("which", ["largest", "magnitude", "both ends"])


def wanted(eigenvalues, k, which):
    """The requested eigenvalues out of all of them, in descending order."""
    values = np.sort(eigenvalues)[::-1]
    if which == "largest":
        return values[:k]
    if which == "magnitude":
        return np.sort(values[np.argsort(-np.abs(values), kind="stable")[:k]])[::-1]
    return np.concatenate([values[: k - k // 2], values[len(values) - k // 2 :]])


def check_vectors(result, exact):
    """Check that the vectors are orthonormal and the residuals equal those of the dense matrix."""
    Y = torch.stack([torch.cat([t.reshape(-1) for t in v.tensors()]) for v in result.vectors])
    torch.testing.assert_close(Y @ Y.T, torch.eye(len(Y), dtype=Y.dtype), rtol=0, atol=1e-12)
    residuals = (Y @ exact - torch.as_tensor(result.values.copy())[:, None] * Y).norm(dim=1)
    np.testing.assert_allclose(result.residuals, residuals, rtol=1e-6, atol=1e-14)


@ALL_ENDS
@pytest.mark.parametrize("net", ["untrained", "trained"])
def test_top_20_equal_those_of_the_dense_matrix(request, nets, net, which):
    model, data, exact = request.getfixturevalue(net)
    H = HessianOperator(model, F.cross_entropy, data)
    if (net, which) != ("trained", "largest"):  # the products do not depend on `which`
        nets["with dense products"](H, exact)
    result = top_eigenvalues(H, k=20, which=which, vectors=True)
    np.testing.assert_allclose(result.values, wanted(torch.linalg.eigvalsh(exact).numpy(), 20, which), rtol=1e-6)
    assert result.converged
    assert result.products < H.size
    check_vectors(result, exact)
    assert (result.residuals <= 1e-4 * np.abs(result.values)).all()


@ALL_ENDS
def test_smaller_tolerance_gives_smaller_residuals(dense, which):
    H, exact = dense
    result = top_eigenvalues(H, k=7, which=which, tol=1e-10)
    np.testing.assert_allclose(result.values, wanted(torch.linalg.eigvalsh(exact).numpy(), 7, which), rtol=1e-12)
    assert (result.residuals <= 1e-10 * np.abs(result.values)).all()
    assert result.converged


SPECTRA = {
    "five times the largest": [*[5.0] * 5, *np.linspace(4, 1, 20), *np.linspace(0.9, -0.5, 175)],
    "five times around the last one wanted": [*np.linspace(4, 2, 17), *[1.5] * 5, *np.linspace(1.4, -0.5, 178)],
    "five times next to a dense bulk": [*np.linspace(4, 2, 12), *[1.5] * 5, *np.linspace(1.49, -0.5, 183)],
    "negative ones": [*[-5.0] * 3, *np.linspace(-4, -1, 20), *[1.0] * 2, *np.linspace(0.9, -0.9, 175)],
    "fewer than wanted, the rest 0": [*np.linspace(4, 1, 10), *[0.0] * 190],
    "one value ten times, the rest 0": [2.0] * 10 + [0.0] * 190,
    "the identity": [1.0] * 120,
    "nothing but 0": [0.0] * 120,
    "of all sizes": [*10.0 ** -np.arange(0, 5, 0.25), *-(10.0 ** -np.arange(0.1, 5, 0.25)), *[0.0] * 100],
}


@ALL_ENDS
@pytest.mark.parametrize("eigenvalues", SPECTRA.values(), ids=SPECTRA)
def test_multiple_eigenvalues(with_spectrum, eigenvalues, which):
    H, _ = with_spectrum(eigenvalues)
    expected = wanted(np.array(eigenvalues), 20, which)
    for seed in range(2 if which == "largest" else 1):
        result = top_eigenvalues(H, k=20, which=which, seed=seed)
        # atol for zeros among values of 1 and more
        np.testing.assert_allclose(result.values, expected, rtol=1e-6, atol=1e-9)
        assert result.converged
        assert result.products < 1000


def diagonal(eigenvalues):
    H = HessianOperator(torch.nn.Linear(len(eigenvalues), 1, bias=False).double(), F.mse_loss, [])
    values = torch.tensor(eigenvalues, dtype=torch.float64)

    def times(v):
        H.products += 1
        return values * v

    H.times = times
    return H


@pytest.mark.parametrize(
    ("which", "eigenvalues", "k"),
    [
        ("largest", [1, 1, 0.95, *np.linspace(-1, 0.9, 1000)], 2),
        ("both ends", [-1, -1, -0.95, *np.linspace(-0.9, 1, 1000), 3, 2], 4),
        ("magnitude", [-1, -1, -0.95, *np.linspace(-0.9, 0.9, 1000)], 2),
    ],
)
def test_copies_that_a_random_vector_hardly_contains(which, eigenvalues, k):
    """They appear after the values next to them have settled."""
    H = diagonal(eigenvalues)
    for seed in range(1, 5):
        result = top_eigenvalues(H, k=k, which=which, seed=seed)
        np.testing.assert_allclose(result.values, wanted(np.array(eigenvalues), k, which), rtol=1e-6)
        assert result.converged


def test_converged_is_false_if_copies_may_be_missing(monkeypatch):
    H = diagonal([1, 1, 0.95, *np.linspace(-1, 0.9, 297)])
    monkeypatch.setattr(spectrum, "MAX_CYCLES", 2)
    result = top_eigenvalues(H, k=2, tol=1e-2)
    assert (result.residuals <= 1e-2 * result.values).all()
    assert not result.converged


@ALL_ENDS
def test_residuals_are_within_the_tolerance_after_several_rounds(with_spectrum, which):
    # a round drops the directions of earlier residuals, so these must be small by then; 0 is among the wanted values
    eigenvalues = np.repeat(np.linspace(0, 1, 150), 2)
    H, _ = with_spectrum(eigenvalues)
    for seed in range(2 if which == "largest" else 1):
        result = top_eigenvalues(H, k=20, which=which, seed=seed, tol=1e-2 if which == "largest" else 1e-4)
        assert result.converged
        np.testing.assert_allclose(result.values, wanted(eigenvalues, 20, which), atol=1e-3)


@pytest.mark.parametrize("k", [30, 74, 75, 1000])
def test_many_and_all(with_spectrum, k):
    eigenvalues = np.sort([*10.0 ** -np.arange(0, 5, 0.2), *-(10.0 ** -np.arange(1, 5, 0.2)), *[0.0] * 30])
    H, _ = with_spectrum(eigenvalues)
    result = top_eigenvalues(H, k=k)
    expected = eigenvalues[::-1][:k]
    np.testing.assert_allclose(result.values, expected, rtol=1e-6, atol=1e-8 * np.abs(expected).max())
    assert result.converged


@ALL_ENDS
@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("eigenvalues", [[3.0], [0.0], [4.0, 4.0, -1.0]])
def test_tiny_matrices(with_spectrum, which, k, eigenvalues):
    result = top_eigenvalues(with_spectrum(eigenvalues)[0], k=k, which=which)
    expected = wanted(np.array(eigenvalues), min(k, len(eigenvalues)), which)
    np.testing.assert_allclose(result.values, expected, atol=1e-12)
    assert result.converged


def test_float32(nets):
    model, data = nets["made"](nets["mlp"], sizes=(24,), dtype=torch.float32)
    H = HessianOperator(model, F.cross_entropy, data)
    result = top_eigenvalues(H, k=4)
    expected = np.linalg.eigvalsh(nets["exact"](model, F.cross_entropy, data).numpy())[::-1][:4]
    np.testing.assert_allclose(result.values, expected, rtol=1e-5)
    assert result.converged
    exactly = top_eigenvalues(HessianOperator(model, F.cross_entropy, data, dtype=torch.float64), k=4, tol=1e-8)
    np.testing.assert_allclose(exactly.values, expected, rtol=1e-9)
    assert top_eigenvalues(H, k=1, tol=0).converged  # as good as the precision allows


def test_residuals_below_the_resolution_of_float32(with_spectrum):
    eigenvalues = 10 * 0.85 ** np.arange(60)
    H, _ = with_spectrum(np.concatenate([eigenvalues, np.linspace(-1e-4, 1e-4, 240)]), torch.float32)
    result = top_eigenvalues(H, k=50)
    assert result.converged
    floor = 10 * torch.finfo(torch.float32).eps * result.values[0]  # 1.2e-5: five digits of the smallest
    assert (result.residuals <= np.maximum(1e-4 * result.values, floor)).all()
    np.testing.assert_allclose(result.values, eigenvalues[:50], rtol=2e-5, atol=2e-7)


@pytest.mark.parametrize("which", ["largest", "both ends"])
def test_zeros_converge_in_float32(with_spectrum, which):
    H, _ = with_spectrum([*np.linspace(4, 1, 10), *[0.0] * 190], torch.float32)
    result = top_eigenvalues(H, k=20, which=which)
    assert result.converged
    assert np.abs(result.values[10:]).max() <= 10 * torch.finfo(torch.float32).eps * 4


def test_seed(dense):
    H, _ = dense
    first, again, other = (top_eigenvalues(H, k=5, seed=seed) for seed in (1, 1, 2))
    assert np.array_equal(first.values, again.values)
    assert np.array_equal(first.residuals, again.residuals)
    assert not np.array_equal(first.residuals, other.residuals)
    np.testing.assert_allclose(first.values, other.values, rtol=1e-6)
    with torch.random.fork_rng():
        torch.manual_seed(123)
        assert np.array_equal(top_eigenvalues(H, k=np.int64(5), seed=np.int32(1)).values, first.values)


def test_products_are_counted_and_reported(model, data):
    passes, calls = [], []
    model.register_forward_pre_hook(lambda module, inputs: passes.append(1))
    H = HessianOperator(model, F.cross_entropy, data)
    H.times(torch.ones(H.size, dtype=H.dtype))  # the first product also checks data and loss
    for measure in (
        partial(top_eigenvalues, k=4, tol=1e-2),
        partial(trace, samples=9),
        partial(trace, samples=5, method="hutchinson"),
        partial(spectral_density, steps=4, probes=3),
    ):
        passes.clear()
        calls.clear()
        result = measure(H, progress=lambda *call: calls.append(call))
        assert result.products == len(passes) / len(data)
        assert [done for done, _ in calls] == list(range(1, result.products + 1))
        assert all(done <= expected for done, expected in calls)
        assert calls[-1] == (result.products, result.products)
        assert getattr(result, "vectors", None) is None


def test_converged_is_false_after_too_few_products(dense, monkeypatch):
    H, exact = dense
    monkeypatch.setattr(spectrum, "MAX_CYCLES", 1)
    result = top_eigenvalues(H, k=20, tol=1e-8, vectors=True)
    assert not result.converged
    assert result.products == 40 + 20
    check_vectors(result, exact)
    assert (result.residuals > 1e-8 * np.abs(result.values)).any()
    assert result.values[0] == pytest.approx(float(torch.linalg.eigvalsh(exact)[-1]), rel=1e-3)


def test_converged_is_false_for_a_noisy_operator(dense, monkeypatch):
    (H, _), noise = dense, torch.Generator().manual_seed(0)
    times = H.times
    monkeypatch.setattr(H, "times", lambda v: times(v) + 1e-4 * torch.randn(v.shape, dtype=v.dtype, generator=noise))
    monkeypatch.setattr(spectrum, "MAX_CYCLES", 2)
    assert not top_eigenvalues(H, k=3).converged
