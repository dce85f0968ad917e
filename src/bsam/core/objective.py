"""The mini-batch loss around ``w``: the closure, and its passes."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Generator, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..common.errors import BsamRuntimeError, BsamTypeError, BsamValueError
from .loss_scale import LossScale
from .passes import Buffers, PassPart
from .ranks import Ranks
from .step_state import Results
from .tensors import use_other_memory
from .undo import Undo
from .vector import BY_KEEP, BY_STORE, Vector
from .weights import Gradients, Weights

Closure: TypeAlias = Callable[..., Any]
Subset: TypeAlias = Tensor | slice  # of the samples of a batch
Keep: TypeAlias = Vector | Sequence[Vector] | None
Backward: TypeAlias = Callable[[Tensor, Tensor | None], None]  # called with the loss and the outputs of a micro-batch

OUTSIDE = (
    "the loss, or a part of it, was computed before this pass, and therefore not at the perturbed weights: compute the "
    "whole loss inside the closure, or detach the parts that are meant to stay constant"
)
NO_OUTPUTS = (
    "this method needs the outputs of the network, one tensor that is not detached: let the closure return a pair, as "
    "in `outputs = model(x); return loss_fn(outputs, y), outputs`"
)


_in_later_pass = ContextVar("in_later_pass", default=False)


def in_later_pass() -> bool:
    """Whether the closure is called for a pass of a step after its first one, which updates all running averages."""
    return _in_later_pass.get()


@dataclass(frozen=True)
class Evaluation:
    """A pass over the whole batch: its point, loss and gradient."""

    at: Vector | None  # relative to w; None is w itself
    loss: Tensor
    gradient: Vector


@dataclass
class LossCheck:
    """Check that a pass at perturbed weights computes its loss anew: its graph's root is not that of another pass."""

    earlier: set[Any] = field(default_factory=set)  # nodes of earlier passes
    current: list[Any] = field(default_factory=list)  # nodes of this pass

    def check(self, loss: Tensor, moved: bool, since: int) -> None:
        """Raise if the loss at perturbed weights was computed before the pass.

        Its root is then that of an earlier pass; in the first pass, it is older than the autograd sequence number
        ``since``, from the beginning of the pass.
        """
        root: Any = loss.grad_fn
        if root is None:
            return
        if moved and (root in self.earlier if self.earlier else root._sequence_nr() < since):
            raise BsamRuntimeError(OUTSIDE)
        self.current.append(root)


