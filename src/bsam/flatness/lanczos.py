"""Lanczos with full reorthogonalisation, which keeps spurious copies of eigenvalues from appearing."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .hessian import HessianOperator
from .products import check_finite

CHUNK = 1 << 22  # vector entries that are rotated at a time


@dataclass(eq=False)
class Krylov:
    """An orthonormal basis ``V`` that grows by one vector per product, and the matrix ``T = V H V^T``."""

    H: HessianOperator
    max_steps: int  # the largest number of products before a restart; the basis then has one more vector
    generator: torch.Generator  # for the start vectors
    steps: int = 0  # vectors whose products are known
    beta: float = 0.0  # the norm of the last product's component outside the basis

    def __post_init__(self) -> None:
        H = self.H
        self.max_steps = min(self.max_steps, H.size)
        self.V = torch.empty(self.max_steps + 1, H.size, dtype=H.dtype, device=H.device)
        self.T = torch.zeros(self.max_steps, self.max_steps, dtype=torch.float64)

    def begin(self, start: Tensor | None = None) -> None:
        """Set the next vector to ``start`` (by default a random one), made orthogonal to the basis."""
        v = self.H.random(self.generator) if start is None else start.clone()
        v /= v.norm()
        self._orthogonalise(v, self.steps)
        self.V[self.steps] = v / v.norm()

    def _orthogonalise(self, v: Tensor, n: int) -> Tensor:
        """Subtract the components along the first ``n`` vectors from ``v``, in place, and return them."""
        V = self.V[:n]
        total = torch.zeros(n, dtype=v.dtype, device=v.device)
        for _ in range(2):  # one pass leaves rounding errors; two are enough
            c = V @ v
            v -= V.T @ c
            total += c
        return total

    def expand(self) -> None:
        """Compute one product and extend the basis."""
        j = self.steps
        w = self.H.times(self.V[j])
        scale = w.norm()
        c = self._orthogonalise(w, j + 1).double().cpu()
        self.T[j, : j + 1] = c
        self.T[: j + 1, j] = c
        self.steps = j + 1
        self.beta = check_finite(float(w.norm()))
        if self.beta <= 10 * torch.finfo(w.dtype).eps * float(scale) or self.steps == self.H.size:
            self.beta = 0.0  # the basis is invariant: continue with a random vector orthogonal to it
            if self.steps < self.H.size:
                self.begin()
        else:
            self.V[j + 1] = w / self.beta

    def ritz(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return Ritz values in ascending order, their vectors in this basis (columns), and their residual norms."""
        theta, S = torch.linalg.eigh(self.T[: self.steps, : self.steps])
        return theta, S, self.beta * S[-1].abs()

    def restart(self, theta: Tensor, S: Tensor) -> None:
        """Shrink the basis to these Ritz vectors and the vector that comes next."""
        n, k = self.steps, len(theta)
        rotation = S.T.to(self.V)
        for columns in self.V.split(CHUNK, dim=1):
            columns[:k] = rotation @ columns[:n]
        self.V[k] = self.V[n]
        self.T[:k, :k] = torch.diag(theta)
        self.steps = k
