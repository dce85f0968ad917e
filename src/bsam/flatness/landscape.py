"""The loss on a line or a plane through the weights of a model."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from ..common.checks import check_count, check_number
from ..common.errors import BsamValueError
from ..core.tensors import local
from ..core.undo import Undo
from ..core.vector import Vector
from .dataset_loss import Batches, BatchWeight, DatasetLoss, LossFunction
from .hessian import HessianOperator
from .products import Array, Progress, no_progress, random_like, seeded_generator
from .spectrum import top_eigenvalues

Directions: TypeAlias = str | Sequence[Vector]


@dataclass(frozen=True)
class Landscape:
    """``loss[i, j]`` is the loss at ``w + axes[0][i] * u + axes[1][j] * v``, with the directions ``u`` and ``v``."""

    axes: tuple[Array, ...]
    loss: Array
    accuracy: Array | None = None

    def __repr__(self) -> str:
        points = " x ".join(str(len(axis)) for axis in self.axes)
        centre = self.loss[tuple(len(axis) // 2 for axis in self.axes)]
        losses = f"loss {centre:.4g} at the centre, {self.loss.min():.4g} to {self.loss.max():.4g}"
        return f"Landscape({points} points, span {self.axes[0][-1]:.4g}, {losses})"


@dataclass(frozen=True)
class Plane:
    """Two orthonormal directions, and the coordinates of models in their plane, relative to the first model."""

    directions: tuple[Vector, Vector]
    coordinates: Array  #: one row per model
    distances: Array  #: the distance of each model from the plane

    def __repr__(self) -> str:
        return f"Plane({len(self.coordinates)} models, at most {self.distances.max():.2g} away)"


def landscape(
    model: nn.Module,
    loss_fn: LossFunction,
    data: Batches,
    span: float = 1.0,
    points: int = 21,
    dims: int = 2,
    seed: int = 0,
    directions: Directions = "filter",
    *,
    accuracy: bool = False,
    micro_batch: int | None = None,
    mode: str = "eval",
    batch_weight: BatchWeight | None = None,
    progress: Progress | None = None,
) -> Landscape:
    """Compute the mean loss over ``data`` on a grid around the model, and restore the model bit for bit.

    Args:
        model, loss_fn, data, micro_batch, mode, batch_weight: as in :class:`bsam.flatness.HessianOperator`; the data is
            iterated once per grid point.
        span: the distance from the centre to each edge of the grid, in units of the directions.
        points: grid points per axis; odd, so that the model is at the centre.
        dims: 1 or 2.
        seed: seed of the random directions.
        directions: ``"filter"`` draws random directions and scales each filter to the norm of the model's filter;
            biases, norm layers and filters of zeros do not move. ``"hessian"`` uses the unit eigenvectors of the
            largest eigenvalues. Or pass vectors, such as those of :func:`plane_through`; with the same vectors, several
            models are shown in parallel planes on one scale.
        accuracy: whether to compute the accuracy too, the fraction of labels that equal the argmax over dimension 1.
            Labels that are not a class, such as -100, or equal ``loss_fn.ignore_index``, are not counted.
        progress: called after each point with the number done and the total number.

    Example:
        >>> model = nn.Linear(1, 1, bias=False)
        >>> _ = nn.init.constant_(model.weight, 2.0)
        >>> data = [(torch.ones(4, 1), torch.zeros(4, 1))]  # L(w) = w**2
        >>> v = Vector([torch.ones(1, 1)])
        >>> landscape(
        ...     model, nn.functional.mse_loss, data, points=3, dims=1, directions=[v]
        ... ).loss
        array([1., 4., 9.])

    Reference:
        Li, Xu, Taylor, Studer, Goldstein, "Visualizing the Loss Landscape of Neural Nets", NeurIPS 2018.
    """
    if dims not in (1, 2):
        raise BsamValueError(f"dims must be 1 or 2, got {dims!r}")
    check_grid(span, points)
    L = DatasetLoss(model, loss_fn, data, micro_batch, mode, batch_weight)
    basis = _basis(L, directions, dims, seed)
    side = np.linspace(0.0, span, points // 2 + 1)
    axis = np.concatenate([-side[:0:-1], side])  # exactly symmetric, and exactly 0 in the middle
    losses, hits = np.empty((points,) * dims), np.empty((points,) * dims)
    report = progress or no_progress
    with Undo() as undo, undo:
        L.begin(undo)
        for done, index in enumerate(itertools.product(range(points), repeat=dims), start=1):
            if all(i == points // 2 for i in index):
                L.weights.restore()
            else:
                steps = [float(axis[i]) * v for i, v in zip(index, basis, strict=True)]
                L.weights.move(sum(steps[1:], steps[0]))
            losses[index], hit = L.value(score=partial(_correct, loss_fn) if accuracy else None)
            hits[index] = np.nan if hit is None else hit
            report(done, points**dims)
    return Landscape((axis,) * dims, losses, hits if accuracy else None)


def check_grid(span: float, points: int) -> None:
    """Raise if ``span`` or ``points`` is invalid."""
    if check_count("points", points, low=3) % 2 == 0:
        raise BsamValueError(f"points must be odd, so that the model is at the centre of the grid; got {points}")
    if check_number("span", span, low=0) == 0:
        raise BsamValueError("span must be above 0")


def _basis(L: DatasetLoss, directions: Directions, dims: int, seed: int) -> list[Vector]:
    params, layout = L.weights.params, L.weights.layout
    if not isinstance(directions, str) and isinstance(directions, Iterable):
        shapes, directions = [local(p).shape for p in params], list(directions)
        vectors = [v.tensors() for v in directions if isinstance(v, Vector)]
        if len(vectors) < max(dims, len(directions)) or any([t.shape for t in v] != shapes for v in vectors):
            raise BsamValueError(f"directions must be {dims} vectors with one tensor for each trainable parameter")
        return [
            Vector([t.to(local(p.detach())) for t, p in zip(v, params, strict=True)], layout) for v in vectors[:dims]
        ]
    if directions == "hessian":
        H = HessianOperator(L.model, L.loss_fn, L.data, L.micro_batch, L.mode, batch_weight=L.batch_weight)
        return list(top_eigenvalues(H, k=dims, seed=seed, vectors=True).vectors or ())
    if directions != "filter":
        raise BsamValueError(f'directions must be "filter", "hessian" or a list of vectors, got {directions!r}')
    if all(p.dim() < 2 for p in params):
        raise BsamValueError(
            'directions="filter" needs a trainable parameter with two or more dimensions: use directions="hessian" or '
            "a list of vectors"
        )
    generator = seeded_generator(seed)
    return [Vector([_random_filters(p.detach(), generator) for p in params], layout) for _ in range(dims)]


def _random_filters(w: Tensor, generator: torch.Generator) -> Tensor:
    """Return a random tensor whose rows (filters) have the lengths of those of ``w``; zeros for biases and norms."""
    is_filter, w = w.dim() > 1, local(w)
    if not is_filter:
        return torch.zeros_like(w)
    d = random_like(w, generator)
    length = partial(torch.linalg.vector_norm, dim=tuple(range(1, w.dim())), keepdim=True)
    return d * (length(w) / length(d))


def _correct(loss_fn: LossFunction, out: Any, y: Any) -> Tensor:
    """Return whether the largest output is at the label, for each label that is not ignored."""
    tensors = isinstance(out, Tensor) and isinstance(y, Tensor)
    if not tensors or out.dim() < 2 or out.shape[1] < 2 or y.shape != out.shape[:1] + out.shape[2:]:
        got = " and ".join(f"{tuple(t.shape)}" if isinstance(t, Tensor) else type(t).__name__ for t in (out, y))
        raise BsamValueError(
            "accuracy=True needs outputs and labels such as (B, C) and (B,) or (B, C, H, W) and (B, H, W), with C at "
            f"least 2; got {got}: omit accuracy"
        )
    settings = getattr(loss_fn, "keywords", {})  # of functools.partial
    ignored = getattr(loss_fn, "ignore_index", settings.get("ignore_index", -100))
    counted = (y >= 0) & (y < out.shape[1]) & (y != ignored)
    return (out.argmax(1) == y)[counted]


def plane_through(models: Sequence[nn.Module]) -> Plane:
    """Fit a plane to the weights of several models, to show them in one landscape; three models lie in it exactly.

    Args:
        models: two or more networks with the same architecture; the first is the origin.

    Example:
        >>> a, b, c = nn.Linear(2, 1), nn.Linear(2, 1), nn.Linear(2, 1)
        >>> plane = plane_through([a, b, c])
        >>> bool((plane.distances < 1e-6).all()), plane.coordinates[0]
        (True, array([0., 0.]))
    """
    if len(models) < 2:
        raise BsamValueError(f"models must be at least two networks, got {len(models)}")
    weights = [[local(p.detach()) for p in model.parameters() if p.requires_grad] for model in models]
    if any([p.shape for p in params] != [p.shape for p in weights[0]] for params in weights):
        raise BsamValueError("models must have trainable parameters of the same shapes")
    first, sizes = weights[0], [p.numel() for p in weights[0]]
    flat = torch.stack([torch.cat([p.reshape(-1) for p in params]).double() for params in weights])
    differences = flat - flat[0]
    basis = torch.linalg.svd(differences, full_matrices=False).Vh[:2]
    coordinates = differences @ basis.T
    distances = (differences - coordinates @ basis).norm(dim=1)
    u, v = (
        Vector([part.view(p.shape).to(p) for part, p in zip(row.split(sizes), first, strict=True)]) for row in basis
    )
    return Plane((u, v), coordinates.cpu().numpy(), distances.cpu().numpy())