class Objective:
    """The loss of one mini-batch as a function of a displacement of the weights.

    ``L.grad(at=e)`` moves the weights to ``w + e``, runs the closure, takes the gradients and leaves ``p.grad`` empty.
    Every evaluation starts with the buffers from before the step and, unless ``same_draws=False``, repeats the random
    numbers of the first one. At the end the weights are restored, the direction in ``gradients`` is added to
    ``p.grad``, and the buffers are as the first evaluation left them; after an error, buffers and ``p.grad`` are
    restored, too. ``SharpnessAware.backward`` creates and ends it.
    """

    def __init__(
        self,
        closure: Closure,
        weights: Weights,
        buffers: Buffers,
        others: Sequence[PassPart] = (),
        ranks: Ranks | None = None,
        *,
        scaler: torch.amp.GradScaler | None = None,
        side_by_side: bool = False,
        loss_check: LossCheck | None = None,
        with_outputs: bool = False,
        results: Results | None = None,
    ) -> None:
        self.loss: Tensor | None = None  # from the first evaluation
        self.keep_evaluations = False  # for observers; off by default, since it keeps gradients alive
        self.evaluations: list[Evaluation] = []
        self.loss_scale = LossScale(scaler, weights) if scaler is not None and scaler.is_enabled() else None
        self._closure = closure
        self._weights = weights
        self._buffers = buffers
        self.gradients = Gradients(weights, ranks, results)
        self._parts: list[PassPart] = [weights, self.gradients, *others, buffers]
        self._ranks = ranks
        self._side_by_side = side_by_side
        self._loss_check = loss_check or LossCheck()
        self._reached: list[bool] = []  # which parameters have a gradient in the pass of ``grad_and_signals``
        self._with_outputs = with_outputs  # whether the closure returns pairs of losses and outputs
        self._passes = 0  # begun
        self._sample_losses: Tensor | None = None  # from the latest evaluation, if the closure returns them
        self._grad_enabled = torch.is_grad_enabled()
        if ranks is not None:
            ranks.begin(weights.layout.mesh is not None, weights.params)

    def end(self, failed: bool) -> None:
        """End the passes: restore the weights; if a pass failed, restore everything that it changed.

        Until :meth:`commit`, this may be called again with ``failed``.
        """
        for part in self._parts:
            part.end_step(failed)
        torch.set_grad_enabled(self._grad_enabled)  # an interrupt may have left a block without gradients too early
        if failed:
            self.commit()

    def commit(self) -> None:
        """Forget the state from before the passes: they cannot be taken back any more."""
        self._buffers.saved = False

    def restart(self) -> None:
        """Discard the passes so far: the next one is the first.

        The loss, the buffers, the random generators and the parameters that got a gradient are as they were when the
        step began. Do not use gradients from before; values that were remembered stay.
        """
        for part in self._parts:
            part.restart()
        if self.loss_scale is not None:
            self.loss_scale.restart()
        self.loss = None
        self.evaluations.clear()
        self._passes = 0

    @property
    def reached(self) -> list[bool]:
        """Whether each parameter got a gradient in one of the passes so far."""
        return self.gradients.has_grad

    @contextlib.contextmanager
    def extra_evaluations(self) -> Iterator[None]:
        """Return a context for the evaluations of observers, which must not affect the step.

        They add no parameter to the step, and they leave the gradients of the method's passes where they are.
        """
        has_grad = self.gradients.has_grad
        self.gradients.leave_in_place()
        try:
            yield
        finally:
            self.gradients.has_grad = has_grad

    def value(self, at: Vector | None = None, *, subset: Subset | None = None) -> Tensor:
        """Return the mean loss at ``w + at``, without gradients."""
        try:
            return self._evaluate(at, subset)[0]
        except RuntimeError as error:
            if "does not require grad" in str(error) and not isinstance(error, BsamRuntimeError):
                raise BsamRuntimeError(
                    "this method first evaluates the closure under torch.no_grad: return the losses, and do not "
                    "call backward in the closure"
                ) from error
            raise

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
        self,
        at: Vector | None = None,
        *,
        subset: Subset | None = None,
        wrt: Sequence[bool] | None = None,
        keep: Keep = None,
    ) -> Vector:
        """Return the gradient at ``w + at``.

        ``keep`` says which vectors the step still needs once the weights have moved: one, several, or ``()``. The
        memory of all other gradients of the step, and of ``at``, is freed before the pass, and using them raises an
        error; a sum that is kept becomes one vector. What the method has remembered is always kept. By default,
        everything is.
        """
        return self.value_and_grad(at, subset=subset, wrt=wrt, keep=keep)[1]

    def grads(self, *points: Vector) -> list[Vector]:
        """Return the gradients at several points.

        While a CUDA graph is captured, ``side_by_side`` allows two streams to work at the same time: all points except
        the first are evaluated on the second one, with other copies of the parameters and buffers.
        """
        if not self._side_by_side or not self._can_run_side_by_side():
            return [self.grad(at=at) for at in points]
        first, *others = points
        current, second = torch.cuda.current_stream(), torch.cuda.Stream()
        second.wait_stream(current)
        with Undo() as undo, undo:
            self._weights.go_elsewhere(undo, in_backup=True)
            gradients = [self.grad(at=first)]
            gradients[0].norm()  # cached: most methods need it, and later it would wait for the other stream
        # The old check keeps graphs of earlier passes alive, and with them the parameters' AccumulateGrad nodes. These
        # run on the stream that created them; without the old check, the second stream creates new ones.
        self._loss_check = LossCheck()
        with Undo() as undo, undo:
            # also after an error: a capture must not end with a stream that was not joined
            undo.callback(current.wait_stream, second)
            undo.callback(torch.cuda.set_stream, current)
            torch.cuda.set_stream(second)
            self._weights.go_elsewhere(undo)
            use_other_memory(undo, self._buffers.writable)
            gradients += [self.grad(at=at) for at in others]
            gradients[-1].norm()
        return gradients

    def _can_run_side_by_side(self) -> bool:
        """Whether passes can run in other memory, starting from the weights and buffers that the first pass saved."""
        # the overflow flag of a scaler is one tensor, which two streams must not write
        at_w = self._passes > 0 and not self._weights.moved and self.loss_scale is None
        return at_w and self._weights.on_one_gpu and torch.cuda.is_current_stream_capturing()

    def value_and_grad(
        self,
        at: Vector | None = None,
        *,
        subset: Subset | None = None,
        wrt: Sequence[bool] | None = None,
        keep: Keep = None,
    ) -> tuple[Tensor, Vector]:
        """Return the mean loss and its gradient at ``w + at``; None is ``w`` itself. See :meth:`grad` for ``keep``.

        With ``subset``, the closure is called with these indices of samples. ``wrt`` has one flag per parameter; if it
        is False, the gradient counts as zero and, except with FSDP, is not computed.
        """
        if wrt is not None and not any(wrt):
            return self.value(at, subset=subset), self._take_gradient(wrt, 1.0, without_reducer=False)
        inputs = None if wrt is None else [p for p, wanted in zip(self._weights.params, wrt, strict=True) if wanted]
        inputs = None if self._weights.layout.mesh is not None else inputs
        loss, gradient = self._run(at, subset, lambda loss, _: self._backward(loss, inputs), wrt, keep=keep)
        if self.keep_evaluations and subset is None and wrt is None:
            self._note_evaluation(at, loss, gradient)
        return loss, gradient

    def _note_evaluation(self, at: Vector | None, loss: Tensor, gradient: Vector) -> None:
        gradient.observe()
        self.evaluations.append(Evaluation(at, loss, 1.0 * gradient))  # a vector that ``map_`` leaves alone

    def _run(
        self,
        at: Vector | None,
        subset: Subset | None,
        backward: Backward,
        wrt: Sequence[bool] | None = None,
        by_closure: bool = True,
        keep: Keep = None,
    ) -> tuple[Tensor, Vector]:
        """Run one pass, and return the mean loss and the gradient."""
        without_reducer = wrt is not None or (self._ranks is not None and self._ranks.inside_ddp_forward)
        loss, batches = self._evaluate(
            at, subset, backward, without_reducer=without_reducer, by_closure=by_closure, keep=keep
        )
        return loss, self._take_gradient(wrt, batches, without_reducer)

    def grad_and_signals(self) -> tuple[Vector, list[Tensor]]:
        """Return the gradient at ``w``, and the gradient of the loss with respect to the outputs of each micro-batch.

        The closure must return, or yield, pairs of the loss and the outputs that it was computed from.
        """
        signals: list[Tensor] = []

        def backward(loss: Tensor, outputs: Tensor | None) -> None:
            assert outputs is not None
            outputs.retain_grad()
            self._backward(loss, None)
            if outputs.grad is None:
                raise BsamRuntimeError("the loss does not depend on the outputs: return those it was computed from")
            signals.append(outputs.grad)
            self._reached = [p.grad is not None for p in self._weights.params]

        loss, gradient = self._run(None, None, backward, by_closure=False)
        if self.keep_evaluations:
            self._note_evaluation(None, loss, gradient)
        return gradient, signals

    def pull_back(self, signals: Sequence[Tensor], at: Vector | None = None, *, keep: Keep = None) -> Vector:
        """Return the transposed Jacobian of the outputs at ``w + at``, times the signals of the micro-batches.

        See :meth:`grad` for ``keep``.
        """
        rest = list(signals)

        def backward(loss: Tensor, outputs: Tensor | None) -> None:
            assert outputs is not None
            outputs.backward(rest.pop(0))
            pairs = zip(self._weights.params, self._reached, strict=True)
            if not rest and any(p.grad is None and reached for p, reached in pairs):
                raise BsamRuntimeError(
                    "the loss depends on parameters that the outputs do not depend on, such as those of another head: "
                    "this method would not train them. Concatenate all outputs into one tensor"
                )

        return self._run(at, None, backward, by_closure=False, keep=keep)[1]

    def store(self, *vectors: Vector) -> None:
        """Evaluate these vectors, in the memory of gradients that no other one of them needs.

        All other gradients of the step are freed, except what the method has remembered. This saves memory where a
        combination takes the place of a gradient.
        """
        wanted = [*vectors, *self.gradients.results.vectors]
        self.gradients.store(wanted)
        self.gradients.free(wanted, BY_STORE)

    def hvp(self, v: Vector, at: Vector | None = None) -> Vector:
        """Return the Hessian at ``w + at`` times ``v``, by differentiating the gradient."""
        if self._weights.layout.mesh is not None:
            raise BsamRuntimeError("a Hessian-vector product needs second derivatives, which FSDP does not support")
        along = v.tensors(self._weights.params)

        def backward(loss: Tensor, _: Tensor | None) -> None:
            self._second_backward(loss, along)

        _, batches = self._evaluate(at, None, backward, without_reducer=True, by_closure=False)
        return self._take_gradient(None, batches, without_reducer=True)

    def _evaluate(
        self,
        at: Vector | None,
        subset: Subset | None,
        backward: Backward | None = None,
        *,
        without_reducer: bool = False,
        by_closure: bool = True,
        keep: Keep = None,
    ) -> tuple[Tensor, float]:
        """Run one pass at ``w + at``: the closure and, for every loss that it computes, ``backward``.

        Without ``backward``, the closure runs under ``torch.no_grad``. ``by_closure`` says whether it may run backward
        itself. Return the mean loss, and the number of micro-batches in units of the first one's size.
        """
        wanted = None if keep is None else self._wanted(keep)
        if at is not None and not isinstance(at, Vector):
            raise BsamTypeError(
                f"at must be a Vector, made from gradients or with optimizer.vector, got {type(at).__name__}"
            )
        if at is not None and self.keep_evaluations:
            at.observe()
        if wanted is not None:
            self.gradients.free(wanted if at is None else [*wanted, at], BY_KEEP)  # before the weights need a backup
        overflowed = self.loss_scale is not None and self.loss_scale.overflowed()
        place = None if overflowed else at  # it may be NaN, and some losses raise at NaN weights
        weights, *others = self._parts
        weights.begin_pass(self._passes, place)
        if wanted is not None:
            self.gradients.keep_only(wanted, at)
        for part in others:
            part.begin_pass(self._passes, place)
        self._passes += 1
        since = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
        total = torch.zeros(())
        batches = 0.0
        samples: list[Tensor] = []
        with Undo() as undo, undo:
            undo.callback(_in_later_pass.set, _in_later_pass.get())
            _in_later_pass.set(self._passes > 1)
            if self._ranks is not None:
                self._ranks.begin_pass(undo, without_reducer, self._weights.params)
            undo.set_grad_enabled(backward is not None)
            losses_of_batches = micro_batches(call(self._closure, subset), self._with_outputs)
            undo.callback(losses_of_batches.close)  # does not stay suspended after an error
            for losses, outputs, yielded in losses_of_batches:
                if backward is not None:
                    self._weights.check_unchanged()  # the closure may have run backward
                    self._loss_check.check(losses, self._weights.moved, since)
                samples.append(losses.detach())
                share = losses.numel() / samples[0].numel()
                mean = losses if losses.dim() == 0 else losses.mean()
                may_run_backward = by_closure and not yielded
                if backward is not None and (batches > 0 or not self._closure_ran_backward(may_run_backward)):
                    backward(mean if share == 1 else mean * share, outputs)
                total = mean.detach() if batches == 0 else total + mean.detach() * share
                batches += share
            if backward is not None:
                self._weights.check_unchanged()
        self._sample_losses = None if samples[0].dim() == 0 else samples[0] if len(samples) == 1 else torch.cat(samples)
        asked = 0 if subset is None else len(subset) if isinstance(subset, Tensor) else subset.stop or 0
        returned = len(self.sample_losses) if asked else 0
        if returned > asked or (returned < asked and isinstance(subset, Tensor)):
            raise BsamRuntimeError(
                f"the closure was asked for {asked} samples and returned {returned} losses: it must use the indices it "
                "is called with"
            )
        self._loss_check.earlier.update(self._loss_check.current)
        self._loss_check.current.clear()
        mean_loss = total if batches == 1 else total / batches
        self.loss = mean_loss if self.loss is None else self.loss
        return mean_loss, batches

    def _wanted(self, keep: Vector | Sequence[Vector]) -> list[Vector]:
        """Return the vectors that the step needs after the weights have moved."""
        vectors = [keep] if isinstance(keep, Vector) else [*keep]
        for v in vectors:
            if not isinstance(v, Vector):
                raise BsamTypeError(f"keep must be a Vector, several, or (), got {type(v).__name__}")
        return [*vectors, *self.gradients.results.vectors]

    def _closure_ran_backward(self, allowed: bool) -> bool:
        ran = any(p.grad is not None for p in self._weights.params)
        if ran and not allowed:
            raise BsamRuntimeError(
                "a closure that yields micro-batches, or whose loss this method differentiates itself, must not run "
                "backward itself: return (or yield) the loss without calling backward"
            )
        return ran

    def _backward(self, loss: Tensor, inputs: list[Tensor] | None) -> None:
        if not loss.requires_grad:
            raise BsamRuntimeError(
                "the closure returned a loss that does not require grad, so it depends on no parameter of the "
                "optimizer: was it detached, computed under torch.no_grad, or is every parameter frozen?"
            )
        scaled = loss if self.loss_scale is None else self.loss_scale.scale(loss)
        if inputs is None:
            scaled.backward()
        else:
            self._differentiate([scaled], None, inputs)

    def _second_backward(self, loss: Tensor, along: list[Tensor]) -> None:
        params = self._weights.params
        scaled = loss if self.loss_scale is None else self.loss_scale.scale(loss)
        first = torch.autograd.grad(scaled, params, create_graph=True, allow_unused=True)
        curved = [(g, v) for g, v in zip(first, along, strict=True) if g is not None and g.requires_grad]
        if curved:
            self._differentiate([g for g, _ in curved], [v for _, v in curved], params)

    def _differentiate(self, outputs: list[Tensor], along: list[Tensor] | None, inputs: list[Tensor]) -> None:
        """Add the gradients with respect to ``inputs`` to ``p.grad``.

        Not with ``backward``, even under ``no_sync``: DDP would record which parameters it reaches, and wait for their
        gradients in the next pass with the reducer.
        """
        self.gradients.add(inputs, [*torch.autograd.grad(outputs, inputs, along, allow_unused=True)])

    def _take_gradient(self, wrt: Sequence[bool] | None, batches: float, without_reducer: bool) -> Vector:
        """Return the mean gradient of the pass, averaged over ranks and not scaled."""
        gradient = self.gradients.take(wrt)
        if without_reducer and self._ranks is not None:
            self._ranks.average_pass([t for term in gradient.terms for bucket in term.buckets for t in bucket])
            if self._ranks.inside_ddp_forward and self._ranks.reduces_each_pass:
                self.gradients.has_grad = self._ranks.on_any_rank(self.gradients.has_grad)
        if self.loss_scale is not None:
            gradient = self.loss_scale.unscale(gradient)
        return gradient * (1.0 / batches)


