import copy
from functools import partial

import numpy as np
import pytest
import scipy.stats
import torch
import torch.nn.functional as F
from torch import nn

import bsam
from bsam.flatness import HessianOperator, spectral_density, spectrum, top_eigenvalues, trace
from bsam.flatness.density import smoothed
from bsam.flatness.lanczos import Krylov

WHICH = ("largest", "magnitude", "both ends")


def wanted(eigenvalues, k, which):
    """The ones asked for, in descending order, from all of them."""
    all_of_them = np.sort(eigenvalues)[::-1]
    if which == "largest":
        return all_of_them[:k]
    if which == "magnitude":
        return np.sort(all_of_them[np.argsort(-np.abs(all_of_them), kind="stable")[:k]])[::-1]
    return np.concatenate([all_of_them[: k - k // 2], all_of_them[len(all_of_them) - k // 2 :]])


def flat(vectors):
    return torch.stack([torch.cat([t.reshape(-1) for t in v.tensors()]) for v in vectors])


def operator(setting, **keywords):
    model, data, exact = setting
    return HessianOperator(model, F.cross_entropy, data, **keywords), exact


def dense(setting, monkeypatch):
    """An operator whose products are those with the dense matrix: they are tested elsewhere, and some tests need
    thousands.
    """
    H, exact = operator(setting)

    def times(v):
        H.products += 1
        return exact @ v

    monkeypatch.setattr(H, "times", times)
    return H, exact


# Eigenvalues.


@pytest.mark.parametrize("which", WHICH)
@pytest.mark.parametrize("net", ["untrained", "trained"])
def test_the_top_20_are_those_of_the_dense_matrix(request, net, which):
    H, exact = operator(request.getfixturevalue(net))
    found = top_eigenvalues(H, k=20, which=which, vectors=True)
    expected = wanted(torch.linalg.eigvalsh(exact).numpy(), 20, which)
    np.testing.assert_allclose(found.values, expected, rtol=1e-6)
    assert found.converged
    assert found.products < H.size  # it is not the dense way in disguise
    Y = flat(found.vectors)
    assert torch.allclose(Y @ Y.T, torch.eye(20, dtype=torch.float64), atol=1e-12)
    residuals = (Y @ exact - torch.as_tensor(found.values.copy())[:, None] * Y).norm(
        dim=1
    )  # anew, from the dense matrix
    np.testing.assert_allclose(found.residuals, residuals, rtol=1e-6, atol=1e-14)
    assert (found.residuals <= 1e-4 * np.abs(found.values)).all()


@pytest.mark.parametrize("which", WHICH)
def test_a_smaller_tolerance_gives_smaller_residuals(untrained, which):
    H, exact = operator(untrained)
    found = top_eigenvalues(H, k=7, which=which, tol=1e-10)
    np.testing.assert_allclose(found.values, wanted(torch.linalg.eigvalsh(exact).numpy(), 7, which), rtol=1e-12)
    assert (found.residuals <= 1e-10 * np.abs(found.values)).all()
    assert found.converged


class Copies(nn.Module):
    def __init__(self, model, n):
        super().__init__()
        self.models = nn.ModuleList(copy.deepcopy(model) for _ in range(n))

    def forward(self, x):
        return torch.stack([model(x) for model in self.models])


@pytest.mark.parametrize("which", WHICH)
def test_three_networks_side_by_side_have_every_eigenvalue_three_times(untrained, nets, which):
    _, data, _ = untrained
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 7), nn.Tanh(), nn.Linear(7, 5)).double()
    exact = nets["exact"](model, F.cross_entropy, data)
    H = HessianOperator(Copies(model, 3), lambda out, y: sum(F.cross_entropy(own, y) for own in out), data)
    found = top_eigenvalues(H, k=20, which=which)  # the last of them without all of its copies
    np.testing.assert_allclose(
        found.values, wanted(np.repeat(torch.linalg.eigvalsh(exact).numpy(), 3), 20, which), rtol=1e-6
    )
    assert found.converged


SPECTRA = {
    "five times the largest": [5.0] * 5 + list(np.linspace(4, 1, 20)) + list(np.linspace(0.9, -0.5, 175)),
    "five times across the last one wanted": list(np.linspace(4, 2, 17))
    + [1.5] * 5
    + list(np.linspace(1.4, -0.5, 178)),
    "five times next to a dense bulk": list(np.linspace(4, 2, 12)) + [1.5] * 5 + list(np.linspace(1.49, -0.5, 183)),
    "negative ones": [-5.0] * 3 + list(np.linspace(-4, -1, 20)) + [1.0] * 2 + list(np.linspace(0.9, -0.9, 175)),
    "fewer than wanted, the rest 0": list(np.linspace(4, 1, 10)) + [0.0] * 190,
    "one value ten times, the rest 0": [2.0] * 10 + [0.0] * 190,
    "the identity": [1.0] * 120,
    "nothing but 0": [0.0] * 120,
    "of all sizes": list(10.0 ** -np.arange(0, 5, 0.25)) + list(-(10.0 ** -np.arange(0.1, 5, 0.25))) + [0.0] * 100,
}


@pytest.mark.parametrize("which", WHICH)
@pytest.mark.parametrize("eigenvalues", SPECTRA.values(), ids=SPECTRA)
def test_multiplicities_are_right_and_nothing_is_found_twice(with_spectrum, eigenvalues, which):
    H, _ = with_spectrum(eigenvalues)
    expected = wanted(np.array(eigenvalues), 20, which)
    for seed in range(2 if which == "largest" else 1):
        found = top_eigenvalues(H, k=20, which=which, seed=seed)
        np.testing.assert_allclose(
            found.values, expected, rtol=1e-6, atol=1e-9
        )  # the latter for what is 0, beside values of 1 and more
        assert found.converged
        assert found.products < 1000


@pytest.mark.parametrize("which", WHICH)
def test_all_residuals_are_within_the_tolerance_after_rounds_across(with_spectrum, which):
    # Each round across what was found forgets where its residuals pointed to, so they have to be small enough before; 0
    # is among the wanted ones.
    H, _ = with_spectrum(np.repeat(np.linspace(0, 1, 150), 2))
    for seed in range(12 if which == "largest" else 2):
        found = top_eigenvalues(H, k=20, which=which, seed=seed, tol=1e-2 if which == "largest" else 1e-4)
        assert found.converged
        np.testing.assert_allclose(found.values, wanted(np.repeat(np.linspace(0, 1, 150), 2), 20, which), atol=1e-3)


def test_200_steps_keep_the_basis_orthonormal_and_show_no_ghosts(untrained):
    H, exact = operator(untrained)
    krylov = Krylov(H, 200, torch.Generator().manual_seed(0))
    krylov.begin()
    for _ in range(200):
        krylov.expand()
    V = krylov.V  # the next one, too
    assert V.shape == (201, 445)
    assert float((V @ V.T - torch.eye(201, dtype=torch.float64)).abs().max()) < 1e-12
    torch.testing.assert_close(krylov.T, V[:200] @ exact @ V[:200].T, rtol=0, atol=1e-13)
    theta, S, left = krylov.ritz()
    eigenvalues = torch.linalg.eigvalsh(exact)
    torch.testing.assert_close(
        theta[-20:], eigenvalues[-20:], rtol=1e-10, atol=0
    )  # they converged long ago, and show once each
    Y = S.T @ V[:200]
    torch.testing.assert_close(left, (Y @ exact - theta[:, None] * Y).norm(dim=1), rtol=0, atol=1e-12)


def test_restarts_keep_what_was_found_and_the_basis_orthonormal(untrained, monkeypatch):
    H, exact = dense(untrained, monkeypatch)
    krylov = Krylov(H, 30, torch.Generator().manual_seed(0))
    krylov.begin()
    for _ in range(8):
        while krylov.steps < 30:
            krylov.expand()
        theta, S, _ = krylov.ritz()
        krylov.restart(theta[-10:], S[:, -10:])
        torch.testing.assert_close(torch.diag(krylov.V[:10] @ exact @ krylov.V[:10].T), theta[-10:], rtol=0, atol=1e-13)
    V = krylov.V[:11]
    assert float((V @ V.T - torch.eye(11, dtype=torch.float64)).abs().max()) < 1e-12
    torch.testing.assert_close(theta[-1], torch.linalg.eigvalsh(exact)[-1], rtol=1e-12, atol=0)


def test_a_restart_in_pieces_is_the_same(untrained, monkeypatch):
    H, _ = operator(untrained)
    whole = top_eigenvalues(H, k=5)
    monkeypatch.setattr("bsam.flatness.lanczos.CHUNK", 50)
    np.testing.assert_allclose(top_eigenvalues(H, k=5).values, whole.values, rtol=1e-12)


@pytest.mark.parametrize("k", [150, 444, 445, 1000])
def test_many_and_all(untrained, monkeypatch, k):
    H, exact = dense(untrained, monkeypatch)
    found = top_eigenvalues(H, k=k)
    expected = torch.linalg.eigvalsh(exact).numpy()[::-1][:k]
    scale = np.abs(expected).max()
    np.testing.assert_allclose(found.values, expected, rtol=1e-6, atol=1e-8 * scale)
    assert found.converged


@pytest.mark.parametrize("which", WHICH)
@pytest.mark.parametrize("k", [1, 2, 5])
def test_tiny_matrices(with_spectrum, which, k):
    for eigenvalues in ([3.0], [0.0], [-2.0, 1.0], [4.0, 4.0, -1.0]):
        H, _ = with_spectrum(eigenvalues)
        found = top_eigenvalues(H, k=k, which=which)
        np.testing.assert_allclose(
            found.values, wanted(np.array(eigenvalues), min(k, len(eigenvalues)), which), atol=1e-12
        )
        assert found.converged


def test_float32(nets):
    model, data = nets["made"](nets["mlp"], dtype=torch.float32)
    found = top_eigenvalues(HessianOperator(model, F.cross_entropy, data), k=10)
    expected = np.linalg.eigvalsh(nets["exact"](model, F.cross_entropy, data).numpy())[::-1][:10]
    np.testing.assert_allclose(found.values, expected, rtol=1e-5)
    assert found.converged
    exactly = top_eigenvalues(HessianOperator(model, F.cross_entropy, data, dtype=torch.float64), k=10, tol=1e-8)
    np.testing.assert_allclose(exactly.values, expected, rtol=1e-9)
    assert top_eigenvalues(
        HessianOperator(model, F.cross_entropy, data), k=3, tol=0
    ).converged  # as good as the precision allows


def test_what_float32_cannot_resolve_is_not_called_converged_to_the_tolerance(with_spectrum):
    eigenvalues = 10 * 0.85 ** np.arange(60)
    H, _ = with_spectrum(np.concatenate([eigenvalues, np.linspace(-1e-4, 1e-4, 240)]), torch.float32)
    found = top_eigenvalues(H, k=50)
    epsilon = torch.finfo(torch.float32).eps
    assert found.converged
    assert (
        found.residuals <= np.maximum(1e-4 * found.values, 10 * epsilon * found.values[0])
    ).all()  # 1.2e-5: five digits of the smallest
    np.testing.assert_allclose(found.values, eigenvalues[:50], rtol=2e-5, atol=2e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("which", ["largest", "both ends"])
def test_a_wanted_0_converges(with_spectrum, which, dtype):
    H, _ = with_spectrum(list(np.linspace(4, 1, 10)) + [0.0] * 190, dtype)
    found = top_eigenvalues(H, k=20, which=which)
    assert found.converged
    assert np.abs(found.values[10:]).max() <= 10 * torch.finfo(dtype).eps * 4


def test_numpy_integers_are_whole_numbers(untrained):
    H, _ = operator(untrained)
    assert np.array_equal(
        top_eigenvalues(H, k=np.int64(3), seed=np.int32(1)).values, top_eigenvalues(H, k=3, seed=1).values
    )
    for wrong in (True, np.True_, np.float64(3.0), 3.0):
        with pytest.raises(bsam.BsamError, match="k must be a whole number"):
            top_eigenvalues(H, k=wrong)


def test_the_seed_alone_decides(untrained):
    H, _ = operator(untrained)
    first, again, other = (top_eigenvalues(H, k=5, seed=seed) for seed in (1, 1, 2))
    assert np.array_equal(first.values, again.values)
    assert np.array_equal(first.residuals, again.residuals)
    assert not np.array_equal(first.residuals, other.residuals)
    np.testing.assert_allclose(first.values, other.values, rtol=1e-6)
    with torch.random.fork_rng():
        torch.manual_seed(123)
        assert np.array_equal(top_eigenvalues(H, k=5, seed=1).values, first.values)


def test_products_are_counted_and_reported(untrained):
    model, data, _ = untrained
    passes, calls = [], []

    model = copy.deepcopy(model)
    model.register_forward_pre_hook(lambda module, inputs: passes.append(1))
    H = HessianOperator(model, F.cross_entropy, data)
    for measure in (
        lambda: top_eigenvalues(H, k=4, progress=lambda *call: calls.append(call)),
        lambda: trace(H, samples=9, progress=lambda *call: calls.append(call)),
        lambda: trace(H, samples=5, method="hutchinson", progress=lambda *call: calls.append(call)),
        lambda: spectral_density(H, steps=4, probes=3, progress=lambda *call: calls.append(call)),
    ):
        passes.clear()
        calls.clear()
        found = measure()
        assert found.products == len(passes) / 3  # batches
        assert [done for done, _ in calls] == list(range(1, found.products + 1))
        assert all(done <= expected for done, expected in calls)
        assert calls[-1] == (found.products, found.products)
    assert top_eigenvalues(H, k=4).vectors is None


def test_what_did_not_converge_says_so(untrained, monkeypatch):
    H, exact = operator(untrained)
    monkeypatch.setattr(spectrum, "MAX_CYCLES", 1)
    found = top_eigenvalues(H, k=20, tol=1e-8, vectors=True)
    assert not found.converged
    assert found.products == 40 + 20
    Y = flat(found.vectors)
    torch.testing.assert_close(Y @ Y.T, torch.eye(20, dtype=torch.float64), rtol=0, atol=1e-12)
    residuals = (Y @ exact - torch.as_tensor(found.values.copy())[:, None] * Y).norm(dim=1)
    np.testing.assert_allclose(found.residuals, residuals, rtol=1e-6, atol=1e-14)
    assert (found.residuals > 1e-8 * np.abs(found.values)).any()
    assert found.values[0] == pytest.approx(float(torch.linalg.eigvalsh(exact)[-1]), rel=1e-3)  # what there is of it


def test_a_noisy_operator_does_not_pass_the_check(untrained, monkeypatch):
    H, _ = operator(untrained)
    times, noise = H.times, torch.Generator().manual_seed(0)
    monkeypatch.setattr(H, "times", lambda v: times(v) + 1e-4 * torch.randn(v.shape, dtype=v.dtype, generator=noise))
    monkeypatch.setattr(spectrum, "MAX_CYCLES", 2)
    assert not top_eigenvalues(H, k=3).converged


def test_an_interrupt_in_the_middle_leaves_the_model_as_it_was(nets, unchanged):
    model, data = nets["made"](nets["batch norm"])
    H = HessianOperator(model, F.cross_entropy, data, mode="train")

    def interrupt(done, expected):
        if done == 7:
            raise KeyboardInterrupt

    for measure in (top_eigenvalues, trace, spectral_density):
        with unchanged(model), pytest.raises(KeyboardInterrupt):
            measure(H, progress=interrupt)


def test_a_loss_that_is_not_finite_is_refused():
    model = nn.Linear(3, 2)
    H = HessianOperator(model, lambda out, y: (out * float("inf")).mean() ** 2, [(torch.ones(4, 3), torch.zeros(4))])
    for measure in (top_eigenvalues, spectral_density, trace, partial(trace, method="hutchinson")):
        with pytest.raises(bsam.BsamError, match="not finite"):
            measure(H)


@pytest.mark.parametrize(
    ("measure", "arguments", "message"),
    [
        (
            top_eigenvalues,
            {"which": "smallest"},
            "which must be one of 'largest', 'magnitude', 'both ends'; got 'smallest'",
        ),
        (top_eigenvalues, {"k": 0}, "k must be a whole number of at least 1"),
        (top_eigenvalues, {"k": 2.5}, "k must be a whole number"),
        (top_eigenvalues, {"tol": -1.0}, "tol must be a finite number of at least 0"),
        (top_eigenvalues, {"seed": -1}, "seed must be a whole number of at least 0"),
        (trace, {"method": "exact"}, '"hutch\\+\\+" or "hutchinson", got \'exact\''),
        (trace, {"samples": 5}, "samples must be a whole number of at least 6"),
        (trace, {"samples": 1, "method": "hutchinson"}, "samples must be a whole number of at least 2"),
        (spectral_density, {"steps": 0}, "steps must be"),
        (spectral_density, {"probes": 0}, "probes must be"),
        (spectral_density, {"points": 1}, "points must be"),
        (spectral_density, {"sigma": 0}, "sigma must be above 0"),
        (spectral_density, {"sigma": -1.0}, "sigma must be"),
        (spectral_density, {"steps": 5, "sigma": 1e-6}, "raise points or sigma"),
    ],
)
def test_refusals(untrained, measure, arguments, message):
    H, _ = operator(untrained)
    with pytest.raises(bsam.BsamError, match=message):
        measure(H, **arguments)


# Trace.


@pytest.mark.parametrize("net", ["untrained", "trained"])
@pytest.mark.parametrize("method", ["hutchinson", "hutch++"])
def test_the_trace_is_within_three_standard_errors_at_the_rate_of_the_t_distribution(request, monkeypatch, method, net):
    H, matrix = dense(request.getfixturevalue(net), monkeypatch)
    exact = float(matrix.trace())
    found = [trace(H, samples=30, seed=seed, method=method) for seed in range(50)]
    assert all(estimate.products == 30 for estimate in found)
    t = np.array([(estimate.value - exact) / estimate.standard_error for estimate in found])
    freedom = 29 if method == "hutchinson" else 9  # the samples that the error is taken from, less one
    rate = 2 * scipy.stats.t.sf(3, freedom)
    assert (np.abs(t) > 3).sum() <= scipy.stats.binom.ppf(0.999, 50, rate)
    errors, stated = (
        np.sqrt(np.mean(np.square(numbers)))
        for numbers in zip(*((e.value - exact, e.standard_error) for e in found), strict=True)
    )
    assert 0.7 < errors / stated < 1.4  # nor are the errors stated too large


def test_few_large_eigenvalues_are_what_hutch_plus_plus_is_for(trained, monkeypatch):
    # Why it is the default at 30 samples: of networks of 1,000 parameters trained on digits its error is a third to a
    # half of Hutchinson's, and of untrained
    # ones half as much again; this one, of 445 and 24 samples, lies between.
    H, _ = dense(trained, monkeypatch)
    errors = {
        method: np.mean([trace(H, seed=seed, method=method).standard_error for seed in range(20)])
        for method in ("hutchinson", "hutch++")
    }
    assert errors["hutch++"] < 0.9 * errors["hutchinson"]
    default = trace(H, samples=30, seed=3)
    assert default == trace(H, seed=3) == trace(H, seed=3, method="hutch++")
    assert default != trace(H, seed=4)


def test_the_trace_is_exact_where_the_sketch_holds_the_matrix(with_spectrum):
    H, _ = with_spectrum([3.0, -2.0, 1.0] + [0.0] * 60)
    found = trace(H, samples=12)
    assert found.value == pytest.approx(2.0, abs=1e-12)
    assert found.standard_error < 1e-12
    for eigenvalues in ([0.0] * 5, [2.0]):  # a sketch of nothing, and one of more than there is
        found = trace(with_spectrum(eigenvalues)[0], samples=9)
        assert found.value == pytest.approx(sum(eigenvalues), abs=1e-12)


@pytest.mark.parametrize("method", ["hutchinson", "hutch++"])
def test_the_error_counts_the_rounding_where_nothing_else_is_left(with_spectrum, method):
    # The sketch holds the whole of the first matrix; every sign vector gives the trace of the second one.
    eigenvalues = [3.0, 2.0, 1.0] + [0.0] * 60 if method == "hutch++" else [1.7] * 63
    H, A = with_spectrum(eigenvalues, torch.float32)
    found = [trace(H, samples=12, seed=seed, method=method) for seed in range(20)]
    errors = np.array([abs(estimate.value - float(A.trace())) / estimate.standard_error for estimate in found])
    assert errors.max() < 5
    assert all(estimate.standard_error >= torch.finfo(torch.float32).eps * sum(eigenvalues) * 0.9 for estimate in found)
    assert all(estimate.standard_error < 1e-5 * sum(eigenvalues) for estimate in found)


@pytest.mark.parametrize("method", ["hutchinson", "hutch++"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_in_half_precision_has_a_trace(with_spectrum, dtype, method):
    H, A = with_spectrum([9.0, 5.0, 2.0] + [0.1] * 60, dtype)
    found = [trace(H, samples=30, seed=seed, method=method) for seed in range(20)]
    errors = np.array([(estimate.value - float(A.trace())) / estimate.standard_error for estimate in found])
    assert (np.abs(errors) > 4).sum() <= 1
    assert np.mean([estimate.value for estimate in found]) == pytest.approx(float(A.trace()), rel=0.03)


# Density.


def test_the_density_is_a_density_with_the_right_moments(untrained, monkeypatch):
    H, exact = dense(untrained, monkeypatch)
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
        expected = (eigenvalues**power).mean()
        assert abs(moments.mean() - expected) < 3.5 * error
        assert error < 0.1 * abs(
            (np.abs(eigenvalues) ** power).mean()
        )  # small enough for the comparison to say something
    mean = np.trapezoid(found.density * found.grid, found.grid)
    assert mean == pytest.approx((found.weights * found.nodes).sum(), abs=1e-8)


def test_the_quadrature_is_exact_with_as_many_steps_as_there_are_dimensions(untrained, monkeypatch):
    H, exact = dense(untrained, monkeypatch)
    found = spectral_density(H, steps=1000, probes=1, seed=5)
    values, vectors = torch.linalg.eigh(exact)
    np.testing.assert_allclose(np.sort(found.nodes), values, atol=1e-12)
    z = H.random(torch.Generator().manual_seed(5), "signs")
    assert set(z.tolist()) == {-1.0, 1.0}
    expected = ((vectors.T @ z) ** 2 * torch.exp(values)).sum() / H.size  # z exp(H) z / |z|^2
    assert float((found.weights * np.exp(found.nodes)).sum()) == pytest.approx(float(expected), rel=1e-12)


def test_each_quadrature_has_the_moments_of_its_own_probe(untrained):
    H, exact = operator(untrained)
    found = spectral_density(H, steps=3, probes=2, seed=2)
    generator = torch.Generator().manual_seed(2)
    for probe in range(2):
        z = H.random(generator, "signs")
        nodes, weights = found.nodes[3 * probe : 3 * probe + 3], found.weights[3 * probe : 3 * probe + 3] * 2
        for power in range(6):  # three nodes: exact up to the fifth
            expected = z @ torch.linalg.matrix_power(exact, power) @ z / H.size
            assert (weights * nodes**power).sum() == pytest.approx(float(expected), rel=1e-9)


@pytest.mark.parametrize("eigenvalues", [[0.0] * 40, [1e6] * 40, [2.0] * 20 + [-1.0] * 20])
def test_multiple_eigenvalues_weigh_what_they_should(with_spectrum, eigenvalues):
    found = spectral_density(with_spectrum(eigenvalues)[0], steps=10, probes=40)
    assert np.trapezoid(found.density, found.grid) == pytest.approx(1.0, abs=1e-3)
    assert (found.weights * found.nodes).sum() == pytest.approx(
        np.mean(eigenvalues), abs=0.25 if len(set(eigenvalues)) > 1 else 1e-6
    )


def test_the_width_of_the_gaussian_may_be_chosen(untrained):
    H, _ = operator(untrained)
    automatic, found = (
        spectral_density(H, steps=5, probes=1),
        spectral_density(H, steps=5, probes=1, sigma=0.05, points=300),
    )
    assert automatic.sigma == pytest.approx(0.01 * np.ptp(automatic.nodes))
    assert (found.sigma, found.grid.shape, automatic.grid.shape) == (0.05, (300,), (1000,))
    bumps = [w * scipy.stats.norm(x, 0.05).pdf(found.grid) for x, w in zip(found.nodes, found.weights, strict=True)]
    np.testing.assert_allclose(found.density, sum(bumps), rtol=1e-12)
    np.testing.assert_array_equal(found.density, smoothed(found.grid, found.nodes, found.weights, 0.05))
    again, other = spectral_density(H, steps=5, probes=1), spectral_density(H, steps=5, probes=1, seed=1)
    assert np.array_equal(again.density, automatic.density)
    assert not np.array_equal(again.nodes, other.nodes)
