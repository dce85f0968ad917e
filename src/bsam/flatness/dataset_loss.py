"""The mean loss over a data set as a function of the weights."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves, tree_map

from ..common.checks import check_count
from ..common.errors import BsamRuntimeError, BsamTypeError, BsamValueError
from ..core.undo import Undo
from ..core.vector import Vector
from ..core.weights import Weights
from .mean_check import MeanCheck
from .preserve import preserve
from .second_derivatives import check_graph

Batches: TypeAlias = Iterable[tuple[Any, Any]]
WeightedBatch: TypeAlias = tuple[Any, Any, float]  # inputs, targets, and their weight in the mean
LossFunction: TypeAlias = Callable[[Any, Any], Tensor]
BatchWeight: TypeAlias = Callable[[Any, Any], Any]

LOSS_RTOL, GRADIENT_RTOL = 1e-4, 1e-2  # between two evaluations of one batch; GPUs do not round reproducibly
OTHER_STATISTICS = (
    'micro_batch would change the batch statistics that batch norm uses with mode="train" or without running '
    "statistics: omit it and make the batches of data smaller"
)


def check_mode(mode: str, micro_batch: int | None) -> None:
    """Raise if ``mode``, ``micro_batch`` or their combination is invalid."""
    if mode not in ("eval", "train"):
        raise BsamValueError(
            f'mode must be "eval" (batch norm uses running statistics) or "train" (batch statistics), got {mode!r}'
        )
    if micro_batch is not None:
        check_count("micro_batch", micro_batch)
        if mode == "train":
            raise BsamValueError(OTHER_STATISTICS)


@dataclass(eq=False)
class DatasetLoss:
    """The mean of ``loss_fn(model(x), y)`` over all samples of ``data``.

    Every method except :meth:`has_samples` must be called after :meth:`begin`, and before its ``undo``.

    Args:
        model, loss_fn, data, micro_batch, mode, batch_weight: as in :class:`bsam.flatness.HessianOperator`.
    """

    model: nn.Module
    loss_fn: LossFunction
    data: Batches
    micro_batch: int | None = None
    mode: str = "eval"
    batch_weight: BatchWeight | None = None

    def __post_init__(self) -> None:
        if isinstance(self.data, Iterator):
            raise BsamTypeError("data must be iterable more than once, got an iterator: pass a list or a DataLoader")
        check_mode(self.mode, self.micro_batch)
        norms = [m for m in self.model.modules() if isinstance(m, _BatchNorm)]
        if self.micro_batch is not None and any(norm.running_mean is None for norm in norms):
            raise BsamValueError(OTHER_STATISTICS)
        self.weights = Weights()
        self.weights.refresh([{"params": list(self.model.parameters())}])
        if not self.weights.params:
            raise BsamValueError("model has no trainable parameters: set requires_grad on those to measure")
        self._argument_names = _argument_names(self.model)
        self.num_samples: int | None = None  # known after the first pass
        self.checked = False  # whether a full pass has checked data and loss_fn
        self._rng_state: Tensor | None = None  # every pass starts from it

    def begin(self, undo: Undo) -> None:
        """Set the mode; ``undo`` restores weights, flags, buffers and the random state, even after an error."""
        if [id(p) for p in self.model.parameters() if p.requires_grad] != [id(p) for p in self.weights.params]:
            raise BsamRuntimeError(
                "the model's trainable parameters have changed since this object was created (a layer was replaced, "
                "frozen or unfrozen): create a new one"
            )
        preserve(undo, self.model, self.mode)
        undo.callback(self.weights.restore)

    def weighted_batches(self) -> Iterator[WeightedBatch]:
        """Yield the inputs, targets and weight of each (micro-)batch, with the same random numbers in every pass."""
        if self._rng_state is None:
            self._rng_state = torch.get_rng_state()
        torch.set_rng_state(self._rng_state)
        count, total = 0, 0.0
        for batch in self.data:
            x, y = unpack(batch)
            if isinstance(x, Mapping) and self._are_named(x):
                x = dict(x)  # the tensors of other mappings are not seen, for example when a product is recorded
            n = num_samples(x, y)
            if n == 0:
                continue
            count += n
            for a, b, size in [(x, y, n)] if self.micro_batch is None else split(x, y, self.micro_batch):
                weight = size if self.batch_weight is None else float(self.batch_weight(a, b))
                total += weight
                if weight > 0:
                    yield a, b, weight
        if not (total > 0 and math.isfinite(total)):
            raise BsamValueError(
                "data is empty"
                if count == 0
                else f"the weights returned by batch_weight must have a positive, finite sum, got {total}"
            )
        self.num_samples = count

    def has_samples(self, n: float) -> bool:
        """Return whether there are at least ``n`` samples."""
        if self.num_samples is not None:
            return self.num_samples >= n
        with Undo() as undo, undo:
            self.begin(undo)
            return any(count >= n for count in itertools.accumulate(num_samples(*unpack(batch)) for batch in self.data))

    def _are_named(self, x: Any) -> bool:
        return isinstance(x, Mapping) and len(self._argument_names) > 1 and x.keys() <= self._argument_names

    def arguments(self, x: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of the model: ``x``, or its entries if its keys are names of the model's arguments."""
        return ((), dict(x)) if self._are_named(x) else ((x,), {})

    def outputs(self, x: Any) -> Any:
        """Return the model's outputs for the inputs of a batch."""
        arguments, named = self.arguments(x)
        return self.model(*arguments, **named)

    def batch_loss(self, out: Any, y: Any) -> Tensor:
        """Return ``loss_fn(out, y)``, checked to be a real 0-dim tensor."""
        loss = self.loss_fn(out, y)
        if not isinstance(loss, Tensor) or loss.dim() != 0 or loss.is_complex():
            got = f"shape {tuple(loss.shape)}, {loss.dtype}" if isinstance(loss, Tensor) else type(loss).__name__
            raise BsamTypeError(f"loss_fn must return the mean loss of a batch as a real 0-dim tensor, got {got}")
        return loss

    def losses(self, batches: Iterable[WeightedBatch] | None = None) -> Iterator[tuple[Tensor, tuple[Any, Any], float]]:
        """Yield the loss, (outputs, targets) and weight of each batch in ``batches``, by default all data."""
        check = batches is None and not self.checked
        means = MeanCheck(self.outputs, self.batch_loss, self.mode)
        if check:
            self._check_determinism()
        for x, y, weight in self.weighted_batches() if batches is None else batches:
            out = self.outputs(x)
            loss = self.batch_loss(out, y)
            yield loss, (out, y), weight
            if check and self.batch_weight is None:
                means.add(loss, x, out, y, int(weight))
        means.finish()
        self.checked |= check

    def _check_determinism(self) -> None:
        """Raise if iterating the data twice gives different losses or gradients for the first batch."""
        evaluate = self.value_and_grad if torch.is_grad_enabled() else self.value
        (loss, g), (again, h) = (evaluate([next(self.weighted_batches())]) for _ in range(2))
        same = not abs(loss - again) > LOSS_RTOL * abs(loss)  # True if they are not finite
        if isinstance(g, Vector) and isinstance(h, Vector):
            same &= not float((g - h).norm()) > GRADIENT_RTOL * float(g.norm())
        if not same:
            raise BsamRuntimeError(
                f"the first batch of data has loss {loss:.6g} in one pass and {again:.6g} in the next, or its gradient "
                "differs. Use no random augmentation and no DataLoader generator, and check that the model changes "
                "neither its inputs nor itself"
            )

    def gradient(self, loss: Tensor, create_graph: bool = False) -> tuple[Tensor | None, ...]:
        """Return the gradient of a batch's loss, with None for parameters it does not depend on."""
        check_graph(loss, twice=create_graph)
        grads: tuple[Tensor | None, ...] = ()
        if loss.requires_grad:
            grads = torch.autograd.grad(loss, self.weights.params, create_graph=create_graph, allow_unused=True)
        if all(g is None for g in grads):
            raise BsamRuntimeError(
                "loss_fn(model(x), y) does not depend on any trainable parameter. Compute it from the model's outputs, "
                "without detach, torch.no_grad or torch.inference_mode"
            )
        return grads

    @torch.no_grad()
    def value(
        self, batches: Iterable[WeightedBatch] | None = None, score: Callable[[Any, Any], Tensor] | None = None
    ) -> tuple[float, float | None]:
        """Return the mean loss at the current weights, and the mean entry of ``score(outputs, y)`` if given.

        Without entries, their mean is NaN.
        """
        losses = list[tuple[float, float]]()
        total, entries = 0.0, 0
        for loss, (out, y), weight in self.losses(batches):
            losses.append((float(loss), weight))
            if score is not None:
                scores = score(out, y)
                total += float(scores.sum())
                entries += scores.numel()
        if score is None:
            return _mean(losses), None
        return _mean(losses), total / entries if entries else math.nan

    @torch.enable_grad()
    def value_and_grad(self, batches: Iterable[WeightedBatch] | None = None) -> tuple[float, Vector]:
        """Return the mean loss and its gradient at the current weights; ``p.grad`` is not touched."""
        sums = [torch.zeros_like(p, requires_grad=False) for p in self.weights.params]
        losses = list[tuple[float, float]]()
        for loss, _, weight in self.losses(batches):
            for s, g in zip(sums, self.gradient(loss), strict=True):
                if g is not None:
                    s.add_(g, alpha=weight)
            losses.append((float(loss.detach()), weight))
        return _mean(losses), Vector(sums, self.weights.layout) / sum(weight for _, weight in losses)


