"""The base class of all sharpness-aware optimizers."""

# One step of BSAM runs through twelve files: this one, methods/bsam.py, frameworks.py, wrapper.py, schedule.py,
# objective.py, weights.py, passes.py, step_state.py, vector.py, tensors.py and undo.py.
#
# 1. ``SharpnessAware.step`` begins it: it raises if a framework calls it the wrong way (frameworks.py), clears
#    ``p.grad`` and calls ``backward``. (Loops that clip or scale call both.)
# 2. ``backward`` checks the parameter groups if they were edited (wrapper.py), reads them again (``Weights.refresh``),
#    creates an ``Objective`` L, the loss of this mini-batch around w, and calls ``direction(L)``. This is the method
#    itself, in methods/bsam.py: it asks for gradients with ``L.grad(at=e)`` and combines them. ``epsilon`` computes e
#    from a gradient and a radius, which is a value of the parameter groups and may follow the learning rate
#    (schedule.py).
# 3. ``L.grad(at=e)`` runs one pass (``Objective._evaluate``). First, ``begin_pass`` of every part of a pass prepares
#    it: ``Weights`` moves the weights to w + e, ``Gradients`` has ``p.grad`` empty, ``RngReplay`` lets all passes draw
#    the same random numbers, and ``Buffers`` lets all passes start with the buffers from before the step. Then it calls
#    the closure, runs backward on its losses unless the closure did, and turns ``p.grad`` into a ``Vector``. With
#    ``keep``, the memory of gradients that the step no longer needs is freed as soon as the weights have moved.
# 4. The combination is lazy: ``+ - * /`` of ``Vector`` compute coefficients, but no entries. Norms and inner products
#    are computed at once, on lists of tensors (tensors.py), and stay on the device.
# 5. ``L.end`` ends the passes: it calls ``end_step`` of every part. ``Weights`` copies w back from a backup, bit for
#    bit; ``Gradients`` evaluates the values to remember and the direction in the memory of the gradients, and writes
#    the direction to ``p.grad``, with the earlier ``p.grad`` added; buffers and generators are as the first pass left
#    them. If ``backward`` raises, weights, buffers and ``p.grad`` are as before; the generators stay where the first
#    pass left them or stopped. The same holds after Ctrl-C, at any point: see undo.py. The assignment of the phase
#    "ready" is the point of no return.
# 6. ``step`` runs the base optimizer on ``p.grad``, stores the values to remember in its state, and counts the step.
#    Until then, they wait in ``PreparedStep``, with the point to step from if that is not w. ``zero_grad`` discards
#    them; so does the next ``backward`` if every ``p.grad`` is None.
#
# Other files are used only if needed: loss_scale.py with a GradScaler (if a scaled gradient is non-finite, later passes
# run at w and the direction is NaN, so that it skips the step); ranks.py with several processes; calls.py in the first
# step with ``model=None``.

from __future__ import annotations

import inspect
import weakref
from abc import abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from typing import Any, ClassVar, Protocol, Self, TypeAlias, TypedDict

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ..common.checks import check_base, check_call, check_flag, check_modules, check_names, missing_attribute
from ..common.errors import BsamRuntimeError, BsamTypeError, BsamValueError
from ..common.method_info import MethodInfo, Need
from .calls import observe_calls, refuse_batch_norm
from .frameworks import check_callers
from .objective import Closure, LossCheck, Objective
from .passes import Buffers, OtherModules, PassPart, RngReplay
from .ranks import Ranks
from .schedule import COUNTER, LR_SEEN, LR_START, START, WARMUP, count_on_device, note_lr, scheduled, warmed_up
from .step_state import PreparedStep, Results
from .tensors import Scalar, local, wide_dtype
from .undo import Undo
from .vector import TINY, Coefficient, PerGroup, Vector
from .weights import Gradients, Weights
from .wrapper import ENTRY_NAMES, IN_NORM, METHOD, PERTURB, OptimizerWrapper

