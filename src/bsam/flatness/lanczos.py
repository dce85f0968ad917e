"""Lanczos with full reorthogonalisation: no ghost copies of an eigenvalue, whatever the number of steps."""

from __future__ import annotations

import torch
from torch import Tensor

from .hessian import HessianOperator
from .products import finite

CHUNK = 1 << 22  # entries of a vector that are rotated at a time


class Krylov:
    """An orthonormal basis ``V`` that grows by one product at a time, and ``T = V H V^T`` in it.

    Args:
        H: the operator.
        room: vectors that the basis may grow to, and one more.
        generator: of the random numbers.
    """

    def __init__(self, H: HessianOperator, room: int, generator: torch.Generator) -> None:
        self.H, self.room, self.generator = H, min(room, H.size), generator
        self.V = torch.empty(self.room + 1, H.size, dtype=H.dtype, device=H.device)
        self.T = torch.zeros(self.room, self.room, dtype=torch.float64)
        self.steps = 0  # vectors whose products are known
        self.beta = 0.0  # what the last product has outside of the basis

    def begin(self, start: Tensor | None = None) -> None:
        """Let the next vector be ``start``, or a random one, without its components in the basis."""
        v = self.H.random(self.generator) if start is None else start.clone()
        v /= v.norm()
        self._orthogonalise(v, self.steps)
        self.V[self.steps] = v / v.norm()

    def _orthogonalise(self, v: Tensor, n: int) -> Tensor:
        """Take the components along the first ``n`` vectors off ``v``, in place, and return them. Twice is enough, once
        is not.
        """
        V = self.V[:n]
        total = torch.zeros(n, dtype=v.dtype, device=v.device)
        for _ in range(2):
            c = V @ v
            v -= V.T @ c
            total += c
        return total

    def expand(self) -> None:
        """One product more."""
        j = self.steps
        w = self.H.times(self.V[j])
        scale = w.norm()
        c = self._orthogonalise(w, j + 1).double().cpu()
        self.T[j, : j + 1] = c
        self.T[: j + 1, j] = c
        self.steps = j + 1
        self.beta = finite(float(w.norm()))
        if self.beta <= 10 * torch.finfo(w.dtype).eps * float(scale) or self.steps == self.H.size:
            self.beta = 0.0  # the basis is invariant: go on with what it has not seen yet
            if self.steps < self.H.size:
                self.begin()
        else:
            self.V[j + 1] = w / self.beta

    def ritz(self) -> tuple[Tensor, Tensor, Tensor]:
        """Values in ascending order, their vectors in this basis (columns), and what is left of ``H y - theta y``
        outside of it.
        """
        n = self.steps
        theta, S = torch.linalg.eigh(self.T[:n, :n])
        return theta, S, self.beta * S[-1].abs()

    def restart(self, theta: Tensor, S: Tensor) -> None:
        """Keep these Ritz vectors as the basis, and the direction in which it was growing."""
        n, k = self.steps, len(theta)
        rotation = S.T.to(self.V)
        for columns in self.V.split(CHUNK, dim=1):
            columns[:k] = rotation @ columns[:n]
        self.V[k] = self.V[n]
        self.T.zero_()
        self.T[:k, :k] = torch.diag(theta)
        self.steps = k