def micro_batches(answer: object, with_outputs: bool = False) -> Generator[tuple[Tensor, Tensor | None, bool]]:
    """Iterate over the losses, or pairs of losses and outputs, that a closure returned or yields.

    Yields:
        The losses of a micro-batch, 0-dim or one per sample, its outputs, and whether the closure yielded them.
    """
    yields = isinstance(answer, Iterator)
    dim = None
    with contextlib.closing(answer) if isinstance(answer, Generator) else contextlib.nullcontext():
        for item in answer if isinstance(answer, Iterator) else (answer,):
            item, outputs = _pair(item) if with_outputs else (item, None)
            losses = as_losses(item)
            if losses.numel() == 0 and not yields:
                raise BsamRuntimeError("the closure returned an empty tensor of losses: is the batch empty?")
            if losses.numel() == 0:
                continue  # no sample of this micro-batch was selected
            if dim not in (None, losses.dim()):
                raise BsamRuntimeError(
                    "the closure yielded both mean losses (0-dim) and per-sample losses (1-D): yield only one of the "
                    "two"
                )
            dim = losses.dim()
            yield losses, outputs, yields
    if dim is None:
        raise BsamRuntimeError("the closure yielded no loss: yield one loss per micro-batch")


def _pair(item: object) -> tuple[object, Tensor]:
    if not (isinstance(item, tuple) and len(item) == 2 and isinstance(item[1], Tensor)):
        raise BsamRuntimeError(NO_OUTPUTS)
    if torch.is_grad_enabled() and not item[1].requires_grad:
        raise BsamRuntimeError(NO_OUTPUTS)
    return item


