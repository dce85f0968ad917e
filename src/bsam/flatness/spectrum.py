"""Eigenvalues, trace and spectral density of a Hessian, from products alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ..core.checks import check_count, check_number
from ..core.refusal import Refusal
from ..core.vector import Vector
from .hessian import HessianOperator
from .lanczos import Krylov

Array: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]
Progress: TypeAlias = Callable[[int, int], None]  # products done, and expected in all

WHICH = ("largest", "magnitude", "both ends")
MAX_CYCLES = 60  # times the room of the basis: products after which what is not there yet is called not converged
ACROSS = 8  # products across what seems to be all, at least, before it is believed
ATTAINABLE = 2 / 3  # the power of the machine epsilon, times |H|, that residuals of small eigenvalues are content with; ARPACK's


@dataclass(frozen=True)
class Eigenvalues:
    """Some eigenvalues, in descending order."""

    values: Array
    residuals: Array  # |H y - value y| for unit vectors y, from a product with each: no estimate
    converged: np.bool_  # whether every residual is within the tolerance
    products: int
    vectors: tuple[Vector, ...] | None = None


@dataclass(frozen=True)
class Trace:
    """An estimate of the trace and its standard error."""

    value: float
    standard_error: float
    products: int


@dataclass(frozen=True)
class Density:
    """The density of the eigenvalues on a grid; ``nodes`` and ``weights`` are the quadrature that was smoothed by a Gaussian of width ``sigma``."""

    grid: Array
    density: Array
    nodes: Array
    weights: Array
    sigma: float
    products: int


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

    A pair counts as converged when :math:`|H y - \theta y| \le tol\, |\theta|` (or :math:`\epsilon^{2/3} |H|` with the machine epsilon, where that is more).
    One start vector sees one copy of a multiple eigenvalue, so when all seem to be found the search goes on from a random vector across them, until nothing
    new turns up (in time, or ``converged`` is False). Memory: about 1.5 k vectors.

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

    Reference: Wu, Simon, "Thick-restart Lanczos method for large symmetric eigenvalue problems", SIAM J. Matrix Anal. Appl. 22 (2000).
    """
    k = min(check_count("k", k), H.size)
    check_number("tol", tol, low=0)
    if which not in WHICH:
        raise Refusal(f"which must be one of {', '.join(map(repr, WHICH))}; got {which!r}")
    krylov = Krylov(H, k + max(20, k // 2), _generator(seed))
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
    """Whether the best value that is not wanted is known so well that it stays so: by its distance from the wanted ones, or for itself."""
    sides = {"largest": [(theta, k)], "magnitude": [(theta.abs(), k)], "both ends": [(theta, k - k // 2), (-theta, k // 2)]}[which]
    for far, wanted in sides:
        if not 0 < wanted < len(theta):
            continue  # nobody wants this side, or everything is wanted
        last, best = far.argsort(descending=True)[wanted - 1 : wanted + 1]
        if far[best] + left[best] >= far[last] and left[best] > _allowed(theta[best], theta, tol, H):
            return False
    return True


def _checked(H: HessianOperator, krylov: Krylov, theta: Tensor, tol: float, before: int, vectors: bool, progress: Progress | None) -> Eigenvalues:
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
    ends = torch.stack([descending, descending.flip(0)], dim=1).reshape(-1)  # the largest, the smallest, the second largest ...
    return ends[: len(theta)]


def _allowed(values: Tensor, theta: Tensor, tol: float, H: HessianOperator) -> Tensor:
    attainable = torch.finfo(H.dtype).eps ** ATTAINABLE * theta.abs().max()
    return torch.clamp(tol * values.abs(), min=float(attainable))


def trace(H: HessianOperator, samples: int = 30, seed: int = 0, *, method: str = "hutch++", progress: Progress | None = None) -> Trace:
    r"""The trace, from ``samples`` products with random vectors.

    Hutchinson averages :math:`z^T H z` over random signs ``z``. Hutch++ spends a third of the products on a sketch of the largest eigenvectors, whose share
    of the trace is then exact, a third on that share, and a third on Hutchinson for the rest: few large eigenvalues, as Hessians have, then add no variance.

    Args:
        H: the operator.
        samples: how many products.
        seed: of the random vectors.
        method: ``"hutch++"`` or ``"hutchinson"``.
        progress: called after each product with the number done and the number expected.

    Example:
        >>> model = torch.nn.Linear(3, 1, bias=False)
        >>> data = [(torch.diag(torch.tensor([1.0, 2.0, 3.0])), torch.zeros(3, 1))]
        >>> H = HessianOperator(model, torch.nn.functional.mse_loss, data)
        >>> round(trace(H, samples=9).value * 3 / 2, 3)
        14.0

    Reference: Hutchinson, Commun. Stat. Simul. Comput. 19 (1990); Meyer, Musco, Musco, Woodruff, "Hutch++: Optimal Stochastic Trace Estimation", SOSA 2021.
    """
    if method not in ("hutch++", "hutchinson"):
        raise Refusal(f'method must be "hutch++" or "hutchinson", got {method!r}')
    check_count("samples", samples, low=2 if method == "hutchinson" else 6)
    generator, before = _generator(seed), H.products

    def times(v: Tensor) -> Tensor:
        out = H.times(v)
        if progress is not None:
            progress(H.products - before, samples)
        return out

    sketched = min(samples // 3, H.size) if method == "hutch++" else 0
    Q = torch.zeros(H.size, 0, dtype=H.dtype, device=H.device)
    if sketched:
        Q = torch.linalg.qr(torch.stack([times(H.random(generator, "signs")) for _ in range(sketched)], dim=1)).Q
    exact = sum(float(torch.dot(q, times(q.contiguous()))) for q in Q.T)
    rest = []
    for _ in range(samples - 2 * sketched):
        z = H.random(generator, "signs")
        z -= Q @ (Q.T @ z)
        rest.append(float(torch.dot(z, times(z))))
    return Trace(exact + float(np.mean(rest)), float(np.std(rest, ddof=1) / math.sqrt(len(rest))), H.products - before)


def spectral_density(
    H: HessianOperator,
    steps: int = 80,
    probes: int = 4,
    seed: int = 0,
    *,
    points: int = 1000,
    sigma: float | None = None,
    progress: Progress | None = None,
) -> Density:
    r"""The density of the eigenvalues, by stochastic Lanczos quadrature.

    Each probe is a random vector from which Lanczos runs, fully reorthogonalised; the Ritz values are nodes, the squares of the first components of their
    vectors weights. The density integrates to 1 and is an average over probes, smoothed by a Gaussian.

    Args:
        H: the operator.
        steps: of Lanczos, for each probe.
        probes: how many random vectors.
        seed: of them.
        points: of the grid.
        sigma: the width of the Gaussian; None takes 1 % of the range of the nodes.
        progress: called after each product with the number done and the number expected.

    Example:
        >>> model = torch.nn.Linear(3, 1, bias=False)
        >>> data = [(torch.diag(torch.tensor([1.0, 2.0, 3.0])), torch.zeros(3, 1))]
        >>> H = HessianOperator(model, torch.nn.functional.mse_loss, data)
        >>> found = spectral_density(H, steps=3, probes=2)
        >>> round(float(np.sum(found.density) * (found.grid[1] - found.grid[0])), 3)
        1.0

    Reference: Ghorbani, Krishnan, Xiao, "An Investigation into Neural Net Optimization via Hessian Eigenvalue Density", ICML 2019.
    """
    steps, probes = min(check_count("steps", steps), H.size), check_count("probes", probes)
    check_count("points", points, low=2)
    if sigma is not None and check_number("sigma", sigma, low=0) == 0:
        raise Refusal("sigma must be above 0: the Gaussian needs a width")
    generator, before = _generator(seed), H.products
    nodes, weights = [], []
    krylov = Krylov(H, steps, generator)
    for _ in range(probes):
        krylov.steps = 0
        krylov.begin(H.random(generator, "signs"))
        for _ in range(steps):
            krylov.expand()
            if progress is not None:
                progress(H.products - before, steps * probes)
        theta, S, _ = krylov.ritz()
        nodes.append(theta.numpy())
        weights.append(S[0].numpy() ** 2 / probes)
    x, w = np.concatenate(nodes), np.concatenate(weights)
    width = 0.01 * max(float(np.ptp(x)), 1e-5 * float(np.abs(x).max()), 1e-12) if sigma is None else sigma  # wide enough for a grid of distinct numbers
    grid = np.linspace(x.min() - 6 * width, x.max() + 6 * width, points)
    if width < grid[1] - grid[0]:
        raise Refusal(f"a Gaussian of the width sigma={width:.3g} falls between the {points} points of the grid: raise points or sigma")
    return Density(grid, smoothed(grid, x, w, width), x, w, width, H.products - before)


def smoothed(grid: Array, nodes: Array, weights: Array, sigma: float) -> Array:
    """The density on a grid: at each node a Gaussian of that width and weight.

    Example:
        >>> smoothed(np.array([0.0, 1.0]), np.array([1.0]), np.array([1.0]), sigma=0.5).round(3)
        array([0.108, 0.798])
    """
    bumps = np.exp(-0.5 * ((grid[:, None] - nodes) / sigma) ** 2) / (sigma * math.sqrt(2 * math.pi))
    return bumps @ weights


def _generator(seed: int) -> torch.Generator:
    """On the CPU, so that the random vectors are the same on every device."""
    return torch.Generator().manual_seed(check_count("seed", seed, low=0))
