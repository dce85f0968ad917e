import numpy as np
import torch

from bsam.flatness import top_eigenvalues
from bsam.flatness.lanczos import Krylov


def assert_orthonormal(V):
    assert float((V @ V.T - torch.eye(len(V), dtype=V.dtype)).abs().max()) < 1e-12


def test_200_steps_without_spurious_copies(dense):
    H, exact = dense
    krylov = Krylov(H, 200, torch.Generator().manual_seed(0))
    krylov.begin()
    for _ in range(200):
        krylov.expand()
    V = krylov.V  # the next one, too
    assert V.shape == (201, 445)
    assert_orthonormal(V)
    torch.testing.assert_close(krylov.T, V[:200] @ exact @ V[:200].T, rtol=0, atol=1e-13)
    theta, S, residuals = krylov.ritz()
    # they converged long ago, and show once each
    torch.testing.assert_close(theta[-20:], torch.linalg.eigvalsh(exact)[-20:], rtol=1e-10, atol=0)
    Y = S.T @ V[:200]
    torch.testing.assert_close(residuals, (Y @ exact - theta[:, None] * Y).norm(dim=1), rtol=0, atol=1e-12)


def test_start_vectors_are_made_orthogonal(dense):
    krylov = Krylov(dense[0], 9, torch.Generator().manual_seed(0))
    krylov.begin()
    for _ in range(5):
        krylov.expand()
    krylov.begin(krylov.V[0] + 1e-8 * dense[0].random(krylov.generator))
    assert_orthonormal(krylov.V[:6])


def test_restarts_keep_eigenvalues_and_an_orthonormal_basis(dense):
    H, exact = dense
    krylov = Krylov(H, 30, torch.Generator().manual_seed(0))
    krylov.begin()
    for _ in range(8):
        while krylov.steps < 30:
            krylov.expand()
        theta, S, _ = krylov.ritz()
        krylov.restart(theta[-10:], S[:, -10:])
        torch.testing.assert_close(torch.diag(krylov.V[:10] @ exact @ krylov.V[:10].T), theta[-10:], rtol=0, atol=1e-13)
    assert_orthonormal(krylov.V[:11])
    torch.testing.assert_close(theta[-1], torch.linalg.eigvalsh(exact)[-1], rtol=1e-12, atol=0)


def test_restart_in_chunks(dense, monkeypatch):
    H, _ = dense
    whole = top_eigenvalues(H, k=5)
    monkeypatch.setattr("bsam.flatness.lanczos.CHUNK", 50)
    np.testing.assert_allclose(top_eigenvalues(H, k=5).values, whole.values, rtol=1e-12)
