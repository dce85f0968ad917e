"""The base class of all sharpness-aware optimizers."""

# The life of a step, ``optimizer.step(closure)``:
#
# 1. ``step`` clears ``p.grad`` and calls ``backward``. (Loops that clip or scale call ``backward`` and ``step``.)
# 2. ``backward`` reads the parameter groups again: ``Weights`` lists the parameters that require a gradient.
# 3. It creates an ``Objective`` L, the loss of this mini-batch around w, and calls ``direction(L)``. This is the method
#    itself, such as methods/bsam.py: it asks for gradients with ``L.grad(at=e)`` and combines them.
# 4. ``epsilon`` computes a perturbation e from a gradient and a radius. Radii are values of the parameter groups
#    (``radii``); some of them follow the learning rate (schedule.py).
# 5. ``L.grad(at=e)`` runs one pass (objective.py). It moves the weights to w + e (``Weights.move``), calls the closure,
#    runs backward on the loss unless the closure did, and turns ``p.grad`` into a ``Vector``. ``GradientMemory``
#    (weights.py) decides where each gradient is stored.
#    All passes evaluate the same function, because
#      - every pass starts with the buffers from before the step, such as batch norm's statistics (``Buffers``);
#      - every pass draws the same random numbers, unless ``same_draws=False`` (``RngReplay``).
#    Gradients are averaged over ranks, in most cases by DDP or FSDP (``Ranks``). Modules that the closure calls but
#    this optimizer does not train keep their gradients (``CalledModules``).
#    ``GraphCheck`` raises if the closure returns a loss that an earlier pass returned. With ``model=None``, the first
#    step raises if the closure runs batch norm in training mode.
# 6. The combination is lazy: ``+ - * /`` of ``Vector`` compute coefficients, but no entries. Norms and inner products
#    are computed at once, and stay on the device. If a scaled gradient is non-finite, later passes run at w, and the
#    direction is NaN, so that the scaler skips the step.
# 7. Observers, such as ``bsam.flatness.Probe``, read the passes.
# 8. ``_store`` restores the weights bit for bit from a backup (``Weights.restore``) and evaluates the direction in the
#    memory of one of the gradients. With the earlier ``p.grad`` added, this becomes ``p.grad``. The values to remember
#    (``MethodState``) and the point to step from, if that is not w (``StepState``), are kept until ``step``. If
#    ``GradScaler`` skips the step, ``zero_grad`` discards them. So does the next ``backward`` if every ``p.grad`` is
#    None, for example after ``model.zero_grad()``.
# 9. Buffers and random generators end up as the first pass left them. If a pass raises, weights, buffers and ``p.grad``
#    are as they were before ``backward``; the generators stay where the first pass left them, or, if the first pass
#    raised, where it stopped.
# 10. ``step`` moves the weights to the point to step from, runs the base optimizer on ``p.grad``, stores the remembered
#     values, and counts the step.
#
# BSAM's step is in six files: optimizer.py, objective.py, vector.py, weights.py, buffers.py and schedule.py. They call
# helpers: closure.py runs the closure; loss_scale.py works with a GradScaler; layout.py and foreach.py compute on lists
# of tensors; rng.py replays random numbers; step_state.py holds the phase and the point to step from; wrapper.py
# completes and saves parameter groups.

from __future__ import annotations

import contextlib
import inspect
import weakref
from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, ClassVar, Protocol, Self, TypedDict

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..common.checks import check_base, check_call, check_modules, check_names, missing_attribute
from ..common.errors import BsamRuntimeError, BsamTypeError, BsamValueError
from ..common.method_info import MethodInfo
from .buffers import Buffers
from .called_modules import CalledModules, refuse_batch_norm
from .closure import Closure
from .foreach import Scalar
from .layout import local
from .method_state import MethodState
from .module_calls import calls_seen
from .objective import Objective
from .ranks import Ranks
from .rng import RngReplay
from .schedule import LR_SEEN, LR_START, note_lr, scheduled
from .step_state import StepState
from .vector import TINY, Coefficient, PerGroup, Vector
from .weights import GradientMemory, Weights
from .wrapper import ENTRY_NAMES, METHOD, PERTURB, OptimizerWrapper


class PassObserver(Protocol):
    """An object that observes the passes of some steps, such as :class:`bsam.flatness.Probe`."""

    def due(self, step: int) -> bool:
        """Whether to observe this step."""

    def observe(self, optimizer: SharpnessAware, L: Objective) -> None:
        """Read ``L.evaluations`` before the weights are restored; further evaluations are allowed."""


