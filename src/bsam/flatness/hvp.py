"""Hessian-vector products batch by batch: forward over reverse mode, and reverse over reverse mode."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Generator, Iterable, Iterator
from typing import TypeAlias

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from .dataset_loss import DatasetLoss, WeightedBatch

Product: TypeAlias = list[Tensor]  # one tensor per parameter
Products: TypeAlias = Generator[tuple[Product, float]]  # one per batch, with its weight in the mean


def forward_over_reverse(L: DatasetLoss, v: list[Tensor], batches: Iterable[WeightedBatch] | None = None) -> Products:
    """Yield the derivative of each batch's gradient along ``v``, with forward mode through the backward pass."""
    with _tangents(L.weights.params, v):
        for loss, _, weight in L.losses(batches):
            tangents = [None if g is None else forward_ad.unpack_dual(g).tangent for g in L.gradient(loss)]
            yield [torch.zeros_like(u) if t is None else t for t, u in zip(tangents, v, strict=True)], weight


def reverse_over_reverse(L: DatasetLoss, v: list[Tensor], batches: Iterable[WeightedBatch] | None = None) -> Products:
    """Yield the derivative of each batch's gradient along ``v``, with a backward pass through the backward pass."""
    for loss, _, weight in L.losses(batches):
        gradient = L.gradient(loss, create_graph=True)
        pairs = [(g, t) for g, t in zip(gradient, v, strict=True) if g is not None and g.requires_grad]
        product = [torch.zeros_like(t) for t in v]
        if pairs:
            grads, vectors = zip(*pairs, strict=True)
            product = list(torch.autograd.grad(grads, L.weights.params, vectors, materialize_grads=True))
        yield product, weight


@contextlib.contextmanager
def _tangents(params: list[Tensor], v: list[Tensor]) -> Iterator[None]:
    """Attach the tangents ``v`` to the parameters in place, so that every use of them is differentiated."""
    with forward_ad.dual_level():
        # the values stay the same, so the version counters must too
        with warnings.catch_warnings(), torch.no_grad(), _unsafe_preserve_version_counter(tuple(params)):
            warnings.simplefilter("ignore", DeprecationWarning)  # raised when torch loads its derivative formulas
            for p, t in zip(params, v, strict=True):
                p.copy_(forward_ad.make_dual(p.detach().clone(), t))
        yield