def _mean(losses: Sequence[tuple[float, float]]) -> float:
    """Return the weighted mean of losses. For one batch it is exactly the batch's loss, unlike ``loss * n / n``."""
    total = sum(weight for _, weight in losses)
    return sum(loss * (weight / total) for loss, weight in losses)


def unpack(batch: Any) -> tuple[Any, Any]:
    """Return the inputs and targets of a batch."""
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        kind = type(batch).__name__ + (f" of {len(batch)}" if isinstance(batch, (tuple, list)) else "")
        pairs = "a DataLoader or [(x, y), ...]"
        if isinstance(batch, Mapping) and "labels" in batch:  # as a DataLoader of Transformers yields
            pairs = "[(batch, batch['labels']) for batch in data]"
        raise BsamValueError(f"each batch of data must be a pair (inputs, targets), got a {kind}: pass {pairs}")
    return batch[0], batch[1]


def _argument_names(model: nn.Module) -> set[str]:
    """Return the names of the model's arguments; wrappers pass theirs on to the network inside."""
    parameters = inspect.signature(model.forward).parameters.values()
    names = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    inside = [getattr(model, name, None) for name in ("module", "_orig_mod", "base_model", "model")]
    wrapped = next((network for network in inside if isinstance(network, nn.Module) and network is not model), None)
    return names if names or wrapped is None else _argument_names(wrapped)