class StepOptions(TypedDict, total=False):
    """The arguments that all methods share; see :class:`SharpnessAware`."""

    m_sharpness: bool
    same_draws: bool


class SharpnessAware(MethodInfo, OptimizerWrapper):
    """A method that combines gradients around ``w`` into one direction, which the base optimizer uses as its gradient.

    A method implements :meth:`direction` and passes its settings to this constructor; they become values of the
    parameter groups, and each group may override them. A group with ``perturb=False`` is not perturbed: all its radii
    are 0, but its gradients still count in norms. ``param_groups`` and ``state`` are the base optimizer's, so that
    schedulers, clipping and ``GradScaler`` work as usual.

    Args:
        base: the optimizer that takes the step, built on the parameters.
        model: the network that the closure calls, or its DDP, FSDP or compiled wrapper. Its buffers, such as batch
            norm's statistics, are updated once per step. None if it has no buffers. If the closure also runs other
            modules (the discriminator when a generator is trained), pass a list of all of them, the trained one first:
            all their buffers are updated once per step, and parameters that are not in ``base`` keep their gradients.
        settings: the method's group values by name; names that start with ``rho`` are radii.
        m_sharpness: let each DDP rank perturb along its own gradient, and average only the direction.
        same_draws: let all passes of a step see the same random draws (dropout, noise) from torch's default generators,
            on the CPU and on CUDA devices; after the step the generators are where one pass would have left them.
            With False, every pass draws new numbers. Python's ``random``, NumPy and other torch generators are
            left alone either way. In a CUDA graph, passes share their draws only if the :meth:`generators` were
            registered with the graph.
    """

    model: nn.Module | None
    others: tuple[nn.Module, ...]  # modules that the closure runs besides the model
    m_sharpness: bool
    same_draws: bool
    check: ClassVar[Callable[[SharpnessAware, Closure], list[str]]]  # ``bsam.check``, above this package, sets it
    side_by_side: bool = False  # run the passes of ``L.grads`` at the same time, in a captured step on one GPU
    _step_state: StepState
    _check_batch_norm: bool

    def __init_subclass__(cls, **arguments: Any) -> None:
        """Show the options by name in the signature of a method that passes them on as ``**options``."""
        super().__init_subclass__(**arguments)
        signature = inspect.signature(cls.__init__)
        _, *parameters = signature.parameters.values()
        if parameters and parameters[-1].name == "options":
            parent = next(c for c in cls.__mro__[1:] if issubclass(c, SharpnessAware))
            inherited = getattr(parent, "__signature__", inspect.signature(SharpnessAware.__init__)).parameters.values()
            known = {p.name for p in parameters}
            parameters[-1:] = [p for p in inherited if p.kind == p.KEYWORD_ONLY and p.name not in known]
        cls.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]

    def __new__(cls, *arguments: Any, **named: Any) -> Self:
        """Check the arguments first, so that a call in the style of another package gets a clear error."""
        if arguments or named:  # copy and pickle pass none
            check_call(cls, arguments, named)
        return super().__new__(cls)

    def __init__(
        self,
        base: Optimizer,
        model: nn.Module | Sequence[nn.Module] | None,
        settings: dict[str, Any],
        *,
        m_sharpness: bool = False,
        same_draws: bool = True,
    ) -> None:
        check_base(base)
        modules = check_modules(model, base)
        for name, value in (("m_sharpness", m_sharpness), ("same_draws", same_draws)):
            if not isinstance(value, bool):
                raise BsamValueError(f"{name} must be True or False, got {value!r}")
        settings = {**settings, **dict.fromkeys(self.numbers), "steps_taken": 0, METHOD: self.method()}
        if self.scheduled_radii:
            settings |= {LR_START: None, LR_SEEN: None}
        settings[ENTRY_NAMES] = (*settings, ENTRY_NAMES, *self.vectors)
        for group in base.param_groups:
            check_names(group, settings, base.defaults)
        groups = [self.completed({**settings, **group}) for group in base.param_groups]  # raises before any write
        self.__setstate__(
            {
                "base": base,
                "model": modules[0] if modules else None,
                "others": modules[1:],
                "m_sharpness": m_sharpness,
                "same_draws": same_draws,
                "defaults": {**base.defaults, **settings},
                "settings": settings,
                "_method_state": MethodState(self.vectors, self.numbers),
            }
        )
        for group, completed in zip(base.param_groups, groups, strict=True):
            group.update(completed)

    def __getattr__(self, name: str) -> Any:
        if name in ("train", "eval"):  # schedule-free optimizers have these
            return getattr(self.base, name)
        raise missing_attribute(self, name)

    # For authors of methods.

    @abstractmethod
    def direction(self, L: Objective) -> Vector:
        """Return the method's direction, computed from gradients of ``L`` around ``w``."""

    def step_kind(self) -> Hashable:
        """Return the kind of the next step. Steps of one kind launch the same kernels and can share a CUDA graph."""
        return None

    def radius(self, group: dict[str, Any], name: str) -> Scalar:
        """Return the radius ``name`` of a group in this step; 0 if the group has ``perturb=False``."""
        if not group.get(PERTURB, True):
            return 0.0
        return scheduled(group, name, self.scheduled_radii[name]) if name in self.scheduled_radii else group[name]

    def radii(self, name: str) -> Coefficient:
        """Return the radius ``name`` in this step: one number, or one per group if they differ."""
        values = [self.radius(group, name) for group in self.param_groups]
        alike = not isinstance(values[0], Tensor) and all(not isinstance(v, Tensor) and v == values[0] for v in values)
        return values[0] if alike or len(values) == 1 else PerGroup(values)

    def epsilon(self, v: Vector, radius: str, length: Tensor | None = None) -> Vector:
        """Return the perturbation ``rho v / length``; ``length`` defaults to ``|v|``."""
        return v * self.radii(radius) / ((v.norm() if length is None else length) + TINY)

    @property
    def params(self) -> list[Tensor]:
        """The parameters that require a gradient in this step."""
        return self._weights.params

    def vector(self, tensors: Iterable[Tensor]) -> Vector:
        """Return a vector that shares memory with these tensors, one for each of :attr:`params`."""
        return Vector(tensors, self._weights.layout)

    def start_from(self, offset: Vector) -> None:
        """Let the base optimizer step from ``w + offset``; several ``backward`` calls use the mean of their offsets."""
        self._step_state.offset = offset

    def remember(self, name: str, value: Vector | float) -> None:
        """Remember a vector or a number once the step is taken; ``vectors`` or ``numbers`` must list the name.

        Values computed under DDP's ``no_sync`` are ignored: they differ between ranks, which could then diverge.
        """
        kind = "vectors" if isinstance(value, Vector) else "numbers"
        if name not in getattr(self, kind):
            raise BsamValueError(f"{name!r} must be listed in {type(self).__name__}.{kind}, so that it is saved")
        if not self.ranks.under_no_sync:
            self._method_state.remember(name, value, self._weights)

    def recall(self, name: str, missing: Vector | None = None) -> Any:
        """Return the value that an earlier step remembered under ``name``; ``missing`` if there is none.

        A parameter that had no gradient yet has no entry in a vector, for example because it was frozen: there the
        vector has the entries of ``missing``, or zeros.
        """
        if name in self.numbers:
            return self.param_groups[0][name]
        return self._method_state.recall(name, self._weights, missing)

    def mean_over_ranks(self, number: float) -> float:
        """Average a number computed from gradients over ranks under DDP's ``no_sync``; otherwise return it unchanged.

        All ranks get the same result, except with ``m_sharpness``.
        """
        return self.ranks.mean(number)

    def mean_losses(self, losses: list[float]) -> list[float]:
        """Average the losses of this rank's part of the batch over ranks, if gradients are averaged."""
        return self.ranks.mean_losses(losses, self._weights.mesh)

    # For users.

    def backward(self, closure: Closure, scaler: torch.amp.GradScaler | None = None) -> Tensor:
        """Add this method's direction to ``p.grad``, where ``loss.backward()`` would add the gradient.

        If the closure raises, the weights, the buffers of ``model`` and ``p.grad`` are as they were before the call.
        Every pass must compute the loss from scratch: a loss that was computed outside the closure raises an error.

        Args:
            closure: returns the loss, or one loss per sample; or runs ``backward`` itself and returns the loss; or
                yields one loss per micro-batch.
            scaler: the ``torch.amp.GradScaler`` in use. The direction stays scaled, for ``unscale_`` and
                ``scaler.step``. A closure that runs ``backward`` itself must scale the loss:
                ``scaler.scale(loss).backward()``.

        Returns:
            The loss at ``w``, detached.
        """
        if (itself := self.itself()) is not self:
            return SharpnessAware.backward(itself, closure, scaler)
        self._begin(closure)
        with self._step_state.in_backward(), self._objective(closure, scaler) as L:
            observers = [observer for observer in self.observers if observer.due(self.t)]
            L.keep_evaluations = bool(observers)
            with calls_seen(refuse_batch_norm) if self._check_batch_norm else contextlib.nullcontext():
                d = self.direction(L)
            self._check_batch_norm = False
            if not isinstance(d, Vector):
                raise BsamTypeError(f"{type(self).__name__}.direction must return a Vector, got {type(d).__name__}")
            d = L.loss_scale.scale_direction(d)
            if L.loss_scale.overflowed():  # the scaler will skip this step
                self._step_state.offset, observers = None, []
            with L.extra_evaluations():
                for observer in observers:
                    observer.observe(self, L)
            self._store(d, L)
            self.ranks.warn_if_not_wrapped()
        return L.loss  # type: ignore[return-value]

    def _begin(self, closure: Closure) -> None:
        """Read the parameter groups again; if ``p.grad`` was cleared, discard the prepared step."""
        if not callable(closure):
            raise BsamTypeError(f"closure must be a function that computes the loss, got {type(closure).__name__}")
        if self._step_state.phase == "in_backward":
            raise BsamRuntimeError(
                "optimizer.backward was called from inside the closure: a closure must only compute the loss (and may "
                "call loss.backward())"
            )
        self._weights.refresh(self.param_groups)
        if not self.params:
            raise BsamRuntimeError("no parameter of base requires a gradient: unfreeze at least one of them")
        self._step_state.note_stale()
        if all(p.grad is None for p in self.params):
            self._reset()
        self._method_state.begin()

    def _objective(self, closure: Closure, scaler: torch.amp.GradScaler | None) -> Objective:
        modules, two_streams = self._make_called_modules(), self.side_by_side and self.ranks.ddp is None
        return Objective(
            closure, self._weights, modules, self._buffers, self.ranks, self._rng, self._gradients, scaler,
            side_by_side=two_streams,
        )  # fmt: skip

    def _store(self, d: Vector, L: Objective) -> None:
        """Add the direction to ``p.grad``, and keep the offset and the values to remember for ``step``."""
        if not any(L.has_grad):
            raise BsamRuntimeError(
                "the loss does not depend on any parameter of base: does the closure call the model that base was "
                "built on?"
            )
        self._weights.restore()  # vectors may share memory with the parameters
        offset = self._step_state.offset
        if offset is not None:
            offset = Vector(offset.tensors(), offset.layout)  # a copy: evaluating d overwrites gradients
        self._fill(d, L.earlier_grads, L.has_grad)
        if offset is not None:
            self._step_state.keep(offset, local=self.ranks.ddp is not None and not self.ranks.reduces_each_pass)
        self._method_state.stage([p for p, has_grad in zip(self.params, L.has_grad, strict=True) if has_grad])

    def itself(self) -> SharpnessAware:
        """Return the optimizer, even if ``self`` is a framework's wrapper whose class derives from the optimizer's.

        Lightning has such a wrapper. Its class attributes hide the optimizer's attributes, and assignments to it do not
        reach the optimizer.
        """
        return self._itself() or self

    @contextlib.contextmanager
    def trial(self, closure: Closure, graph_check: Callable[[list[Tensor]], Any]) -> Iterator[Objective]:
        """Return a context for evaluations that prepare no step and leave no trace, for :meth:`check`.

        Args:
            closure: as in :meth:`step`.
            graph_check: called with the parameters; returns the ``GraphCheck`` for these evaluations.
        """
        phase = self._step_state.phase
        if phase == "in_backward":
            raise BsamRuntimeError("check was called from inside the closure: call it before training")
        self._weights.refresh(self.param_groups)
        rng, gradients = RngReplay(enabled=True), GradientMemory()
        modules, check = self._make_called_modules(), graph_check(self.params)
        L = Objective(closure, self._weights, modules, Buffers(), self.ranks, rng, gradients, graph_check=check)
        self._step_state.phase = "in_backward"
        try:
            yield L
        finally:
            L.close(failed=True)
            self._step_state.phase = phase

    @property
    def stale_gradients(self) -> bool:
        """Whether a ``backward`` has added to a direction that ``step()`` had used already, since ``zero_grad``."""
        return self._step_state.stale

    def save_buffers(self) -> None:
        """Save the buffers. Call this if a framework runs the first pass of a step before it calls :meth:`backward`."""
        self._buffers.save(self.called_modules)

    @property
    def called_modules(self) -> tuple[nn.Module, ...]:
        """The modules that the closure runs, the trained one first."""
        return () if self.model is None else (self.model, *self.others)

    def _make_called_modules(self) -> CalledModules:
        """Return an object that, for one step, freezes the called modules' parameters that are not in ``base``."""
        known = {p for group in self.param_groups for p in group["params"]} if self.others else set()
        return CalledModules(self.called_modules, known)

    def _fill(self, d: Vector, earlier: list[Tensor | None], has_grad: list[bool]) -> None:
        """Set ``p.grad = earlier + d``, in the memory of this step's gradients."""
        params, buckets = self._weights.params, d.materialize_()
        has_grad, entries = self.ranks.has_grad_on_any_rank(has_grad), self._weights.layout.join(buckets)
        both = [(t, local(g)) for t, g in zip(entries, earlier, strict=True) if g is not None]
        self.ranks.sync([g for _, g in both], entries)
        if both:
            torch._foreach_add_([t for t, _ in both], [g for _, g in both])
        for p, t, g, has in zip(params, self._weights.layout.join(buckets, params), earlier, has_grad, strict=True):
            if has or g is not None:
                p.grad = t

    def step(self, closure: Closure | None = None) -> Tensor | None:  # type: ignore[override]
        """Clear ``p.grad``, call :meth:`backward` and run the base optimizer's step.

        Without a closure, run the base optimizer's step on the direction that :meth:`backward` prepared.

        Returns:
            The loss at ``w`` before the step; None without a closure.
        """
        loss = None
        # a closure that calls step must not start another backward: check_ready raises instead
        if closure is not None and self._step_state.phase != "in_backward":
            self.zero_grad()
            loss = self.backward(closure)
        with self._step_state.in_step():
            try:
                start = self._step_state.start(self.ranks)
                if start is not None and any(p.grad is not None for p in self.params):  # otherwise p.grad was cleared
                    self._weights.move(start)
                self.base.step()
                self._weights.commit()
            finally:
                self._weights.restore()  # nothing to do after a commit
        self._method_state.commit(self.param_groups)
        for group in self.param_groups:
            if group.get(LR_SEEN) is not None:
                note_lr(group)
        self._reset()
        if closure is None:
            self._step_state.note_used(self.params[0])
        self._count()
        return loss

    def _count(self) -> None:
        for group in self.param_groups:
            group["steps_taken"] += 1

    def count_step(self) -> None:
        """Count a step that a CUDA graph replays. Call this before every replay except the first.

        The capture has already counted the step of the first replay. This method also sets the :meth:`generators` to
        the states of torch's default generators.
        """
        self._rng.update_clones()
        self._count()

    def generators(self) -> list[torch.Generator]:
        """Return generators that let the later passes of a captured step repeat the draws of the first.

        Call this after a few steps, when the number of passes is known, and register the generators before the capture.
        Without them, every pass of a replayed step draws new numbers. The list is empty with ``same_draws=False`` and
        on a CPU. :meth:`count_step` updates the generators.

        Example::

            graph = torch.cuda.CUDAGraph()
            for generator in optimizer.generators():
                graph.register_generator_state(generator)
            with torch.cuda.graph(graph):
                loss = optimizer.step(closure)
        """
        return self._rng.make_clones(self._weights.layout.devices)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear ``p.grad`` and discard the step that :meth:`backward` prepared."""
        super().zero_grad(set_to_none)
        self._step_state.stale = False
        if self._step_state.phase != "in_backward":  # a closure may call zero_grad, as torch's closures do
            self._reset()

    def __getstate__(self) -> dict[str, Any]:
        transient = {"_weights", "_buffers", "_gradients", "ranks", "_rng", "_step_state", "_itself", "observers"}
        transient.add("step")  # schedulers patch it on the instance
        return {k: v for k, v in self.__dict__.items() if k not in transient and not k.startswith("_optimizer_")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # also creates the hooks; Optimizer.__init__ would create parameter groups
        self._weights, self._buffers, self._gradients = Weights(), Buffers(), GradientMemory()
        self._step_state, self._itself = StepState(), weakref.ref(self)
        self.base.register_step_pre_hook(self._step_state.check_base_step)
        self.ranks, self._rng = Ranks(self.model, self.m_sharpness), RngReplay(self.same_draws)
        self.observers: list[PassObserver] = []
        self._check_batch_norm = self.model is None  # first backward only: BatchNorm statistics would not be restored
        self._reset()

    def _reset(self) -> None:
        self._step_state.clear()
        self._method_state.discard()
        self.ranks.needs_sync = False
