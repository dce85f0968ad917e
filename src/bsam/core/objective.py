"""The mini-batch loss around ``w``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Self

import torch
from torch import Tensor

from ..common.errors import BsamRuntimeError
from .buffers import Buffers
from .called_modules import CalledModules
from .closure import Closure, run_closure
from .graph_check import GraphCheck
from .loss_scale import LossScale
from .ranks import Ranks
from .rng import RngReplay
from .tensors import other_memory
from .vector import Vector
from .weights import GradientMemory, Weights


@dataclass(frozen=True)
class Evaluation:
    """A pass over the whole batch: its point, loss and gradient."""

    at: Vector | None  # relative to w; None is w itself
    loss: Tensor
    gradient: Vector


class Objective:
    """The loss of one mini-batch as a function of a displacement of the weights.

    ``L.grad(at=e)`` moves the weights to ``w + e``, runs the closure, takes the gradients and leaves ``p.grad`` empty.
    Every evaluation starts with the buffers from before the step and, if ``rng`` is enabled, repeats the random numbers
    of the first one. An objective is a context manager: on exit the weights are restored, and the buffers are as the
    first evaluation left them; after an error, buffers and ``p.grad`` are restored, too.

    Args:
        closure: returns the loss (0-dim, or one per sample); or runs ``backward`` itself and returns it; or yields one
            loss per micro-batch. Methods that select samples also call it with their indices.
        weights: the parameters, refreshed for this step.
        modules: the modules that the closure calls.
        buffers: saves and restores the buffers of these modules.
        ranks: averages gradients over ranks.
        rng: replays random draws.
        gradients: decides where gradients are stored.
        scaler: the ``torch.amp.GradScaler`` in use, if any.
        side_by_side: whether ``grads`` may run passes at the same time.
        graph_check: detects a loss that was computed outside the closure; by default it looks only at the root of the
            graph.
    """

    def __init__(
        self,
        closure: Closure,
        weights: Weights,
        modules: CalledModules,
        buffers: Buffers,
        ranks: Ranks,
        rng: RngReplay,
        gradients: GradientMemory,
        scaler: torch.amp.GradScaler | None = None,
        *,
        side_by_side: bool = False,
        graph_check: GraphCheck | None = None,
    ) -> None:
        self.loss: Tensor | None = None  # from the first evaluation
        self.has_grad = [False] * len(weights.params)  # whether a parameter got a gradient in some pass
        self.keep_evaluations, self.evaluations = False, list[Evaluation]()  # off by default: keeps gradients alive
        self.earlier_grads = [p.grad for p in weights.params]  # from before the first pass
        self._closure, self._weights, self._modules, self._ranks, self._rng = closure, weights, modules, ranks, rng
        self._buffers, self._gradients, self._side_by_side = buffers, gradients, side_by_side
        self._graph_check = graph_check or GraphCheck(weights.params)
        ranks.begin(weights.sharded, weights.params)
        rng.begin()
        gradients.begin(weights)
        self.loss_scale = LossScale(scaler, weights)
        self._sample_losses: Tensor | None = None  # from the latest evaluation, if the closure returns them

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        closed = False
        try:
            self.close(failed=error is not None)
            closed = True
        finally:
            if not closed:  # interrupted by Ctrl-C: the weights must not stay perturbed
                self.close(failed=True)

    def close(self, failed: bool) -> None:
        """Restore the weights, the modules and the random generators; if a pass failed, also buffers and gradients.

        May be called again after an interrupt.
        """
        self._weights.restore()
        self._modules.restore()
        self._rng.close()
        if failed:
            for p, g in zip(self._weights.params, self.earlier_grads, strict=True):
                p.grad = g
        self._buffers.close(failed)  # last, so that after an interrupt above, the second call can restore them

    @contextlib.contextmanager
    def extra_evaluations(self) -> Iterator[None]:
        """Return a context for the evaluations of observers, which must not affect the step.

        They do not change :attr:`has_grad`, so they add no parameter to the step, and they leave the gradients of the
        method's passes where they are.
        """
        has_grad = self.has_grad
        self._gradients.leave_in_place()
        try:
            yield
        finally:
            self.has_grad = has_grad

    def value(self, at: Vector | None = None, *, subset: Tensor | None = None) -> Tensor:
        """Return the mean loss at ``w + at``, without gradients."""
        with self._evaluation(at), torch.no_grad():
            try:
                loss, _ = self._mean_loss(subset)
            except RuntimeError as error:
                if "does not require grad" in str(error):
                    raise BsamRuntimeError(
                        "this method first evaluates the closure under torch.no_grad: return the losses, and do not "
                        "call backward in the closure"
                    ) from error
                raise
        return self._remember_first_loss(loss)

    def losses(self, at: Vector | None = None) -> Tensor:
        """Return one loss per sample at ``w + at``, without gradients."""
        self.value(at)
        return self.sample_losses

    @property
    def sample_losses(self) -> Tensor:
        """The per-sample losses of the latest evaluation."""
        if self._sample_losses is None:
            raise BsamRuntimeError(
                "this method selects samples by their losses, but the closure returned the mean: return one loss per "
                "selected sample (reduction='none'), as in `def closure(indices=slice(None)): return "
                "cross_entropy(model(x[indices]), y[indices], ...)`"
            )
        return self._sample_losses

    def grad(
        self, at: Vector | None = None, *, subset: Tensor | None = None, wrt: Sequence[bool] | None = None
    ) -> Vector:
        """Return the gradient at ``w + at``."""
        return self.value_and_grad(at, subset=subset, wrt=wrt)[1]

    def grads(self, *points: Vector) -> list[Vector]:
        """Return the gradients at several points.

        They are computed in turn. While a CUDA graph is captured, ``side_by_side`` allows two streams to work at the
        same time: all points except the first are evaluated on the second stream, with other copies of the parameters
        and buffers.
        """
        if not self._can_run_side_by_side():
            return [self.grad(at=at) for at in points]
        first, *others = points
        current, second = torch.cuda.current_stream(), torch.cuda.Stream()
        second.wait_stream(current)
        with self._weights.elsewhere(in_backup=True):
            gradients = [self.grad(at=first)]
            gradients[0].norm()  # cached: most methods need it, and later it would wait for the other stream
        # The old check keeps graphs of earlier passes alive, and with them the parameters' AccumulateGrad nodes. These
        # run on the stream that created them; without the old check, the second stream creates new ones.
        self._graph_check = GraphCheck(self._weights.params)
        try:
            with torch.cuda.stream(second), self._weights.elsewhere(), other_memory(self._buffers.writable):
                gradients += [self.grad(at=at) for at in others]
                gradients[-1].norm()
        finally:
            current.wait_stream(second)  # also after an error: a capture must not end with a stream that was not joined
        return gradients

    def _can_run_side_by_side(self) -> bool:
        """Whether :meth:`grads` may use two streams.

        Only after the first pass of the step, because later passes start from saved weights and buffers and can
        therefore run in other memory; and only while the parameters are at ``w``.
        """
        return (
            self._side_by_side
            and self.loss is not None
            and not self.loss_scale.in_use  # the overflow flag of all passes is one tensor
            and not self._weights.moved
            and self._weights.on_one_gpu
            and torch.cuda.is_current_stream_capturing()
        )

    def value_and_grad(
        self, at: Vector | None = None, *, subset: Tensor | None = None, wrt: Sequence[bool] | None = None
    ) -> tuple[Tensor, Vector]:
        """Return the mean loss and its gradient at ``w + at``.

        Args:
            at: the displacement; None is ``w`` itself.
            subset: the samples to use; the closure is called with these indices.
            wrt: one flag per parameter; if False, its gradient counts as zero and, except with FSDP, is not computed.
        """
        if wrt is not None and not any(wrt):
            return self.value(at, subset=subset), self._take_gradient()
        inputs = None if wrt is None else [p for p, wanted in zip(self._weights.params, wrt, strict=True) if wanted]
        without_reducer = wrt is not None or self._ranks.inside_ddp_forward
        backward = partial(self._backward, inputs=None if self._weights.sharded else inputs)
        with self._evaluation(at, without_reducer=without_reducer), torch.enable_grad():
            loss, batches = self._mean_loss(subset, backward)
        gradient = self._take_gradient(wrt, without_reducer=without_reducer) * (1.0 / batches)
        if self.keep_evaluations and subset is None and wrt is None:
            self.evaluations.append(Evaluation(at, loss, gradient))
        return self._remember_first_loss(loss), gradient

    def evaluated(self, v: Vector) -> Vector:
        """Return a combination of gradients as a single term. This overwrites the first gradient: do not use it again.

        If an observer reads the gradients, the result is in new memory.
        """
        return v.evaluate_(copy=self.keep_evaluations)

    def hvp(self, v: Vector, at: Vector | None = None) -> Vector:
        """Return the Hessian at ``w + at`` times ``v``, by differentiating the gradient."""
        if self._weights.sharded:
            raise BsamRuntimeError("a Hessian-vector product needs second derivatives, which FSDP does not support")
        backward = partial(self._second_backward, along=v.tensors(self._weights.params))
        with self._evaluation(at, without_reducer=True), torch.enable_grad():
            loss, batches = self._mean_loss(None, backward, closure_may_run_backward=False)
        self._remember_first_loss(loss)
        return self._take_gradient(without_reducer=True) * (1.0 / batches)

    @contextlib.contextmanager
    def _evaluation(self, at: Vector | None, *, without_reducer: bool = False) -> Iterator[None]:
        """Return the context of one pass: moved weights, the buffers from before the step, the first pass's draws."""
        if at is None or self.loss_scale.overflowed():  # then ``at`` may be NaN, and some losses raise at NaN weights
            self._weights.restore()
        else:
            self._weights.move(at)
        self._gradients.begin_pass()
        if self.loss is None:  # the first evaluation
            self._modules.freeze_others()
            for p in self._weights.params:
                p.grad = None
        self._buffers.begin_pass(self._modules.all)
        self._rng.begin_pass(self._weights.layout.devices)
        with self._ranks.pass_context(without_reducer, self._weights.params):
            yield
        self._rng.end_pass()

    def _remember_first_loss(self, loss: Tensor) -> Tensor:
        self.loss = loss if self.loss is None else self.loss
        return loss

    def _mean_loss(
        self,
        subset: Tensor | None,
        backward: Callable[[Tensor], None] | None = None,
        *,
        closure_may_run_backward: bool = True,
    ) -> tuple[Tensor, float]:
        """Run the closure. Return the mean loss, and the number of micro-batches in units of the first one's size."""

        def use(losses: Tensor, mean: Tensor, first: bool, yields: bool) -> None:
            if torch.is_grad_enabled():
                self._graph_check.check(losses, self._weights.moved)
            if backward is not None and (
                not first or not self._closure_ran_backward(allowed=closure_may_run_backward and not yields)
            ):
                backward(mean)

        self._graph_check.begin_pass()
        loss, batches, self._sample_losses = run_closure(self._closure, subset, use)
        if subset is not None and len(self.sample_losses) != len(subset):
            raise BsamRuntimeError(
                f"the closure was asked for {len(subset)} samples and returned {len(self.sample_losses)} losses: it "
                "must use the indices it is called with"
            )
        return loss, batches

    def _closure_ran_backward(self, allowed: bool) -> bool:
        ran = any(p.grad is not None for p in self._weights.params)
        if ran and not allowed:
            raise BsamRuntimeError(
                "a closure that yields micro-batches, or whose loss is differentiated twice, must not run backward "
                "itself: return (or yield) the loss without calling backward"
            )
        return ran

    def _backward(self, loss: Tensor, inputs: list[Tensor] | None) -> None:
        if not loss.requires_grad:
            raise BsamRuntimeError(
                "the closure returned a loss that does not require grad, so it depends on no parameter of the "
                "optimizer: was it detached, computed under torch.no_grad, or is every parameter frozen?"
            )
        scaled = self.loss_scale.scale(loss)
        if inputs is None:
            scaled.backward()
        else:
            self._differentiate([scaled], None, inputs)

    def _second_backward(self, loss: Tensor, along: list[Tensor]) -> None:
        params = self._weights.params
        first = torch.autograd.grad(self.loss_scale.scale(loss), params, create_graph=True, allow_unused=True)
        curved = [(g, v) for g, v in zip(first, along, strict=True) if g is not None and g.requires_grad]
        if curved:
            self._differentiate([g for g, _ in curved], [v for _, v in curved], params)

    def _differentiate(self, outputs: list[Tensor], along: list[Tensor] | None, inputs: list[Tensor]) -> None:
        """Add the gradients with respect to ``inputs`` to ``p.grad``."""
        if not self._ranks.records_used_parameters:
            torch.autograd.backward(outputs, along, inputs=inputs)
            return
        for p, g in zip(inputs, torch.autograd.grad(outputs, inputs, along, allow_unused=True), strict=True):
            if g is not None:
                p.grad = g.clone() if p.grad is None else p.grad + g

    def _take_gradient(self, wrt: Sequence[bool] | None = None, *, without_reducer: bool = False) -> Vector:
        """Return ``p.grad`` as a vector, copied only if necessary, and set ``p.grad`` to None."""
        params = self._weights.params
        grads = [p.grad if wrt is None or wrt[i] else None for i, p in enumerate(params)]
        for p in params:
            p.grad = None
        self.has_grad = [had or g is not None for had, g in zip(self.has_grad, grads, strict=True)]
        gradient = self._gradients.take(grads)
        if without_reducer:
            self._ranks.average_pass([t for term in gradient.terms for bucket in term.buckets for t in bucket])
        return self.loss_scale.unscale(gradient)
