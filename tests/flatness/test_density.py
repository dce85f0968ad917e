import numpy as np
import pytest
import scipy.stats
import torch

from bsam.flatness import spectral_density
from bsam.flatness.density import smoothed


def test_the_density_is_a_density_with_the_right_moments(dense):
    H, exact = dense
    found = spectral_density(H, steps=12, probes=150, seed=1)
    assert found.products == 12 * 150
    assert np.trapezoid(found.density, found.grid) == pytest.approx(1.0, abs=1e-6)
    assert found.weights.sum() == pytest.approx(1.0, abs=1e-12)
    assert (found.density >= 0).all()
    nodes, weights = found.nodes.reshape(150, 12), found.weights.reshape(150, 12) * 150
    eigenvalues = torch.linalg.eigvalsh(exact).numpy()
    for power in (1, 2):
        moments = (weights * nodes**power).sum(1)
        error = moments.std(ddof=1) / np.sqrt(150)
        assert abs(moments.mean() - (eigenvalues**power).mean()) < 3.5 * error
        assert error < 0.1 * (np.abs(eigenvalues) ** power).mean()  # small enough for the comparison to say something
    mean = np.trapezoid(found.density * found.grid, found.grid)
    assert mean == pytest.approx((found.weights * found.nodes).sum(), abs=1e-8)


def test_the_quadrature_is_exact_with_as_many_steps_as_there_are_dimensions(dense):
    H, exact = dense
    found = spectral_density(H, steps=1000, probes=1, seed=5)
    values, vectors = torch.linalg.eigh(exact)
    np.testing.assert_allclose(np.sort(found.nodes), values, atol=1e-12)
    z = H.random(torch.Generator().manual_seed(5), "signs")
    assert set(z.tolist()) == {-1.0, 1.0}
    expected = ((vectors.T @ z) ** 2 * torch.exp(values)).sum() / H.size  # z exp(H) z / |z|^2
    assert float((found.weights * np.exp(found.nodes)).sum()) == pytest.approx(float(expected), rel=1e-12)


def test_each_quadrature_has_the_moments_of_its_own_probe(operator):
    H, exact = operator
    found = spectral_density(H, steps=3, probes=2, seed=2)
    generator = torch.Generator().manual_seed(2)
    for nodes, weights in zip(found.nodes.reshape(2, 3), 2 * found.weights.reshape(2, 3), strict=True):
        z = H.random(generator, "signs")
        for power in range(6):  # three nodes: exact up to the fifth
            expected = z @ torch.linalg.matrix_power(exact, power) @ z / H.size
            assert (weights * nodes**power).sum() == pytest.approx(float(expected), rel=1e-9)


@pytest.mark.parametrize("eigenvalues", [[0.0] * 40, [1e6] * 40, [2.0] * 20 + [-1.0] * 20])
def test_multiple_eigenvalues_have_the_right_weights(with_spectrum, eigenvalues):
    found = spectral_density(with_spectrum(eigenvalues)[0], steps=10, probes=40)
    assert np.trapezoid(found.density, found.grid) == pytest.approx(1.0, abs=1e-3)
    allowed = 0.25 if len(set(eigenvalues)) > 1 else 1e-6
    assert (found.weights * found.nodes).sum() == pytest.approx(np.mean(eigenvalues), abs=allowed)


def test_the_width_of_the_gaussian_may_be_chosen(dense):
    H, _ = dense
    automatic, again, other = (spectral_density(H, steps=5, probes=1, seed=seed) for seed in (0, 0, 1))
    found = spectral_density(H, steps=5, probes=1, sigma=0.05, points=300)
    assert automatic.sigma == pytest.approx(0.01 * np.ptp(automatic.nodes))
    assert (found.sigma, found.grid.shape, automatic.grid.shape) == (0.05, (300,), (1000,))
    bumps = [w * scipy.stats.norm(x, 0.05).pdf(found.grid) for x, w in zip(found.nodes, found.weights, strict=True)]
    np.testing.assert_allclose(found.density, sum(bumps), rtol=1e-12)
    np.testing.assert_array_equal(found.density, smoothed(found.grid, found.nodes, found.weights, 0.05))
    assert np.array_equal(again.density, automatic.density)
    assert not np.array_equal(again.nodes, other.nodes)