def num_samples(x: Any, y: Any) -> int:
    """Return the number of samples: the rows of the targets or of the inputs, or the length of a list of targets."""
    for value in (y, x):
        if isinstance(value, Tensor) and value.dim():
            return len(value)
    if isinstance(y, (list, tuple)) and y and all(isinstance(target, Mapping) for target in y):
        return len(y)  # object detection: the leading dimensions of images and boxes are not samples
    sizes = {len(leaf) for leaf in tree_leaves((x, y)) if isinstance(leaf, Tensor) and leaf.dim()}
    if len(sizes) == 1:
        return sizes.pop()
    if isinstance(y, (list, tuple)):
        return len(y)
    raise BsamValueError(
        "cannot tell how many samples a batch of data has: pass inputs or targets as tensors with one row per sample"
    )


def split(x: Any, y: Any, size: int) -> list[tuple[Any, Any, int]]:
    """Split a batch into micro-batches (inputs, targets, number of samples) of at most ``size`` samples."""
    if not (isinstance(x, Tensor) and isinstance(y, Tensor)) or x.dim() == 0 or x.shape[:1] != y.shape[:1]:
        got = " and ".join(str(tuple(t.shape)) if isinstance(t, Tensor) else type(t).__name__ for t in (x, y))
        raise BsamValueError(
            f"micro_batch needs tensors with one row per sample as inputs and targets, got {got}: omit it and make the "
            "batches of data smaller"
        )
    return [(a, b, len(b)) for a, b in zip(x.split(size), y.split(size), strict=True)]


@dataclass
class CastBatches:
    """``data`` with all floating-point tensors cast to ``dtype``."""

    data: Batches
    dtype: torch.dtype

    def __iter__(self) -> Iterator[Any]:
        for batch in self.data:
            yield tree_map(lambda t: t.to(self.dtype) if isinstance(t, Tensor) and t.is_floating_point() else t, batch)
