"""Eigenvalues of a Hessian, from products alone."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ..core.checks import check_count, check_number
from ..core.errors import BsamValueError
from ..core.vector import Vector
from .hessian import HessianOperator
from .lanczos import Krylov
from .products import Array, Progress, seeded

WHICH = ("largest", "magnitude", "both ends")
MAX_CYCLES = 60  # times the room of the basis: products after which what is not there yet is called not converged
ACROSS = 8  # products across what seems to be all, at least, before it is believed
ROUNDING = 10.0  # machine epsilons, times |H|: no residual can be asked to be smaller
# times |H|: nor is it where eigenvalues near 0 meet larger ones whose residuals are as large as the tolerance lets them
# be
NEGLIGIBLE = 1e-10


@dataclass(frozen=True)
class Eigenvalues:
    """Some eigenvalues, in descending order."""

    values: Array
    residuals: Array  # |H y - value y| for unit vectors y, from a product with each: no estimate
    # whether every residual is within tol * |value|, or below the floor of 10 machine epsilons (at least 1e-10) times
    # the largest |value|
    converged: np.bool_
    products: int
    vectors: tuple[Vector, ...] | None = None
    note: str = ""  # what was computed without a recording, and why: see HessianOperator.linearized


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
    r"""The ``k`` eigenvalues at one end of the spectrum, by thick-restart Lanczos with full reorthogonalisation.

    A pair counts as converged when :math:`|H y - \theta y| \le tol\, |\theta|`, or
    :math:`\max(10\, \epsilon, 10^{-10})\, |H|` with the machine epsilon where
    that is more: eigenvalues that are small beside the largest one are then known to fewer digits than ``tol`` asks
        for, in float32 above all.
    One start vector sees one copy of a multiple eigenvalue, so when all seem to be found the search goes on from a
    random vector across them, until nothing new turns up (in time, or ``converged`` is False). Memory: about 1.5 k
    vectors (k + 21 for small k), and k more at the end if ``vectors`` are wanted.

    Args:
        H: the operator.
        k: how many.
        which: ``"largest"``, ``"magnitude"``, or ``"both ends"`` (half of them the largest, half the smallest).
        tol: of the residuals, relative to the eigenvalue.
        seed: of the start vector.
        vectors: whether to return the eigenvectors, too.
        progress: called after each product with the number done and the number expected.

    Example:
        >>> model = torch.nn.Linear(3, 1, bias=False)
        >>> data = [(torch.diag(torch.tensor([1.0, 2.0, 3.0])), torch.zeros(3, 1))]
        >>> H = HessianOperator(model, torch.nn.functional.mse_loss, data)
        >>> (top_eigenvalues(H, k=2).values * 3 / 2).round(4)
        array([9., 4.])

    Reference: Wu, Simon, "Thick-restart Lanczos method for large symmetric eigenvalue problems", SIAM J. Matrix Anal.
        Appl. 22 (2000).
    """
    k = min(check_count("k", k), H.size)
    check_number("tol", tol, low=0)
    if which not in WHICH:
        raise BsamValueError(f"which must be one of {', '.join(map(repr, WHICH))}; got {which!r}")
    with H.linearized() as recording:
        return replace(_top(H, k, which, tol, seed, vectors, progress), note=recording.note)


def _top(
    H: HessianOperator, k: int, which: str, tol: float, seed: int, vectors: bool, progress: Progress | None
) -> Eigenvalues:
    krylov = Krylov(H, k + max(20, k // 2), seeded(seed))
    before, found, across = H.products, None, 0
    krylov.begin()
    while True:
        krylov.expand()
        if progress is not None:
            done = H.products - before
            progress(done, max(done + k, 3 * k + krylov.room))
        full = krylov.steps == krylov.room
        if krylov.steps < k:
            continue
        theta, S, left = krylov.ritz()
        order = _wanted(theta, which)
        chosen = order[:k]
        if krylov.steps == H.size or H.products - before >= MAX_CYCLES * krylov.room:
            break
        across += 1
        allowed = _allowed(theta[chosen], theta, tol, H)
        if bool((left[chosen] <= allowed / 2).all()) and across >= ACROSS and _settled(theta, left, k, which, tol, H):
            if found is not None and bool(((theta[chosen] - found).abs() <= allowed).all()):
                break
            found, across = theta[chosen], 0
            krylov.restart(found, S[:, chosen])
            krylov.begin()  # across them: what is missing has a component there
        elif full:
            kept = order[: k + (krylov.room - k) // 2]
            krylov.restart(theta[kept], S[:, kept])
    krylov.restart(theta[chosen], S[:, chosen])
    return _checked(H, krylov, theta, tol, before, vectors, progress)


def _settled(theta: Tensor, left: Tensor, k: int, which: str, tol: float, H: HessianOperator) -> bool:
    """Whether the best value that is not wanted is known so well that it stays so: by its distance from the wanted
    ones, or for itself.
    """
    sides = {
        "largest": [(theta, k)],
        "magnitude": [(theta.abs(), k)],
        "both ends": [(theta, k - k // 2), (-theta, k // 2)],
    }[which]
    for far, wanted in sides:
        if not 0 < wanted < len(theta):
            continue  # nobody wants this side, or everything is wanted
        last, best = far.argsort(descending=True)[wanted - 1 : wanted + 1]
        if far[best] + left[best] >= far[last] and left[best] > _allowed(theta[best], theta, tol, H):
            return False
    return True


def _checked(
    H: HessianOperator, krylov: Krylov, theta: Tensor, tol: float, before: int, vectors: bool, progress: Progress | None
) -> Eigenvalues:
    """Residuals by a product with each vector: what the recurrence says of itself is not a check."""
    Y = krylov.V[: krylov.steps]
    values, residuals = [], []
    expected = H.products - before + len(Y)
    for y in Y:
        Hy = H.times(y)
        value = torch.dot(y, Hy)
        values.append(float(value))
        residuals.append(float((Hy - value * y).norm()))
        if progress is not None:
            progress(H.products - before, expected)
    order = np.argsort(values)[::-1]
    sorted_values, sorted_residuals = np.array(values)[order], np.array(residuals)[order]
    allowed = _allowed(torch.tensor(sorted_values), theta, tol, H).numpy()
    kept = tuple(H.vector(Y[i].clone()) for i in order) if vectors else None
    return Eigenvalues(sorted_values, sorted_residuals, np.all(sorted_residuals <= allowed), H.products - before, kept)


def _wanted(theta: Tensor, which: str) -> Tensor:
    """All values by their rank: the wanted ones first."""
    if which == "magnitude":
        return theta.abs().argsort(descending=True)
    descending = torch.arange(len(theta)).flip(0)
    if which == "largest":
        return descending
    ends = torch.stack([descending, descending.flip(0)], dim=1).reshape(
        -1
    )  # the largest, the smallest, the second largest ...
    return ends[: len(theta)]


def _allowed(values: Tensor, theta: Tensor, tol: float, H: HessianOperator) -> Tensor:
    floor = max(ROUNDING * torch.finfo(H.dtype).eps, NEGLIGIBLE) * theta.abs().max()
    return torch.clamp(tol * values.abs(), min=float(floor))
