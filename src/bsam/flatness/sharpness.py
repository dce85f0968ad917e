"""How far the loss rises and falls around ``w``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn

from ..core.checks import check_radius
from ..core.refusal import Refusal
from ..core.vector import TINY, Vector, ratio
from ..core.weights import Weights

Batches: TypeAlias = Iterable[tuple[Tensor, Tensor]]
LossFunction: TypeAlias = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Sharpness:
    """The loss at ``w`` and how it changes along its gradient ``g``."""

    loss: float
    max_sharpness: float  # MaxS: the rise uphill
    min_sharpness: float  # MinS: the fall downhill
    bilateral: float  # BilS = MaxS + MinS
    cosine: float  # between g and the gradient at the point downhill


def sharpness(model: nn.Module, loss_fn: LossFunction, data: Batches, rho_max: float = 0.05, rho_min: float = 0.05) -> Sharpness:
    r"""MaxS, MinS and BilS of a network in eval mode, over all of ``data``.

    .. math::
        MaxS = L(w + \rho_{max}\, g / |g|) - L(w), \qquad MinS = L(w) - L(w - \rho_{min}\, g / |g|), \qquad BilS = MaxS + MinS

    The model is afterwards as it was, bit for bit: weights, gradients, buffers, and which of its modules train.

    Args:
        model: the network.
        loss_fn: ``loss_fn(model(x), y)`` is the mean loss of a batch.
        data: the batches ``(x, y)``, walked three times, so no generator; batches may differ in size, and each sample counts once.
        rho_max: the radius uphill.
        rho_min: the radius downhill.

    Example:
        >>> model = nn.Linear(1, 1, bias=False)
        >>> _ = nn.init.constant_(model.weight, 1.0)
        >>> data = [(torch.ones(4, 1), torch.zeros(4, 1))]  # L(w) = w**2
        >>> found = sharpness(model, nn.functional.mse_loss, data, rho_max=0.1, rho_min=0.1)
        >>> round(found.max_sharpness, 5), round(found.min_sharpness, 5), round(found.bilateral, 5)
        (0.21, 0.19, 0.4)

    Reference: the BSAM paper's MaxS, MinS and BilS.
    """
    check_radius("rho_max", rho_max)
    check_radius("rho_min", rho_min)
    if isinstance(data, Iterator):
        raise Refusal("data is walked more than once, and an iterator can be walked once only: pass a list or a DataLoader")
    weights = Weights()
    weights.survey([{"params": list(model.parameters())}])
    if not weights.params:
        raise Refusal("model has no trainable parameter, so there is no gradient to move along")
    with _eval_mode(model):
        try:
            loss, g = _loss_and_gradient(model, loss_fn, data, weights)
            direction = g / (g.norm() + TINY)
            weights.move(direction * rho_max)
            upper = _loss(model, loss_fn, data)
            weights.move(direction * -rho_min)
            lower, g_min = _loss_and_gradient(model, loss_fn, data, weights)
        finally:
            weights.restore()
    cosine = float(ratio(g.dot(g_min), g.norm() * g_min.norm()))
    return Sharpness(loss, upper - loss, loss - lower, upper - lower, cosine)


@contextlib.contextmanager
def _eval_mode(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]  # one by one: a part of the model may have been in eval mode already
    try:
        model.eval()
        yield
    finally:
        for module, training in modes:
            module.training = training


@torch.no_grad()
def _loss(model: nn.Module, loss_fn: LossFunction, data: Batches) -> float:
    total, count = 0.0, 0
    for x, y in data:
        total += float(loss_fn(model(x), y)) * len(y)
        count += len(y)
    return total / count


@torch.enable_grad()
def _loss_and_gradient(model: nn.Module, loss_fn: LossFunction, data: Batches, weights: Weights) -> tuple[float, Vector]:
    """By ``autograd.grad``: whatever the user keeps in ``p.grad`` stays there."""
    sums = [torch.zeros_like(p, requires_grad=False) for p in weights.params]
    total, count = 0.0, 0
    for x, y in data:
        loss = loss_fn(model(x), y)
        found = torch.autograd.grad(loss, weights.params, allow_unused=True)
        for s, g in zip(sums, found, strict=True):
            if g is not None:
                s.add_(g, alpha=len(y))
        total += float(loss.detach()) * len(y)
        count += len(y)
    if not count:
        raise Refusal("data is empty: there is no loss to measure")
    return total / count, Vector(sums, weights.cut) / count
