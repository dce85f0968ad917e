import numpy as np
import pytest
import scipy.stats
import torch
from scipy.integrate import trapezoid

from bsam.flatness import spectral_density
from bsam.flatness.density import smoothed


def test_density_is_positive_with_integral_1_and_the_right_moments(dense):
    H, exact = dense
    density = spectral_density(H, steps=12, probes=100, seed=1)
    assert density.products == 12 * 100
    assert trapezoid(density.density, density.grid) == pytest.approx(1.0, abs=1e-6)
    assert density.weights.sum() == pytest.approx(1.0, abs=1e-12)
    assert (density.density >= 0).all()
    nodes, weights = density.nodes.reshape(100, 12), density.weights.reshape(100, 12) * 100
    eigenvalues = torch.linalg.eigvalsh(exact).numpy()
    for power in (1, 2):
        moments = (weights * nodes**power).sum(1)
        error = moments.std(ddof=1) / 10
        assert abs(moments.mean() - (eigenvalues**power).mean()) < 3.5 * error
        assert error < 0.1 * (np.abs(eigenvalues) ** power).mean()  # small enough for the comparison to say something
    mean = trapezoid(density.density * density.grid, density.grid)
    assert mean == pytest.approx((density.weights * density.nodes).sum(), abs=1e-8)


def test_quadrature_is_exact_with_as_many_steps_as_dimensions(dense):
    H, exact = dense
    density = spectral_density(H, steps=1000, probes=1, seed=5)
    values, vectors = torch.linalg.eigh(exact)
    np.testing.assert_allclose(np.sort(density.nodes), values, atol=1e-12)
    z = H.random(torch.Generator().manual_seed(5), "signs")
    assert set(z.tolist()) == {-1.0, 1.0}
    expected = ((vectors.T @ z) ** 2 * torch.exp(values)).sum() / H.size  # z exp(H) z / |z|^2
    assert float((density.weights * np.exp(density.nodes)).sum()) == pytest.approx(float(expected), rel=1e-12)


def test_each_quadrature_has_the_moments_of_its_probe(operator):
    H, exact = operator
    density = spectral_density(H, steps=3, probes=2, seed=2)
    generator = torch.Generator().manual_seed(2)
    for nodes, weights in zip(density.nodes.reshape(2, 3), 2 * density.weights.reshape(2, 3), strict=True):
        z = H.random(generator, "signs")
        for power in range(6):  # three nodes: exact up to the fifth
            expected = z @ torch.linalg.matrix_power(exact, power) @ z / H.size
            assert (weights * nodes**power).sum() == pytest.approx(float(expected), rel=1e-9)


@pytest.mark.parametrize("eigenvalues", [[0.0] * 40, [1e6] * 40, [2.0] * 20 + [-1.0] * 20])
def test_weights_of_multiple_eigenvalues(with_spectrum, eigenvalues):
    density = spectral_density(with_spectrum(eigenvalues)[0], steps=10, probes=40)
    assert trapezoid(density.density, density.grid) == pytest.approx(1.0, abs=1e-3)
    allowed = 0.25 if len(set(eigenvalues)) > 1 else 1e-6
    assert (density.weights * density.nodes).sum() == pytest.approx(np.mean(eigenvalues), abs=allowed)


def test_width_and_seed(dense):
    H, _ = dense
    automatic, again, other = (spectral_density(H, steps=5, probes=1, seed=seed) for seed in (0, 0, 1))
    density = spectral_density(H, steps=5, probes=1, sigma=0.05, points=300)
    assert automatic.sigma == pytest.approx(0.01 * np.ptp(automatic.nodes))
    assert (density.sigma, density.grid.shape, automatic.grid.shape) == (0.05, (300,), (1000,))
    bumps = [
        w * scipy.stats.norm(x, 0.05).pdf(density.grid) for x, w in zip(density.nodes, density.weights, strict=True)
    ]
    np.testing.assert_allclose(density.density, sum(bumps), rtol=1e-12)
    np.testing.assert_array_equal(density.density, smoothed(density.grid, density.nodes, density.weights, 0.05))
    assert np.array_equal(again.density, automatic.density)
    assert not np.array_equal(again.nodes, other.nodes)
