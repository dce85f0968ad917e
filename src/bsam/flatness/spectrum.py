"""Eigenvalues of a Hessian, computed from products only."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ..common.checks import check_count, check_number
from ..common.errors import BsamValueError
from ..core.vector import Vector
from .hessian import HessianOperator
from .lanczos import Krylov
from .products import Array, Progress, after_products, no_progress, seeded_generator

WHICH = ("largest", "magnitude", "both ends")
MAX_CYCLES = 60  # the search ends after this many products per vector of the basis
MIN_STEPS = 8  # products in each round of the search before its result counts
MISSED = 0.01  # probability of missing an eigenvalue: that of a component of a random unit vector below 0.01 / sqrt(n)
ROUNDING = 10.0  # machine epsilons, relative to |H|: residuals cannot get smaller
NEGLIGIBLE = 1e-10  # relative to |H|: residuals this small are accepted for eigenvalues near 0


@dataclass(frozen=True)
class Eigenvalues:
    """Some eigenvalues, in descending order.

    ``residuals`` are ``|H y - value y|`` for unit vectors ``y``, computed with one product each. ``converged`` is True
    if each is at most ``tol * |value|``, or 10 machine epsilons (at least 1e-10) times ``|H|``, and a search from a
    random vector, orthogonal to all ``y``, has shown that with a probability of 99 % no eigenvalue is missing.
    """

    values: Array
    residuals: Array
    converged: np.bool_
    products: int
    vectors: tuple[Vector, ...] | None = None
    note: str = ""  #: how many batches were computed without a recording, and why (see HessianOperator.linearized)

    def __repr__(self) -> str:
        converged = "converged" if self.converged else "not converged"
        ends = f"{self.values[0]:.4g} to {self.values[-1]:.4g}"
        return f"Eigenvalues({len(self.values)} from {ends}, {converged}, {after_products(self.products, self.note)})"


def top_eigenvalues(
    H: HessianOperator,
    k: int = 50,
    which: str = "largest",
    tol: float = 1e-4,
    seed: int = 0,
    *,
    vectors: bool = False,
    progress: Progress | None = None,
) -> Eigenvalues:
    r"""Compute ``k`` eigenvalues at the ends of the spectrum with thick-restart Lanczos and full reorthogonalisation.

    A pair has converged when :math:`|H y - \theta y|` is at most :math:`tol\, |\theta|` or
    :math:`\max(10\, \epsilon, 10^{-10})\, |H|`, whichever is larger, with the machine epsilon :math:`\epsilon`. So
    eigenvalues much smaller than the largest one have fewer correct digits than ``tol`` asks for, especially in
    float32. One start vector finds only one copy of a multiple eigenvalue, so when all pairs have converged, the search
    continues from a random vector orthogonal to them. It ends when this vector would have led to any missing eigenvalue
    beyond the last wanted one with a probability of 99 %. If the search runs out of products before that, ``converged``
    is False. Memory: about ``1.5 * k`` vectors (``k + 21`` for small
    ``k``), and ``k`` more at the end if ``vectors`` is True.

    Args:
        H: the operator.
        k: number of eigenvalues.
        which: ``"largest"``, ``"magnitude"``, or ``"both ends"`` (half of them the largest, half the smallest).
        tol: tolerance for the residuals, relative to the eigenvalue.
        seed: seed of the start vector.
        vectors: whether to return the eigenvectors too.
        progress: called after each product with the number done and the number expected.

    Example:
        >>> model = torch.nn.Linear(3, 1, bias=False)
        >>> data = [(torch.diag(torch.tensor([1.0, 2.0, 3.0])), torch.zeros(3, 1))]
        >>> H = HessianOperator(model, torch.nn.functional.mse_loss, data)
        >>> (top_eigenvalues(H, k=2).values * 3 / 2).round(4)
        array([9., 4.])

    Reference:
        Wu, Simon, "Thick-restart Lanczos method for large symmetric eigenvalue problems", SIAM J. Matrix Anal. Appl. 22
        (2000).
    """
    k = min(check_count("k", k), H.size)
    check_number("tol", tol, low=0)
    check_which(which)
    krylov = Krylov(H, k + max(20, k // 2), seeded_generator(seed))
    with H.linearized() as recording:
        eigenvalues = _search(krylov, k, which, tol, vectors, progress or no_progress)
    return replace(eigenvalues, note=recording.note)


def check_which(which: str) -> None:
    """Raise if ``which`` is invalid."""
    if which not in WHICH:
        raise BsamValueError(f"which must be one of {', '.join(map(repr, WHICH))}; got {which!r}")


def _search(krylov: Krylov, k: int, which: str, tol: float, vectors: bool, report: Progress) -> Eigenvalues:
    H = krylov.H
    before = H.products
    previous = None  # the result of the previous round
    steps = 0  # of this round
    bound, start = torch.ones(1), 0  # the bound before the last restart, and the index of the vector that came next
    krylov.begin()
    while True:
        krylov.expand()
        done = H.products - before
        report(done, max(done + k, 3 * k + krylov.max_steps))
        if krylov.steps < k:
            continue
        theta, S, residuals = krylov.ritz()
        order = _rank(theta, which)
        chosen = order[:k]
        if krylov.steps == H.size or done >= MAX_CYCLES * krylov.max_steps:
            break
        steps += 1
        allowed = _tolerance(theta[chosen], theta, tol, H)
        settled = bool((residuals[chosen] <= allowed / 2).all()) and steps >= MIN_STEPS
        settled = settled and _is_separated(theta, residuals, k, which, tol, H)
        same = previous is not None and bool(((theta[chosen] - previous).abs() <= allowed).all())
        if settled and not same:
            previous = theta[chosen]
            steps = 0
            bound, start = torch.ones(1), k
            krylov.restart(previous, S[:, chosen])
            krylov.begin()  # missing copies have a component orthogonal to the vectors so far
        elif settled and float((bound * _bound(krylov, theta, k, which, tol, start)).max()) <= MISSED / H.size**0.5:
            break
        elif krylov.steps == krylov.max_steps:
            best = order[: k + (krylov.max_steps - k) // 2]
            if previous is not None:
                bound, start = bound * _bound(krylov, theta, k, which, tol, start), len(best)
            krylov.restart(theta[best], S[:, best])
    complete = krylov.steps == H.size or done < MAX_CYCLES * krylov.max_steps
    krylov.restart(theta[chosen], S[:, chosen])
    return _verify(krylov, theta, tol, before, vectors, report, complete)


def _bound(krylov: Krylov, theta: Tensor, k: int, which: str, tol: float, start: int) -> Tensor:
    r"""Bound the component of a missed eigenvector ``y`` in the vector ``v`` at ``start``, at each end of the spectrum.

    Without the first ``k`` vectors, the basis satisfies :math:`H V = V B + \beta\, w e^T`, with the unit vector ``w``
    that comes next. So :math:`y^T v = (y^T w)\, \beta\, e^T (\mu - B)^{-1} e_v` for an eigenvalue :math:`\mu`, and
    :math:`|y^T w| \le 1`. Eigenvalues of ``B`` that have converged are not missed; they are left out.
    """
    xi, U = torch.linalg.eigh(krylov.T[k : krylov.steps, k : krylov.steps])
    residuals = krylov.beta * U[-1]
    missing = residuals.abs() > _tolerance(xi, theta, tol, krylov.H) / 2
    distances = _last_wanted(theta, k, which)[:, None] - xi[missing]
    return ((residuals * U[start - k])[missing] / distances).sum(dim=1).abs()


def _last_wanted(theta: Tensor, k: int, which: str) -> Tensor:
    """Return the last wanted value at each end of the spectrum; ``theta`` must be ascending."""
    if which == "largest":
        return theta[-k].reshape(1)
    if which == "magnitude":
        size = theta.abs().sort(descending=True).values[k - 1]
        return torch.stack([size, -size])
    largest, smallest = k - k // 2, k // 2
    return torch.cat([theta[-largest].reshape(1), theta[smallest - 1 : smallest]])


def _rank(theta: Tensor, which: str) -> Tensor:
    """Return the indices of the Ritz values from the most to the least wanted; ``theta`` must be ascending."""
    if which == "magnitude":
        return theta.abs().argsort(descending=True)
    descending = torch.arange(len(theta)).flip(0)
    if which == "largest":
        return descending
    # the largest, the smallest, the second largest ...
    return torch.stack([descending, descending.flip(0)], dim=1).reshape(-1)[: len(theta)]


def _is_separated(theta: Tensor, residuals: Tensor, k: int, which: str, tol: float, H: HessianOperator) -> bool:
    """Return whether the best unwanted value has converged or is clearly worse than the wanted ones."""
    sides = {
        "largest": [(theta, k)],
        "magnitude": [(theta.abs(), k)],
        "both ends": [(theta, k - k // 2), (-theta, k // 2)],
    }
    for key, wanted in sides[which]:
        if not 0 < wanted < len(theta):
            continue  # none or all are wanted at this end
        last, best = key.argsort(descending=True)[wanted - 1 : wanted + 1]
        if key[best] + residuals[best] >= key[last] and residuals[best] > _tolerance(theta[best], theta, tol, H):
            return False
    return True


def _verify(
    krylov: Krylov, theta: Tensor, tol: float, before: int, vectors: bool, report: Progress, complete: bool
) -> Eigenvalues:
    """Compute values and residuals with one product per basis vector: the recurrence only estimates them."""
    H, Y = krylov.H, krylov.V[: krylov.steps]
    values, residuals = np.empty(len(Y)), np.empty(len(Y))
    expected = H.products - before + len(Y)
    for i, y in enumerate(Y):
        Hy = H.times(y)
        value = torch.dot(y, Hy)
        values[i], residuals[i] = float(value), float((Hy - value * y).norm())
        report(H.products - before, expected)
    order = np.argsort(values)[::-1]
    values, residuals = values[order], residuals[order]
    converged = np.all(residuals <= _tolerance(torch.tensor(values), theta, tol, H).numpy()) & np.bool_(complete)
    eigenvectors = tuple(H.vector(Y[i].clone()) for i in order) if vectors else None
    return Eigenvalues(values, residuals, converged, H.products - before, eigenvectors)


def _tolerance(values: Tensor, theta: Tensor, tol: float, H: HessianOperator) -> Tensor:
    """Return the largest residuals at which ``values`` count as converged; ``theta`` holds all Ritz values."""
    floor = max(ROUNDING * torch.finfo(H.dtype).eps, NEGLIGIBLE) * theta.abs().max()
    return torch.clamp(tol * values.abs(), min=float(floor))
