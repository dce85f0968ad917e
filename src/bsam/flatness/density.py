"""The spectral density of a Hessian, estimated from Hessian-vector products."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ..common.checks import check_count, check_number
from ..common.errors import BsamValueError
from .hessian import HessianOperator
from .lanczos import Krylov
from .products import Array, Progress, after_products, no_progress, seeded_generator


@dataclass(frozen=True)
class Density:
    """The eigenvalue density on a grid: a quadrature, smoothed with a Gaussian of width ``sigma``."""

    grid: Array
    density: Array
    nodes: Array  #: quadrature nodes
    weights: Array  #: quadrature weights
    sigma: float
    products: int
    note: str = ""  #: how many batches were computed without a recording, and why (see HessianOperator.linearized)

    def __repr__(self) -> str:
        ends = f"{self.nodes.min():.4g} to {self.nodes.max():.4g}"
        grid = f"{len(self.grid)} points, sigma {self.sigma:.2g}"
        return f"Density(eigenvalues from {ends}, {grid}, {after_products(self.products, self.note)})"


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
    r"""Estimate the density of the eigenvalues by stochastic Lanczos quadrature.

    Lanczos with full reorthogonalisation runs from each of several random vectors. The Ritz values are the nodes; the
    squared first components of the Ritz vectors are the weights. The density is the average over the random vectors,
    smoothed with a Gaussian, and integrates to 1.

    Args:
        H: the operator.
        steps: Lanczos steps per random vector.
        probes: number of random vectors.
        seed: seed of the random vectors.
        points: number of grid points.
        sigma: width of the Gaussian; None means 1 % of the range of the nodes.
        progress: called after each product with the number done and the number expected.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(3, 1, bias=False)
        >>> data = [(torch.diag(torch.tensor([1.0, 2.0, 3.0])), torch.zeros(3, 1))]
        >>> H = HessianOperator(model, torch.nn.functional.mse_loss, data)
        >>> spectrum = spectral_density(H, steps=3, probes=2)
        >>> round(float(np.sum(spectrum.density) * (spectrum.grid[1] - spectrum.grid[0])), 3)
        1.0

    Reference:
        Ghorbani, Krishnan, Xiao, "An Investigation into Neural Net Optimization via Hessian Eigenvalue Density", ICML
        2019.
    """
    steps, probes = min(check_count("steps", steps), H.size), check_count("probes", probes)
    check_count("points", points, low=2)
    if sigma is not None and check_number("sigma", sigma, low=0) == 0:
        raise BsamValueError("sigma must be above 0")
    report = progress or no_progress
    generator, before = seeded_generator(seed), H.products
    nodes, weights = [], []
    krylov = Krylov(H, steps, generator)
    with H.linearized() as recording:
        for _ in range(probes):
            krylov.steps = 0
            krylov.begin(H.random(generator, "signs"))
            for _ in range(steps):
                krylov.expand()
                report(H.products - before, steps * probes)
            theta, S, _ = krylov.ritz()
            nodes.append(theta.numpy())
            weights.append(S[0].numpy() ** 2 / probes)
    x, w = np.concatenate(nodes), np.concatenate(weights)
    if sigma is None:  # at least wide enough that the grid points are distinct numbers
        sigma = 0.01 * max(float(np.ptp(x)), 1e-5 * float(np.abs(x).max()), 1e-12)
    grid = np.linspace(x.min() - 6 * sigma, x.max() + 6 * sigma, points)
    if sigma < grid[1] - grid[0]:
        raise BsamValueError(
            f"sigma {sigma:.3g} is below the spacing of the {points} grid points: raise points or sigma"
        )
    return Density(grid, smoothed(grid, x, w, sigma), x, w, sigma, H.products - before, recording.note)


def smoothed(grid: Array, nodes: Array, weights: Array, sigma: float) -> Array:
    """Return the weighted sum of Gaussians of width ``sigma`` at the nodes, on a grid."""
    bumps = np.exp(-0.5 * ((grid[:, None] - nodes) / sigma) ** 2) / (sigma * math.sqrt(2 * math.pi))
    return bumps @ weights
