"""The mini-batch loss around ``w``."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from .draws import Draws
from .errors import BsamRuntimeError, BsamTypeError, BsamValueError
from .foreach import Scalar
from .graphs import Graphs
from .modules import Modules
from .ranks import Ranks
from .vector import Term, Vector
from .weights import Weights

Closure: TypeAlias = Callable[..., Any]

_NONE = "the closure returned None: return the loss (also when the closure runs backward itself)"


class NoLoss(BsamRuntimeError):
    """The closure did nothing: it returned None in the first pass, and ran no backward."""


@dataclass(frozen=True)
class Evaluation:
    """A pass over the whole batch: where, the loss there, and its gradient."""

    at: Vector | None  # from w; None is w itself
    loss: Tensor
    gradient: Vector


class Objective:
    """The loss of one mini-batch as a function of a displacement of the weights.

    ``L.grad(at=e)`` moves the weights to ``w + e``, runs the closure, takes the gradients over and leaves ``p.grad``
    empty. After :meth:`close` the weights and the batch-norm flags are as they were. Running statistics of batch norm
    move in the first evaluation only, and later ones see its random draws, if ``draws`` says so.

    Args:
        closure: returns the loss (0-dim, or one per sample); or runs ``backward`` itself and returns it; or yields one
            loss per micro-batch. Methods that choose samples call it with their indices, too.
        weights: the parameters, surveyed for this step.
        modules: those that the closure runs: where batch norm is found.
        ranks: the data-parallel side of the model.
        draws: the random generators.
        scaler: the ``torch.amp.GradScaler`` in use, if any.
        search: whether to compare the whole graphs of the passes, to find parts that were computed outside the closure.
    """

    def __init__(
        self,
        closure: Closure,
        weights: Weights,
        modules: Modules,
        ranks: Ranks,
        draws: Draws,
        scaler: torch.amp.GradScaler | None = None,
        *,
        search: bool = False,
    ) -> None:
        self.loss: Tensor | None = None  # of the first evaluation
        self.reached = [False] * len(weights.params)  # parameters that some pass gave a gradient
        self.scale: Scalar = 1.0  # of the loss in backward; NaN once a pass was not finite
        self._closure, self._weights, self._modules, self._ranks, self._draws = closure, weights, modules, ranks, draws
        self._graphs = Graphs(weights.params, whole=search)
        ranks.begin(weights.sharded, weights.params)
        draws.begin()
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        if self._scaler is not None:
            self.scale = self._scaler.scale(
                torch.ones((), dtype=weights.layout.scalar_dtype, device=weights.params[0].device)
            )
        self.watched, self.seen = (
            False,
            list[Evaluation](),
        )  # what the passes saw, if somebody wants to know: it keeps their gradients alive
        self._samples: Tensor | None = (
            None  # the losses of the latest evaluation, where the closure gives one per sample
        )
        self._latest: Term | None = None  # the gradient of the pass before
        self._kept = 0  # gradients moved out of the way

    def close(self) -> None:
        """Bring back the weights, the modules and the random generators. To call it again does no harm."""
        self._weights.restore()
        self._modules.restore()
        self._draws.close()

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """For evaluations that are not the method's: what its own passes reached counts, and its last gradient stays
        where it is.
        """
        reached, self._latest = self.reached, None
        yield
        self.reached = reached

    def value(self, at: Vector | None = None, *, subset: Tensor | None = None) -> Tensor:
        """The mean loss at ``w + at``, without gradients."""
        with self._evaluation(at), torch.no_grad():
            try:
                loss, _ = self._mean_loss(subset)
            except RuntimeError as error:
                if "does not require grad" in str(error):
                    raise BsamRuntimeError(
                        "this method looks at the losses without gradients first: the closure must return them and "
                        "leave backward to it"
                    ) from error
                raise
        return self._noted(loss)

    def losses(self, at: Vector | None = None) -> Tensor:
        """One loss per sample at ``w + at``, without gradients."""
        self.value(at)
        return self.samples

    @property
    def samples(self) -> Tensor:
        """The losses of the latest evaluation, sample by sample."""
        if self._samples is None:
            raise BsamRuntimeError(
                "this method chooses samples by their losses, and the closure gave their mean: let it return one loss "
                "per sample (reduction='none') "
                "of the samples that it is asked for, as in `def closure(indices=slice(None)): return "
                "cross_entropy(model(x[indices]), y[indices], ...)`"
            )
        return self._samples

    def grad(
        self, at: Vector | None = None, *, subset: Tensor | None = None, wrt: Sequence[bool] | None = None
    ) -> Vector:
        """The gradient at ``w + at``."""
        return self.value_and_grad(at, subset=subset, wrt=wrt)[1]

    def value_and_grad(
        self, at: Vector | None = None, *, subset: Tensor | None = None, wrt: Sequence[bool] | None = None
    ) -> tuple[Tensor, Vector]:
        """The mean loss and its gradient at ``w + at``.

        Args:
            at: the displacement; None is ``w`` itself.
            subset: the samples to use; the closure is called with these indices.
            wrt: one flag per parameter; gradients of the others are not computed and count as zero.
        """
        if wrt is not None and not any(wrt):
            return self.value(at, subset=subset), self._take_gradient()
        inputs = None if wrt is None else [p for p, wanted in zip(self._weights.params, wrt, strict=True) if wanted]
        alone = wrt is not None or self._ranks.inside
        with self._evaluation(at, alone=alone), torch.enable_grad():
            loss, batches = self._mean_loss(
                subset, partial(self._backward, inputs=None if self._weights.sharded else inputs)
            )
        gradient = self._take_gradient(wrt, alone=alone) * (1.0 / batches)
        if self.watched and subset is None and wrt is None:
            self.seen.append(Evaluation(at, loss, gradient))
        return self._noted(loss), gradient

    def curvature(self, v: Vector, at: Vector | None = None) -> Vector:
        """The Hessian at ``w + at`` times ``v``, by a backward pass through the backward pass."""
        if self._weights.sharded:
            raise BsamRuntimeError("a Hessian-vector product needs a second derivative, which FSDP does not give")
        along = v.tensors(self._weights.params)
        with self._evaluation(at, alone=True), torch.enable_grad():
            loss, batches = self._mean_loss(None, partial(self._second_backward, along=along), own_allowed=False)
        self._noted(loss)
        return self._take_gradient(alone=True) * (1.0 / batches)

    @contextlib.contextmanager
    def _evaluation(self, at: Vector | None, *, alone: bool = False) -> Iterator[None]:
        if at is None:
            self._weights.restore()
        else:
            self._weights.move(at)
        self._make_room()
        if self.loss is None:
            self._modules.freeze_others()
        else:
            self._modules.freeze_statistics()
        self._draws.begin_pass(self._weights.layout.devices)
        with self._ranks.no_sync_context(alone, self._weights.params):
            yield
        self._draws.end_pass()

    def _make_room(self) -> None:
        """On the CPU, move the gradient of the pass before out of the way: this pass then finds memory that is warm,
        and faults in none.
        """
        if self._latest is not None and self._weights.layout.on_cpu:
            self._latest.keep_in(self._weights.room(self._kept))
            self._latest, self._kept = None, self._kept + 1

    def _noted(self, loss: Tensor) -> Tensor:
        self.loss = loss if self.loss is None else self.loss
        return loss

    def _mean_loss(
        self, subset: Tensor | None, backward: Callable[[Tensor], None] | None = None, *, own_allowed: bool = True
    ) -> tuple[Tensor, float]:
        """Run the closure: the mean loss, and over how many micro-batches (of the size of the first) it was taken."""
        self._graphs.begin_pass()
        answer = self._closure() if subset is None else self._choosing_closure()(subset)
        yields = isinstance(answer, Iterator)
        total, batches, size, dim = torch.zeros(()), 0.0, 0, None
        samples: list[Tensor] = []
        with (
            contextlib.closing(answer) if isinstance(answer, Generator) else contextlib.nullcontext()
        ):  # or an error would leave it half done
            for item in answer if yields else (answer,):
                if item is None and self.loss is None and not any(p.grad is not None for p in self._weights.params):
                    raise NoLoss(_NONE)
                losses = _as_losses(item)
                if yields and losses.dim() == 1 and len(losses) == 0:
                    continue  # a micro-batch of which no sample was chosen
                if dim not in (None, losses.dim()):
                    raise BsamRuntimeError(
                        "the closure yielded mean losses and per-sample losses in turn, and their weights are "
                        "unknown: yield one kind"
                    )
                if losses.numel() == 0:
                    raise BsamRuntimeError("the closure returned no loss at all, an empty tensor: is the batch empty?")
                if torch.is_grad_enabled():
                    self._graphs.check(losses, self._weights.moved)
                dim, size = losses.dim(), size or losses.numel()
                share = losses.numel() / size
                samples.append(losses.detach())
                mean = losses if dim == 0 else losses.mean()
                if backward is not None and (
                    batches > 0 or not self._closure_ran_backward(allowed=own_allowed and not yields)
                ):
                    backward(mean if share == 1 else mean * share)
                total = mean.detach() if batches == 0 else total + mean.detach() * share
                batches += share
        if batches == 0:
            raise BsamRuntimeError("the closure yielded no loss: yield one loss per micro-batch")
        self._samples = None if dim == 0 else samples[0] if len(samples) == 1 else torch.cat(samples)
        if subset is not None and len(self.samples) != len(subset):
            raise BsamRuntimeError(
                f"the closure was asked for {len(subset)} samples and returned {len(self.samples)} losses: it must "
                "use the indices it is called with"
            )
        return (total if batches == 1 else total / batches), batches

    def _choosing_closure(self) -> Closure:
        parameters = inspect.signature(self._closure).parameters.values()
        if not any(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.VAR_POSITIONAL) for p in parameters):
            raise BsamTypeError(
                "this method chooses samples, and the closure takes no argument: let it take their indices, as in "
                "`def closure(indices=slice(None))`"
            )
        return self._closure

    def _closure_ran_backward(self, allowed: bool) -> bool:
        ran = any(p.grad is not None for p in self._weights.params)
        if ran and not allowed:
            raise BsamValueError(
                "a closure that yields micro-batches, or whose loss is differentiated twice, must not run backward "
                "itself: give the loss with its graph"
            )
        return ran

    def _backward(self, loss: Tensor, inputs: list[Tensor] | None) -> None:
        if not loss.requires_grad:
            raise BsamRuntimeError(
                "the closure returned a loss without a graph: no parameter of the optimizer is behind it. "
                "Was it detached, computed under torch.no_grad, or is every parameter frozen?"
            )
        (loss if self._scaler is None else self._scaler.scale(loss)).backward(inputs=inputs)

    def _second_backward(self, loss: Tensor, along: list[Tensor]) -> None:
        params = self._weights.params
        scaled = loss if self._scaler is None else self._scaler.scale(loss)
        first = torch.autograd.grad(scaled, params, create_graph=True, allow_unused=True)
        curved = [(g, v) for g, v in zip(first, along, strict=True) if g is not None and g.requires_grad]
        if curved:
            torch.autograd.backward([g for g, _ in curved], [v for _, v in curved], inputs=params)

    def _take_gradient(self, wrt: Sequence[bool] | None = None, *, alone: bool = False) -> Vector:
        """Take ``p.grad`` over, without a copy, and leave None."""
        params = self._weights.params
        found = [p.grad if wrt is None or wrt[i] else None for i, p in enumerate(params)]
        for p in params:
            p.grad = None
        self.reached = [was or g is not None for was, g in zip(self.reached, found, strict=True)]
        borrowed = self._ranks.borrows(params[0].device)
        gradient = Vector(
            (_own(g, p, borrowed) for g, p in zip(found, params, strict=True)), self._weights.layout, scratch=True
        )
        (self._latest,) = gradient.terms
        if alone:
            self._ranks.average_pass([t for part in self._latest.parts for t in part])
        if self._scaler is not None:
            self.scale = self.scale * (1.0 + 0.0 * gradient.norm())  # inf and NaN become NaN here, and any number 1
            gradient = gradient / self.scale
        return gradient


def _own(g: Tensor | None, p: Tensor, borrowed: bool) -> Tensor:
    """A gradient in memory of its own (a view may be of DDP's buckets), laid out as its parameter is: foreach is fast
    on those only.
    """
    if g is None:
        return torch.zeros_like(p, requires_grad=False)
    if g.layout != torch.strided:
        raise BsamRuntimeError(
            "a parameter got a sparse gradient, which no sharpness-aware method can add up: build its nn.Embedding "
            "with sparse=False"
        )
    if borrowed or g._is_view() or g.is_conj() or g.is_neg() or g.stride() != p.stride():
        return torch.empty_like(p, requires_grad=False).copy_(g)
    return g


def _as_losses(answer: object) -> Tensor:
    if isinstance(answer, float):  # from a closure that ran backward itself
        return torch.tensor(answer)
    if answer is None:
        raise BsamRuntimeError(_NONE)
    if not isinstance(answer, Tensor):
        raise BsamTypeError(
            "the closure must return the loss as a tensor, or yield one per micro-batch; it gave "
            f"{type(answer).__name__}"
        )
    if answer.is_complex():
        raise BsamValueError(f"the loss must be real, got {answer.dtype}: return its real part or its absolute value")
    if answer.dim() > 1:
        raise BsamValueError(
            f"the loss must be a scalar, or one value per sample (1-D); it has the shape {tuple(answer.shape)}"
        )
    return answer
