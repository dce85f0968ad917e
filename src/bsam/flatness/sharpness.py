"""Measure how much the loss rises and falls around the weights."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import nn

from ..common.checks import check_count, check_radius
from ..core.tensors import local
from ..core.undo import Undo
from ..core.vector import TINY, Vector, ratio
from .dataset_loss import Batches, BatchWeight, DatasetLoss, LossFunction
from .products import random_like, seeded_generator


@dataclass(frozen=True)
class Sharpness:
    """The loss at ``w`` and its change along the gradient ``g``."""

    loss: float
    max_sharpness: float  #: MaxS, the rise uphill
    min_sharpness: float  #: MinS, the fall downhill
    bilateral: float  #: BilS = MaxS + MinS
    cosine: float  #: between g and the gradient at the downhill point
    average_sharpness: float | None = None  #: the mean rise at rho_max in a random direction
    average_error: float | None = None  #: the standard error of this mean

    def __repr__(self) -> str:
        average = "" if self.average_sharpness is None else f", average {self.average_sharpness:.4g}"
        sizes = f"MaxS {self.max_sharpness:.4g}, MinS {self.min_sharpness:.4g}, BilS {self.bilateral:.4g}"
        return f"Sharpness(loss {self.loss:.4g}, {sizes}, cosine {self.cosine:.4g}{average})"


def sharpness(
    model: nn.Module,
    loss_fn: LossFunction,
    data: Batches,
    rho_max: float = 0.05,
    rho_min: float = 0.05,
    *,
    steps: int = 1,
    random_directions: int = 0,
    seed: int = 0,
    micro_batch: int | None = None,
    mode: str = "eval",
    batch_weight: BatchWeight | None = None,
) -> Sharpness:
    r"""Measure MaxS, MinS and BilS of a network over all of ``data``.

    .. math::
        \mathrm{MaxS} = L(w + \rho_{\max}\, g / |g|) - L(w), \qquad \mathrm{MinS} = L(w) - L(w - \rho_{\min}\, g / |g|)

        \mathrm{BilS} = \mathrm{MaxS} + \mathrm{MinS}, \qquad g = \nabla L(w)

    The model is restored bit for bit: weights, gradients, buffers and training flags.

    Args:
        model, loss_fn, data, micro_batch, mode, batch_weight: as in :class:`bsam.flatness.HessianOperator`.
        rho_max: the radius uphill.
        rho_min: the radius downhill.
        steps: number of gradient steps of equal length that make up each radius; the paper uses 1.
        random_directions: number of random points at distance ``rho_max`` for the average sharpness; 0 omits it. A
            complex weight counts as two real ones.
        seed: seed of the random points.

    Example:
        >>> import torch
        >>> model = nn.Linear(1, 1, bias=False)
        >>> _ = nn.init.constant_(model.weight, 1.0)
        >>> data = [(torch.ones(4, 1), torch.zeros(4, 1))]  # L(w) = w**2
        >>> s = sharpness(model, nn.functional.mse_loss, data, rho_max=0.1, rho_min=0.1)
        >>> round(s.max_sharpness, 5), round(s.min_sharpness, 5)
        (0.21, 0.19)

    Reference:
        Deng, Pang, Zhang, Huang, "Bilateral Sharpness-Aware Minimization for Flatter Minima".
    """
    check_radius("rho_max", rho_max)
    check_radius("rho_min", rho_min)
    check_count("steps", steps)
    check_count("random_directions", random_directions, low=0)
    generator = seeded_generator(seed)
    L = DatasetLoss(model, loss_fn, data, micro_batch, mode, batch_weight)
    with Undo() as undo, undo:
        L.begin(undo)
        loss, g = L.value_and_grad()
        L.weights.move(_displacement(L, g, rho_max, steps))
        upper, _ = L.value()
        L.weights.move(_displacement(L, g, -rho_min, steps))
        lower, g_min = L.value_and_grad()
        rises = []
        for _ in range(random_directions):
            entries = [random_like(local(p.detach()), generator) for p in L.weights.params]
            v = Vector(entries, L.weights.layout)
            L.weights.move(v * rho_max / v.norm())
            rises.append(L.value()[0] - loss)
        cosine = float(ratio(g.dot(g_min), g.norm() * g_min.norm()))
    cosine = min(max(cosine, -1.0), 1.0)  # rounding errors may push it past 1; NaN stays NaN
    average = float(np.mean(rises)) if rises else None
    error = float(np.std(rises, ddof=1) / len(rises) ** 0.5) if len(rises) > 1 else None
    return Sharpness(loss, upper - loss, loss - lower, upper - lower, cosine, average, error)


def _displacement(L: DatasetLoss, g: Vector, rho: float, steps: int) -> Vector:
    """Return the sum of ``steps`` steps of length ``rho / steps`` along the gradient; downhill if ``rho`` < 0."""
    e = g * (rho / steps) / (g.norm() + TINY)
    for _ in range(steps - 1):
        L.weights.move(e)
        _, g = L.value_and_grad()
        e = e + g * (rho / steps) / (g.norm() + TINY)
    return e
