"""The mean loss over a data set as a function of the weights."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves, tree_map

from ..core.checks import check_count
from ..core.errors import BsamRuntimeError, BsamTypeError, BsamValueError
from ..core.vector import Vector
from ..core.weights import Weights
from .batches import Batches as Batches
from .batches import halve, has_rows, join, num_samples, split, unpack
from .checksum import checksum, same_samples
from .preserve import preserved
from .second_derivatives import check_graph

WeightedBatch: TypeAlias = tuple[Any, Any, float]  # inputs, targets, and their weight in the mean
LossFunction: TypeAlias = Callable[[Any, Any], Tensor]
BatchWeight: TypeAlias = Callable[[Any, Any], Any]

ROUNDING = 16.0  # in machine epsilons, relative to losses and outputs: how much two ways to compute a loss may differ


class DatasetLoss:
    """The mean of ``loss_fn(model(x), y)`` over all samples of ``data``.

    Every method except :meth:`has_samples` must be called inside :meth:`measuring`.

    Args:
        model, loss_fn, data, micro_batch, mode, batch_weight: as in :class:`bsam.flatness.HessianOperator`.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction,
        data: Batches,
        micro_batch: int | None = None,
        mode: str = "eval",
        batch_weight: BatchWeight | None = None,
    ) -> None:
        if mode not in ("eval", "train"):
            raise BsamValueError(
                f'mode must be "eval" (running statistics of batch norm) or "train" (those of the batch), got {mode!r}'
            )
        if batch_weight is not None and not callable(batch_weight):
            raise BsamTypeError(
                f"batch_weight must be a function of inputs and targets, got {type(batch_weight).__name__}"
            )
        if isinstance(data, Iterator):
            raise BsamTypeError("data is iterated more than once, and this is an iterator: pass a list or a DataLoader")
        if micro_batch is not None and mode == "train":
            raise BsamValueError(
                'micro_batch would change the batches whose statistics mode="train" uses: leave one of them out, or '
                "make the batches of data smaller"
            )
        norms = [m for m in model.modules() if isinstance(m, _BatchNorm)]
        if micro_batch is not None and any(norm.running_mean is None for norm in norms):
            raise BsamValueError(
                "micro_batch would change the batches whose statistics a batch norm without running statistics uses: "
                "leave it out, and make the batches of data smaller"
            )
        self.model, self.loss_fn, self.data, self.mode, self.batch_weight = model, loss_fn, data, mode, batch_weight
        self.micro_batch = None if micro_batch is None else check_count("micro_batch", micro_batch)
        self.weights = Weights()
        self.weights.refresh([{"params": list(model.parameters())}])
        if not self.weights.params:
            raise BsamValueError("model has no trainable parameter, so there is no gradient: are they all frozen?")
        self.num_samples: int | None = None  # in the first pass
        self.mean_checked = batch_weight is not None  # whether loss_fn is known to be a mean over samples
        self.forbidden_params: list[Tensor] = []  # parameters that the loss must not depend on
        self._first_pass: tuple[Tensor, bool] | None = None  # checksums, and whether later passes can be compared

    @contextlib.contextmanager
    def measuring(self) -> Iterator[None]:
        """Set the mode; on exit weights, flags, buffers and random numbers are as before, also after an error."""
        self._check_parameters()
        with preserved(self.model, self.mode):
            try:
                yield
            finally:
                self.weights.restore()

    def _check_parameters(self) -> None:
        named, params = list(self.model.named_parameters()), {id(p) for p in self.weights.params}
        if [id(p) for _, p in named if p.requires_grad] == [id(p) for p in self.weights.params]:
            return
        frozen = [name for name, p in named if not p.requires_grad and id(p) in params]
        if frozen:
            raise BsamRuntimeError(
                f"parameters were frozen after this object was created: {', '.join(frozen)}. Unfreeze them, or create "
                "it again"
            )
        raise BsamRuntimeError(
            "the trainable parameters of the model changed after this object was created (a layer was replaced, added "
            "or unfrozen): create it again"
        )

    def weighted_batches(self) -> Iterator[WeightedBatch]:
        """Yield inputs, targets and weight of each (micro-)batch; raise if the data differs from the first pass."""
        count, total, sums, shapes = 0, 0.0, list[Tensor](), set[Any]()
        for batch in self.data:
            x, y = unpack(batch)
            n = num_samples(x, y)
            if n == 0:
                continue
            count += n
            sums.append(checksum(x, y, n))
            shapes.add(tuple(t.shape[t.shape[:1] == (n,) :] for t in tree_leaves((x, y)) if isinstance(t, Tensor)))
            for a, b, size in [(x, y, n)] if self.micro_batch is None else split(x, y, self.micro_batch):
                weight = size if self.batch_weight is None else _checked_weight(self.batch_weight(a, b))
                total += weight
                if weight > 0:
                    yield a, b, weight
        if count == 0 and self.num_samples is None:
            raise BsamValueError("data is empty: there is no loss to measure")
        if self.num_samples not in (None, count):
            raise BsamRuntimeError(
                f"data gave {self.num_samples} samples in the first pass and {count or 'nothing'} in a later one: "
                "pass a list or a DataLoader that gives the same each time"
            )
        if total == 0:
            raise BsamValueError("batch_weight is 0 for every batch: there is no loss to measure")
        self._compare_with_first_pass(torch.stack(sums).cpu(), same_shape=len(shapes) == 1)
        self.num_samples = count

    def _compare_with_first_pass(self, sums: Tensor, same_shape: bool) -> None:
        """Raise if a pass gave other batches (train mode) or other samples (eval mode) than the first one.

        Samples of different shapes may be padded as their batch requires; then only batches can be compared.
        """
        sums, comparable = (sums, True) if self.mode == "train" else (sums.sum(0), same_shape)
        if self._first_pass is None:
            self._first_pass = sums, comparable
        elif comparable and self._first_pass[1] and not same_samples(sums, self._first_pass[0]):
            raise BsamRuntimeError(
                f"data gave different {'batches' if self.mode == 'train' else 'samples'} in two passes: use "
                "shuffle=False, drop_last=False and no random augmentation, and check that the model does not modify "
                "its inputs in place"
            )

    def has_samples(self, n: float) -> bool:
        """Return whether there are at least ``n`` samples."""
        if self.num_samples is not None:
            return self.num_samples >= n
        with self.measuring():
            return any(count >= n for count in itertools.accumulate(num_samples(*unpack(batch)) for batch in self.data))

    def batch_loss(self, out: Any, y: Any) -> Tensor:
        """Return ``loss_fn(out, y)``, checked to be a real 0-dim tensor."""
        loss = self.loss_fn(out, y)
        expected = "loss_fn must return the mean loss of a batch, a 0-dim tensor; it gave"
        if not isinstance(loss, Tensor):
            raise BsamTypeError(f"{expected} the type {type(loss).__name__}")
        if loss.dim() != 0:
            raise BsamValueError(f"{expected} the shape {tuple(loss.shape)}")
        if loss.is_complex():
            raise BsamValueError(
                "loss_fn must return a real number, got a complex one: use its real part or its modulus"
            )
        return loss

    def losses(self, batches: Iterable[WeightedBatch] | None = None) -> Iterator[tuple[Tensor, tuple[Any, Any], float]]:
        """Yield loss, (outputs, targets) and weight of each batch of ``batches``, or of a pass over the data."""
        check, previous = batches is None and not self.mean_checked, None
        for x, y, weight in self.weighted_batches() if batches is None else batches:
            out = self.model(x)
            yield self.batch_loss(out, y), (out, y), weight
            if check:
                current = x, *tree_map(lambda t: t.detach() if isinstance(t, Tensor) else t, (out, y)), int(weight)
                if previous is not None:
                    self._check_mean(previous, current)
                previous = current
        self.mean_checked |= check

    @torch.no_grad()
    def _check_mean(self, *batches: tuple[Any, Any, Any, int]) -> None:
        """Raise if ``loss_fn`` is not a mean over samples, seen from two consecutive batches (x, outputs, y, n).

        The loss of both together is compared with the mean of theirs; where they cannot be joined, that of each batch
        with the mean of its halves; where outputs have no row per sample, the model runs on halves of the inputs. What
        allows none of this is not checked.
        """
        outputs = [((out, y), n) for _, out, y, n in batches]
        by_row = all(has_rows(t, n) for _, out, _, n in batches for t in tree_leaves(out))
        if by_row:
            both = join(*outputs)
            cases = [(batch, halve(batch)) for batch in outputs] if both is None else [(both, outputs)]
        else:
            inputs = [halve(((x, y), n)) if self.mode == "eval" else [] for x, _, y, n in batches]
            halves = [[((self.model(x), y), n) for (x, y), n in parts] for parts in inputs]
            cases = list(zip(outputs, halves, strict=True))
        for (whole, n), parts in cases:
            if not parts:
                continue
            try:
                together = self.batch_loss(*whole)
                mean = _mean([(float(self.batch_loss(*part)), size) for part, size in parts])
            except (RuntimeError, ValueError, IndexError, TypeError):
                continue  # the loss accepts whole batches only
            floats = [t for t in (together, *tree_leaves(whole[0])) if isinstance(t, Tensor) and t.is_floating_point()]
            scale = max(float(t.float().abs().nan_to_num(0.0, 0.0).mean()) for t in floats)
            eps = torch.finfo(together.dtype).eps
            allowed = scale * (
                ROUNDING * eps if by_row else eps**0.5
            )  # the model rounds differently when it runs again
            close = math.isclose(mean, float(together), abs_tol=allowed)
            if not close and not (math.isnan(mean) and math.isnan(float(together))):
                raise BsamValueError(
                    f"loss_fn is not a mean over samples: it gives {float(together):.6g} for {n} samples, but the mean "
                    f"over two parts of them is {mean:.6g} (reduction='sum'? class weights? ignore_index?): use a "
                    "mean, pass one batch, or pass batch_weight, such as lambda x, y: (y != -100).sum()"
                )

    def gradient(self, loss: Tensor, create_graph: bool = False) -> tuple[Tensor | None, ...]:
        """Return the derivative of a batch's loss by each parameter, None for those it does not depend on."""
        check_graph(loss, twice=create_graph, forbidden=self.forbidden_params)
        grads: tuple[Tensor | None, ...] = ()
        if loss.requires_grad:
            grads = torch.autograd.grad(loss, self.weights.params, create_graph=create_graph, allow_unused=True)
        if all(g is None for g in grads):
            raise BsamRuntimeError(
                "loss_fn(model(x), y) does not depend on any trainable parameter of the model: is it computed from the "
                "model's outputs? Was it detached, or computed under torch.no_grad or torch.inference_mode?"
            )
        return grads

    @torch.no_grad()
    def value(self, score: Callable[[Any, Any], Tensor] | None = None) -> tuple[float, float | None]:
        """Return the mean loss at the current weights and, if given, the mean entry of ``score(outputs, y)``."""
        losses, scored, scores = list[tuple[float, float]](), 0.0, 0
        for loss, (out, y), weight in self.losses():
            losses.append((float(loss), weight))
            if score is not None:
                entries = score(out, y)
                scored, scores = scored + float(entries.sum()), scores + entries.numel()
        return _mean(losses), scored / scores if score is not None else None

    @torch.enable_grad()
    def value_and_grad(self) -> tuple[float, Vector]:
        """Return the mean loss and its gradient at the current weights; ``p.grad`` is not touched."""
        sums = [torch.zeros_like(p, requires_grad=False) for p in self.weights.params]
        losses = list[tuple[float, float]]()
        for loss, _, weight in self.losses():
            for s, g in zip(sums, self.gradient(loss), strict=True):
                if g is not None:
                    s.add_(g, alpha=weight)
            losses.append((float(loss.detach()), weight))
        return _mean(losses), Vector(sums, self.weights.layout) / sum(weight for _, weight in losses)


def _checked_weight(weight: Any) -> float:
    try:
        number = float(weight)
    except (TypeError, ValueError) as error:
        raise BsamTypeError(f"batch_weight must return one number, got {type(weight).__name__}") from error
    if not (number >= 0 and math.isfinite(number)):
        raise BsamValueError(f"batch_weight must return a finite number that is not negative, got {number!r}")
    return number


def _mean(losses: Sequence[tuple[float, float]]) -> float:
    """Return the weighted mean of losses; of one batch its loss exactly, which ``loss * n / n`` is not."""
    total = sum(weight for _, weight in losses)
    return sum(loss * (weight / total) for loss, weight in losses)
