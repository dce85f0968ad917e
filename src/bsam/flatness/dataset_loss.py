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
from torch.utils._pytree import tree_leaves

from ..common.checks import check_count
from ..common.errors import BsamRuntimeError, BsamTypeError, BsamValueError
from ..core.vector import Vector
from ..core.weights import Weights
from .batches import Batches as Batches
from .batches import halve, has_rows, num_samples, split, unpack
from .preserve import preserved
from .second_derivatives import check_graph

WeightedBatch: TypeAlias = tuple[Any, Any, float]  # inputs, targets, and their weight in the mean
LossFunction: TypeAlias = Callable[[Any, Any], Tensor]
BatchWeight: TypeAlias = Callable[[Any, Any], Any]

ROUNDING = 16.0  # in machine epsilons, relative to losses and outputs: how much two ways to compute a loss may differ
LOSS_RTOL, GRADIENT_RTOL = 1e-4, 1e-2  # how much those of one batch may differ, evaluated twice; GPUs round at random
OTHER_STATISTICS = (
    'micro_batch would change the batches whose statistics batch norm uses, with mode="train" or without running '
    "statistics: leave it out, and make the batches of data smaller"
)


def check_mode(mode: str, micro_batch: int | None) -> None:
    """Raise if ``mode`` or ``micro_batch`` is invalid, or both together are."""
    if mode not in ("eval", "train"):
        raise BsamValueError(
            f'mode must be "eval" (running statistics of batch norm) or "train" (those of the batch), got {mode!r}'
        )
    if micro_batch is not None:
        check_count("micro_batch", micro_batch)
        if mode == "train":
            raise BsamValueError(OTHER_STATISTICS)


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
        if isinstance(data, Iterator):
            raise BsamTypeError("data is iterated more than once, and this is an iterator: pass a list or a DataLoader")
        check_mode(mode, micro_batch)
        norms = [m for m in model.modules() if isinstance(m, _BatchNorm)]
        if micro_batch is not None and any(norm.running_mean is None for norm in norms):
            raise BsamValueError(OTHER_STATISTICS)
        self.model, self.loss_fn, self.data, self.mode, self.batch_weight = model, loss_fn, data, mode, batch_weight
        self.micro_batch = micro_batch
        self.weights = Weights()
        self.weights.refresh([{"params": list(model.parameters())}])
        if not self.weights.params:
            raise BsamValueError("model has no trainable parameter, so there is no gradient: are they all frozen?")
        self.num_samples: int | None = None  # counted by the first pass
        self.checked = False  # whether a whole pass has checked data and loss_fn
        self._draws: Tensor | None = None  # the state of the random numbers that every pass begins with

    @contextlib.contextmanager
    def measuring(self) -> Iterator[None]:
        """Set the mode; on exit weights, flags, buffers and random numbers are as before, also after an error."""
        if [id(p) for p in self.model.parameters() if p.requires_grad] != [id(p) for p in self.weights.params]:
            raise BsamRuntimeError(
                "the trainable parameters of the model changed after this object was created (a layer was replaced, "
                "frozen or unfrozen): create it again"
            )
        with preserved(self.model, self.mode):
            try:
                yield
            finally:
                self.weights.restore()

    def weighted_batches(self) -> Iterator[WeightedBatch]:
        """Yield inputs, targets and weight of each (micro-)batch; random numbers are the same in each pass."""
        if self._draws is None:
            self._draws = torch.get_rng_state()
        torch.set_rng_state(self._draws)
        count, total = 0, 0.0
        for batch in self.data:
            x, y = unpack(batch)
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
                "data is empty: there is no loss to measure"
                if count == 0
                else f"the weights of batch_weight add up to {total}: there is no loss to measure"
            )
        self.num_samples = count

    def has_samples(self, n: float) -> bool:
        """Return whether there are at least ``n`` samples."""
        if self.num_samples is not None:
            return self.num_samples >= n
        with self.measuring():
            return any(count >= n for count in itertools.accumulate(num_samples(*unpack(batch)) for batch in self.data))

    def batch_loss(self, out: Any, y: Any) -> Tensor:
        """Return ``loss_fn(out, y)``, checked to be a real 0-dim tensor."""
        loss = self.loss_fn(out, y)
        if not isinstance(loss, Tensor) or loss.dim() != 0 or loss.is_complex():
            got = f"the shape {tuple(loss.shape)}, {loss.dtype}" if isinstance(loss, Tensor) else type(loss).__name__
            raise BsamTypeError(f"loss_fn must return the mean loss of a batch, a real 0-dim tensor; it gave {got}")
        return loss

    def losses(self, batches: Iterable[WeightedBatch] | None = None) -> Iterator[tuple[Tensor, tuple[Any, Any], float]]:
        """Yield loss, (outputs, targets) and weight of each batch of ``batches``, or of a pass over the data."""
        check, problem = batches is None and not self.checked, None
        if check:
            self._check_determinism()
        for number, (x, y, weight) in enumerate(self.weighted_batches() if batches is None else batches):
            out = self.model(x)
            loss = self.batch_loss(out, y)
            yield loss, (out, y), weight
            if check and self.batch_weight is None:
                problem = problem or self._not_a_mean(loss, x, out, y, int(weight))
                if problem and number > 0:  # of a single batch any loss may be measured
                    raise BsamValueError(problem)
        self.checked |= check

    def _check_determinism(self) -> None:
        """Raise if the first batch, taken from the data twice, has another loss or gradient the second time."""
        evaluate = self.value_and_grad if torch.is_grad_enabled() else self.value
        (loss, g), (again, h) = (evaluate([next(self.weighted_batches())]) for _ in range(2))
        same = not abs(loss - again) > LOSS_RTOL * abs(loss)  # also where they are not finite
        if isinstance(g, Vector) and isinstance(h, Vector):
            same &= not float((g - h).norm()) > GRADIENT_RTOL * float(g.norm())
        if not same:
            raise BsamRuntimeError(
                f"the first batch of data has the loss {loss:.6g} in one pass and {again:.6g} in the next, or another "
                "gradient: use no random augmentation and no generator in a DataLoader, and check that the model "
                "changes neither its inputs nor itself"
            )

    @torch.no_grad()
    def _not_a_mean(self, loss: Tensor, x: Any, out: Any, y: Any, n: int) -> str | None:
        """Return a sentence if ``loss_fn`` is not a mean over the ``n`` samples of a batch, seen from its halves.

        Where outputs have no row for each sample, the model runs on halves of the inputs. What cannot be halved, as a
        batch of one sample, is not checked.
        """
        by_row = all(has_rows(t, n) for t in tree_leaves(out))
        try:
            halves = halve((out, y), n) if by_row else halve((x, y), n) if self.mode == "eval" else []
            parts = [(float(self.batch_loss(a if by_row else self.model(a), b)), m) for (a, b), m in halves]
        except (RuntimeError, ValueError, IndexError, TypeError):
            return None  # the loss accepts whole batches only
        if not parts:
            return None
        mean, together = _mean(parts), float(loss)
        floats = [t for t in (loss, *tree_leaves(out)) if isinstance(t, Tensor) and t.is_floating_point()]
        scale = max(float(t.float().abs().nan_to_num(0.0, 0.0).mean()) for t in floats)
        eps = torch.finfo(loss.dtype).eps
        allowed = scale * (ROUNDING * eps if by_row else eps**0.5)  # the model rounds differently when it runs again
        if math.isclose(mean, together, abs_tol=allowed) or (math.isnan(mean) and math.isnan(together)):
            return None
        return (
            f"loss_fn is not a mean over samples: it gives {together:.6g} for {n} samples, but the mean over two parts "
            f"of them is {mean:.6g} (reduction='sum'? class weights? ignore_index?): use a mean, pass one batch, or "
            "pass batch_weight, such as lambda x, y: (y != -100).sum()"
        )

    def gradient(self, loss: Tensor, create_graph: bool = False) -> tuple[Tensor | None, ...]:
        """Return the derivative of a batch's loss by each parameter, None for those it does not depend on."""
        check_graph(loss, twice=create_graph)
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
    def value(
        self, batches: Iterable[WeightedBatch] | None = None, score: Callable[[Any, Any], Tensor] | None = None
    ) -> tuple[float, float | None]:
        """Return the mean loss at the current weights and, if given, the mean entry of ``score(outputs, y)``."""
        losses, scored, scores = list[tuple[float, float]](), 0.0, 0
        for loss, (out, y), weight in self.losses(batches):
            losses.append((float(loss), weight))
            if score is not None:
                entries = score(out, y)
                scored, scores = scored + float(entries.sum()), scores + entries.numel()
        return _mean(losses), scored / scores if score is not None else None

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
    """Return the weighted mean of losses; of one batch its loss exactly, which ``loss * n / n`` is not."""
    total = sum(weight for _, weight in losses)
    return sum(loss * (weight / total) for loss, weight in losses)