def call(closure: Closure, subset: Subset | None) -> Any:
    """Call the closure, with the indices of selected samples if ``subset`` is given."""
    if subset is None:
        try:
            return closure()
        except TypeError as error:
            if error.__traceback__ is not None and error.__traceback__.tb_next is None:  # raised by the call itself
                raise BsamTypeError(
                    f"the closure is called without arguments, but {error}: take the batch from the loop, as in "
                    "`def closure(): return loss_fn(model(x), y)`"
                ) from error
            raise
    parameters = inspect.signature(closure).parameters.values()
    if not any(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.VAR_POSITIONAL) for p in parameters):
        raise BsamTypeError(
            "this method selects samples, but the closure takes no argument: let it take their indices, as in "
            "`def closure(indices=slice(None))`"
        )
    return closure(subset)


def as_losses(answer: object) -> Tensor:
    """Convert the value that a closure returned or yielded to a tensor of losses: 0-dim, or one per sample."""
    if isinstance(answer, float):  # from a closure that ran backward itself
        return torch.tensor(answer)
    if answer is None:
        raise BsamRuntimeError("the closure returned None: return the loss, even if the closure runs backward itself")
    if not isinstance(answer, Tensor):
        raise BsamTypeError(
            f"the closure must return the loss as a tensor or yield one per micro-batch, got {type(answer).__name__}"
        )
    if answer.is_complex():
        raise BsamValueError(f"the loss must be real, got {answer.dtype}: return its real part or its absolute value")
    if answer.dim() > 1:
        raise BsamValueError(
            f"the loss must be a scalar or one value per sample (1-D), got the shape {tuple(answer.shape)}"
        )
    return answer