NOT_READY = {
    "idle": "step() has nothing to step with: call backward(closure) first, or step(closure)",
    "failed": "the last backward raised, so there is nothing to step with: call backward(closure) again",
    "in_step": "step was called while a step is under way",
    "stepped": "the last step was taken, but raised afterwards: call optimizer.zero_grad() before the next one",
    "in_backward": "step was called from inside the closure: a closure must only compute the loss",
}


class PassObserver(Protocol):
    """An object that observes the passes of some steps, such as :class:`bsam.flatness.Probe`."""

    def due(self, step: int) -> bool:
        """Whether to observe this step."""

    def observe(self, optimizer: SharpnessAware, L: Objective) -> None:
        """Read ``L.evaluations`` before the weights are restored; further evaluations are allowed."""


Modules: TypeAlias = nn.Module | Sequence[nn.Module] | None  # what the closure calls, the trained one first


class StepOptions(TypedDict, total=False):
    """The arguments that all methods share; see :class:`SharpnessAware`."""

    m_sharpness: bool
    same_draws: bool
    warmup: int
    start: int


class SharpnessAware(MethodInfo, OptimizerWrapper):
    """A method that combines gradients around ``w`` into one direction, which the base optimizer uses as its gradient.

    A method implements :meth:`direction` and passes its settings to this constructor; they become values of the
    parameter groups, and each group may override them. A group with ``perturb=False`` is not perturbed: all its radii
    are 0, but its gradients still count in norms; with ``in_norm=False``, they do not count in the lengths that
    perturbations are divided by. ``param_groups`` and ``state`` are the base optimizer's, so that schedulers, clipping
    and ``GradScaler`` work as usual.

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
        warmup: the number of steps in which all radii rise linearly from 0, which forgives radii that are too large.
        start: the number of plain steps before, with one pass each; the warm-up begins after them. The parameter groups
            store both as ``sharpness_warmup`` and ``sharpness_start``, where a group may have its own.
    """

    model: nn.Module | None
    others: tuple[nn.Module, ...]  # modules that the closure runs besides the model
    m_sharpness: bool
    same_draws: bool
    check: ClassVar[Callable[[SharpnessAware, Closure], list[str]]]  # ``bsam.check``, above this package, sets it
    side_by_side: bool = False  # run the passes of ``L.grads`` at the same time, in a captured step on one GPU
    observers: list[PassObserver]
    ranks: Ranks
    _prepared: PreparedStep
    _results: Results  # of the current backward
    _gradients: Callable[[], Gradients | None]  # of the current backward, a weak reference
    _check_batch_norm: bool  # whether to raise if the closure runs batch norm: its statistics would not be restored

    def __init_subclass__(cls, **arguments: Any) -> None:
        """Show the options by name in the signature of a method that passes them on, as ``**options``."""
        super().__init_subclass__(**arguments)
        signature = inspect.signature(cls.__init__)
        _, *parameters = signature.parameters.values()
        if parameters and parameters[-1].kind == inspect.Parameter.VAR_KEYWORD:
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
        model: Modules,
        settings: dict[str, Any],
        *,
        m_sharpness: bool = False,
        same_draws: bool = True,
        warmup: int = 0,
        start: int = 0,
    ) -> None:
        check_base(base)
        modules = check_modules(model, base)
        settings = {**settings, **dict.fromkeys(self.numbers), WARMUP: warmup, START: start, COUNTER: None}
        settings |= {"steps_taken": 0, METHOD: self.method()}
        if self.scheduled_radii:
            settings |= {LR_START: None, LR_SEEN: None}
        settings[ENTRY_NAMES] = (*settings, ENTRY_NAMES, *self.vectors)
        for group in base.param_groups:
            check_names(group, settings, base.defaults)
        groups = [self.completed({**settings, **group}) for group in base.param_groups]  # raises before any write
        self.base = base
        self.model = modules[0] if modules else None
        self.others = modules[1:]
        self.m_sharpness = check_flag("m_sharpness", m_sharpness)
        self.same_draws = check_flag("same_draws", same_draws)
        self.defaults = {**base.defaults, **settings}
        self.settings = settings
        self.__setstate__({})  # not Optimizer.__init__, which would create parameter groups
        for group, completed in zip(base.param_groups, groups, strict=True):
            group.update(completed)

    def __getattr__(self, name: str) -> Any:
        if name in ("train", "eval"):  # schedule-free optimizers have these
            return getattr(self.base, name)
        raise missing_attribute(self, name)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The base optimizer's list of groups. Assigned groups get the method's settings where they have none."""
        return self.base.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        for group in groups:
            if ENTRY_NAMES not in group:
                check_names(group, self.settings, self.base.defaults)
        self.base.param_groups = [group if ENTRY_NAMES in group else self._with_settings(group) for group in groups]

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The base optimizer's state."""
        return self.base.state

    @property
    def t(self) -> int:
        """The number of steps taken."""
        return self.param_groups[0]["steps_taken"]

    # For authors of methods.

    @abstractmethod
    def direction(self, L: Objective) -> Vector:
        """Return the method's direction, computed from gradients of ``L`` around ``w``."""

    def step_kind(self) -> Hashable:
        """Return the kind of the next step. Steps of one kind launch the same kernels and can share a CUDA graph."""
        return "plain" if self.steps_since_start < 0 else None

    @property
    def steps_since_start(self) -> int:
        """The number of steps since the start of the first group; before it, it is negative and steps are plain."""
        return self.t - min((group[START] for group in self.param_groups if group.get(PERTURB, True)), default=0)

    def radius(self, group: dict[str, Any], name: str) -> Scalar:
        """Return the radius ``name`` of a group in this step; 0 if the group has ``perturb=False``."""
        full = self.full_radius(group, name)
        return warmed_up(group, full) if group[WARMUP] or group[START] else full

    def full_radius(self, group: dict[str, Any], name: str) -> Scalar:
        """Return the radius ``name`` of a group in this step as if its warm-up were over."""
        if not group.get(PERTURB, True):
            return 0.0
        return scheduled(group, name, self.scheduled_radii[name]) if name in self.scheduled_radii else group[name]

    def radii(self, name: str) -> Coefficient:
        """Return the radius ``name`` in this step: one number, or one per group if they differ."""
        if name not in self.settings:
            raise BsamValueError(
                f"{self.method()} has no radius {name}; its radii are {', '.join(self.radius_names) or 'none'}"
            )
        values = [self.radius(group, name) for group in self.param_groups]
        alike = not isinstance(values[0], Tensor) and all(not isinstance(v, Tensor) and v == values[0] for v in values)
        return values[0] if alike or len(values) == 1 else PerGroup(values)

    def epsilon(self, v: Vector, radius: str, length: Tensor | None = None) -> Vector:
        """Return the perturbation ``rho v / length``; ``length`` defaults to ``|v|``, of the groups that count."""
        return v * self.radii(radius) / ((self.counted(v).norm() if length is None else length) + TINY)

    def counted(self, v: Vector) -> Vector:
        """Return ``v`` with zeros in the groups with ``in_norm=False``, which do not count in lengths."""
        counts = [float(group.get(IN_NORM, True)) for group in self.param_groups]
        if not any(counts):
            raise BsamValueError("all parameter groups have in_norm=False: leave it out for those that are perturbed")
        return v if all(counts) else v * PerGroup(counts)

    @property
    def params(self) -> list[Tensor]:
        """The parameters that require a gradient in this step."""
        return self._weights.params

    def vector(self, tensors: Iterable[Tensor]) -> Vector:
        """Return a vector that shares memory with these tensors, one for each of :attr:`params`."""
        return Vector(tensors, self._weights.layout)

    def start_from(self, offset: Vector) -> None:
        """Let the base optimizer step from ``w + offset``; several ``backward`` calls use the mean of their offsets."""
        self._results.offset = self._own(offset)

    def remember(self, name: str, value: Vector | float) -> None:
        """Remember a vector or a number once the step is taken; ``vectors`` or ``numbers`` must list the name.

        If several ``backward`` calls precede a step, all of them recall the values of the previous step, and those of
        the last one are remembered. Values computed under DDP's ``no_sync`` are ignored: they differ between ranks,
        which could then diverge. Parameters without a gradient in the passes so far have no entries in a vector; in
        ``running_means``, their entries stay as they were.
        """
        kind = "vectors" if isinstance(value, Vector) else "numbers"
        if name not in getattr(self, kind):
            raise BsamValueError(f"{name!r} must be listed in {type(self).__name__}.{kind}, so that it is saved")
        if self.ranks.under_no_sync:
            return
        if isinstance(value, Vector):
            self._results.reached[name] = self._reached()
            value = self._own(value, wide=name in self.running_means)
        self._results.values[name] = value

    def _own(self, v: Vector, *, wide: bool = False) -> Vector:
        """Return the vector, evaluated now if its terms may change during the step, or if its sum is to be ``wide``."""
        is_half = any(bucket.real_dtype.itemsize < 4 for bucket in v.layout.buckets)
        if (wide and is_half) or not all(term.scratch or term.stable for term in v.terms):
            return Vector(v.tensors(wide=wide), v.layout, scratch=True)
        return v

    def recall(self, name: str, missing: Vector | None = None) -> Any:
        """Return the value that an earlier step remembered under ``name``; ``missing`` if there is none.

        Call it after the first pass. A vector is then zero for parameters without a gradient in this step, so that
        lengths and directions do not depend on them. A parameter that had no gradient in earlier steps has no entry,
        for example because it was frozen: there the vector has the entries of ``missing``, or zeros.
        """
        if name in self.numbers:
            return self.param_groups[0][name]
        state = self.state
        stored: list[Any] = [state[p].get(name) if p in state else None for p in self.params]
        if all(t is None for t in stored):
            return missing
        if missing is not None and any(t is None for t in stored):
            others = missing.tensors(self.params, wide=name in self.running_means)
            stored = [other if t is None else t for t, other in zip(stored, others, strict=True)]
        return self.restricted(stored, self._reached(), wide=name in self.running_means)

    def restricted(self, tensors: Iterable[Tensor | None], reached: Iterable[bool], *, wide: bool = False) -> Vector:
        """Return the vector of these tensors, with zeros for None and for parameters that are not reached."""
        entries = []
        for p, t, is_reached in zip(self.params, tensors, reached, strict=True):
            dtype = wide_dtype(p.dtype) if wide else p.dtype
            used = t if is_reached else None
            entries.append(torch.zeros_like(p, dtype=dtype) if used is None else used.to(p.device, dtype))
        return Vector(entries, self._weights.layout, stable=True)

    def _reached(self) -> list[bool]:
        """Return which parameters got a gradient in this step; all of them if no pass has computed one yet."""
        gradients = self._gradients() if self._prepared.phase == "in_backward" else None
        if gradients is None or not any(gradients.has_grad):
            return [True] * len(self.params)
        return [*gradients.has_grad]

    def mean_over_ranks(self, number: float) -> float:
        """Average a number over ranks under DDP's ``no_sync``: all ranks have the same, except with ``m_sharpness``."""
        return self.ranks.mean(number)

    def on_any_rank(self, flag: bool) -> bool:
        """Whether a flag is set on any DDP rank, if ranks may differ in which parameters they use."""
        return flag if self.ranks.reduces_each_pass else self.ranks.on_any_rank([flag])[0]

    def mean_losses(self, losses: list[float]) -> list[float]:
        """Average the losses of this rank's part of the batch over ranks, if gradients are averaged."""
        return self.ranks.mean_losses(losses, self._weights.layout.mesh)

    # For users.

    def backward(self, closure: Closure, scaler: torch.amp.GradScaler | None = None) -> Tensor:
        """Add this method's direction to ``p.grad``, where ``loss.backward()`` would add the gradient.

        If the closure raises, the weights, the buffers of ``model`` and ``p.grad`` are as they were before the call.
        Every pass must compute the loss from scratch: a loss that was computed outside the closure raises an error.

        Args:
            closure: returns the loss, or one loss per sample; or runs ``backward`` itself and returns the loss; or
                yields one loss per micro-batch. Some methods need the outputs, too: it then returns, or yields, pairs.
            scaler: the ``torch.amp.GradScaler`` in use. The direction stays scaled, for ``unscale_`` and
                ``scaler.step``. A closure that runs ``backward`` itself must scale the loss:
                ``scaler.scale(loss).backward()``.

        Returns:
            The loss at ``w``, detached.
        """
        optimizer = self._reference() or self
        if optimizer is not self:  # called on a framework's wrapper
            return SharpnessAware.backward(optimizer, closure, scaler)
        self._begin(closure)
        L = self._objective(closure, self._buffers, self._rng, scaler=scaler)
        try:
            self._prepared.phase = "in_backward"
            observers = [observer for observer in self.observers if observer.due(self.t)]
            L.keep_evaluations = bool(observers)
            with Undo() as undo, undo:
                if self._check_batch_norm:
                    observe_calls(undo, refuse_batch_norm)
                d = self.direction(L) if self.steps_since_start >= 0 else self._plain_direction(L)
            if not isinstance(d, Vector):
                raise BsamTypeError(f"{type(self).__name__}.direction must return a Vector, got {type(d).__name__}")
            if L.loss_scale is not None:
                d = L.loss_scale.scale_direction(d)
                if L.loss_scale.overflowed():  # the scaler will skip this step
                    self._results.offset = None
                    observers = []
            for observer in observers:
                with L.extra_evaluations():
                    observer.observe(self, L)
            L.gradients.direction = d
            L.end(failed=False)
            self._prepare(L)
            return L.loss  # type: ignore[return-value]
        except BaseException:
            self._prepared.phase = "failed"
            try:
                L.end(failed=True)
            except BaseException:  # again, if Ctrl-C interrupted it
                L.end(failed=True)
                raise
            raise

    def _plain_direction(self, L: Objective) -> Vector:
        """Return the gradient; raise at once if the closure will not do for the steps after the start."""
        if Need.OUTPUTS in self.needs:
            return L.grad_and_signals()[0]
        if Need.PER_SAMPLE_LOSSES not in self.needs:
            return L.grad()
        g = L.grad(subset=slice(None))  # the closure takes samples ...
        _ = L.sample_losses  # ... and returns their losses
        return g

    def _begin(self, closure: Closure) -> None:
        """Read the parameter groups again; if ``p.grad`` was cleared, discard the prepared step."""
        if not callable(closure):
            raise BsamTypeError(f"closure must be a function that computes the loss, got {type(closure).__name__}")
        if self._prepared.phase == "in_backward":
            raise BsamRuntimeError(
                "optimizer.backward was called from inside the closure: a closure must only compute the loss (and may "
                "call loss.backward())"
            )
        if not all(ENTRY_NAMES in group for group in self.param_groups):
            raise BsamRuntimeError(
                "a parameter group of base lacks the method's settings: add groups with optimizer.add_param_group, and "
                "load states with optimizer.load_state_dict"
            )
        self.check_groups()
        self._weights.refresh(self.param_groups)
        if not self._weights.params:
            raise BsamRuntimeError("no parameter of base requires a gradient: unfreeze at least one of them")
        if self._prepared.used is not None:
            p, gradient, version = self._prepared.used
            self._prepared.stale |= gradient is not None and p.grad is gradient and gradient._version == version
        if all(p.grad is None for p in self._weights.params):
            self._reset()
        self._results = Results()

    def _objective(self, closure: Closure, buffers: Buffers, rng: RngReplay, **options: Any) -> Objective:
        ranks = self.ranks if dist.is_available() and dist.is_initialized() else None
        others: list[PassPart] = [rng]
        if self.others:
            others.append(OtherModules(self.others, {p for group in self.param_groups for p in group["params"]}))
        options |= {"side_by_side": self.side_by_side and self.ranks.ddp is None}
        options |= {"with_outputs": Need.OUTPUTS in self.needs}
        L = Objective(closure, self._weights, buffers, others, ranks, results=self._results, **options)
        self._gradients = weakref.ref(L.gradients)  # a strong one would keep gradients between steps
        return L

    def _prepare(self, L: Objective) -> None:
        """Keep the offset and the values to remember of a successful ``backward`` for ``step``."""
        prepared, results = self._prepared, self._results
        offsets, local_offsets = prepared.offsets, prepared.local_offsets
        if results.offset is not None:
            offsets = [*offsets, results.offset]
            local_offsets |= self.ranks.ddp is not None and not self.ranks.reduces_each_pass
        values = dict(prepared.values)
        for name, value in results.values.items():
            if isinstance(value, Vector):
                entries = zip(self.params, value.entries(self.params), results.reached[name], strict=True)
                values[name] = {p: t for p, t, reached in entries if reached}
            else:
                values[name] = value
        none = Results()
        L.commit()  # from here on, nothing can be interrupted: there are no calls
        self._results = none  # frees the memory of vectors
        self._check_batch_norm = False
        prepared.offsets = offsets
        prepared.local_offsets = local_offsets
        prepared.values = values
        prepared.phase = "ready"

    def unwrapped(self) -> SharpnessAware:
        """Return the optimizer, even if ``self`` is a framework's wrapper, whose class derives from the optimizer's."""
        return self._reference() or self

    def trial(self, closure: Closure, loss_check: Callable[[list[Tensor]], LossCheck], undo: Undo) -> Objective:
        """Return an objective whose evaluations prepare no step, for :meth:`check`; ``undo`` removes their traces.

        ``loss_check`` is called with the parameters and returns the check of the losses.
        """
        phase = self._prepared.phase
        if phase == "in_backward":
            raise BsamRuntimeError("check was called from inside the closure: call it before training")
        self.check_groups()
        self._weights.refresh(self.param_groups)
        rng = RngReplay(True, self._weights.cuda_generators)
        undo.set_attributes([(self, "_results", Results())])
        L = self._objective(closure, Buffers(self.called_modules), rng, loss_check=loss_check(self.params))
        undo.callback(setattr, self._prepared, "phase", phase)
        undo.callback(L.end, True)
        self._prepared.phase = "in_backward"
        return L

    def step(self, closure: Closure | None = None) -> Tensor | None:  # type: ignore[override]
        """Clear ``p.grad``, call :meth:`backward` and run the base optimizer's step.

        Without a closure, run the base optimizer's step on the direction that :meth:`backward` prepared.

        Returns:
            The loss at ``w`` before the step; None without a closure.
        """
        prepared, loss = self._prepared, None
        # a closure that calls step must not start another backward: the phase is not ready
        if closure is not None and prepared.phase != "in_backward":
            check_callers()
            self.zero_grad()
            loss = self.backward(closure)
        if prepared.phase != "ready":
            raise BsamRuntimeError(NOT_READY[prepared.phase])
        with_grad = {p for p in self._weights.params if p.grad is not None} if prepared.values else set()
        with Undo() as undo, undo:
            undo.callback(torch.set_grad_enabled, torch.is_grad_enabled())
            undo.callback(self._end_step, with_grad, [group["steps_taken"] + 1 for group in self.param_groups])
            prepared.phase = "in_step"
            if prepared.offsets and any(p.grad is not None for p in self.params):  # otherwise p.grad was cleared
                self._weights.move(self._mean_offset())
            self.base.step()
            prepared.phase = "stepped"  # from here on, an interrupt no longer takes the step back
        if closure is None:  # a later backward should not find this gradient unchanged
            p = self._weights.params[0]
            prepared.used = p, p.grad, -1 if p.grad is None else p.grad._version
        return loss

    def _end_step(self, with_grad: Collection[Tensor], steps_taken: list[int]) -> None:
        """Count a step and store what it remembers; if it was not taken, put the weights back."""
        prepared = self._prepared
        if prepared.phase == "in_step":
            self._weights.restore()
            prepared.phase = "ready"
        if prepared.phase == "stepped":
            self._weights.commit()
            for group, steps in zip(self.param_groups, steps_taken, strict=False):  # base may have added a group
                group["steps_taken"] = steps
                if group[WARMUP] or group[START]:
                    count_on_device(group)
                if group.get(LR_SEEN) is not None:
                    note_lr(group)
            if prepared.values:
                self._store_values(with_grad)
            self._reset()

    def _mean_offset(self) -> Vector:
        """Return the start of the step relative to w: the mean of the offsets, also over ranks if they differ."""
        first, *others = self._prepared.offsets
        mean = sum(others, first) / (1 + len(others))
        if self._prepared.local_offsets:
            return Vector(self.ranks.average_(mean.tensors()), mean.layout)
        return mean

    @torch.no_grad()
    def _store_values(self, with_grad: Collection[Tensor]) -> None:
        """Store the values to remember in the base optimizer's state and groups, after its step.

        Vectors keep their memory, which a CUDA graph may read. Parameters without a gradient in the step get no entry:
        base optimizers initialize parameters that have none.
        """
        state = self.state
        for name, value in self._prepared.values.items():
            if not isinstance(value, dict):
                for group in self.param_groups:
                    group[name] = value
                continue
            new = {p: t for p, t in value.items() if p in with_grad}
            for p, t in new.items():
                old = state[p].get(name)
                if old is None or (old.shape, old.dtype, old.device) != (t.shape, t.dtype, t.device):
                    state[p][name] = t.clone()  # not the memory of a gradient, which FSDP may own
            if new:
                torch._foreach_copy_([local(state[p][name]) for p in new], [local(t) for t in new.values()])
            if name not in self.running_means:  # parts of a single vector, not of two
                for p in (p for group in self.param_groups for p in group["params"] if p not in new and p in state):
                    state[p].pop(name, None)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear ``p.grad`` and discard the step that :meth:`backward` prepared."""
        if self._prepared.phase != "in_backward":  # a closure may call zero_grad, as torch's closures do
            self._reset()  # first: an interrupt must not leave a step with a part of its gradient
        super().zero_grad(set_to_none)
        self._prepared.stale = False

    def _reset(self) -> None:
        self._prepared.offsets = []
        self._prepared.local_offsets = False
        self._prepared.values = {}
        self._prepared.used = None
        self.ranks.needs_sync = False
        self._prepared.phase = "idle"

    # For frameworks and CUDA graphs.

    @property
    def called_modules(self) -> tuple[nn.Module, ...]:
        """The modules that the closure runs, the trained one first."""
        return () if self.model is None else (self.model, *self.others)

    @property
    def is_ready(self) -> bool:
        """Whether :meth:`backward` has prepared a step."""
        return self._prepared.phase == "ready"

    @property
    def is_perturbed(self) -> bool:
        """Whether the weights are away from ``w``, in a pass of a step."""
        return self._weights.moved

    @property
    def stale_gradients(self) -> bool:
        """Whether a ``backward`` has added to a direction that ``step()`` had used already, since ``zero_grad``."""
        return self._prepared.stale

    def begin_first_pass(self) -> None:
        """Save buffers and generators. Call this if a framework runs the first pass before :meth:`backward`."""
        self.check_groups()
        self._weights.refresh(self.param_groups)
        self._buffers.save()
        self._rng.save()

    def count_step(self) -> None:
        """Count a step that a CUDA graph replays. Call this before every replay except the first.

        The capture has already counted the step of the first replay. This method also sets the :meth:`generators` to
        the states of torch's default generators.
        """
        self._rng.update_clones()
        for group in self.param_groups:
            group["steps_taken"] += 1

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
        return self._rng.make_clones()

    def __getstate__(self) -> dict[str, Any]:
        transient = {"_weights", "_buffers", "_rng", "_gradients", "ranks", "observers", "_prepared"}
        transient |= {"_results", "_reference", "_check_batch_norm", "_checked"}
        transient |= {"step"}  # schedulers patch it on the instance
        return {k: v for k, v in self.__dict__.items() if k not in transient and not k.startswith("_optimizer_")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # also creates the hooks
        self._reference = weakref.ref(self)
        self._checked = []
        self._weights = Weights()
        self._buffers = Buffers(self.called_modules)
        self._rng = RngReplay(self.same_draws, self._weights.cuda_generators)
        self.ranks = Ranks(self.model, self.m_sharpness)
        self.observers = []
        self._check_batch_norm = self.model is None  # in the first backward
        self._results = Results()
        self._gradients = lambda: None
        self._prepared = PreparedStep()
        self.base.register_step_pre_hook(self._prepared.check_base_step)
