"""The optimizer that every method of the family is."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .checks import check_base, check_modules, check_names
from .draws import Draws
from .errors import BsamRuntimeError, BsamTypeError, BsamValueError
from .layout import local
from .method_state import MethodState
from .modules import Modules
from .objective import Closure, NoLoss, Objective
from .ranks import Ranks
from .schedule import LR_SEEN, LR_START, note_lr
from .turn import NOT_READY, Turn
from .vector import TINY, Vector
from .weights import Weights
from .wrapper import METHOD, OWN, Wrapper


class PassObserver(Protocol):
    """Somebody who wants to see what the passes of some steps saw."""

    def due(self, step: int) -> bool:
        """Whether this step is one of them."""

    def watch(self, optimizer: SharpnessAware, L: Objective) -> None:
        """Look at ``L.seen``, before the weights go back; further evaluations are allowed."""


class SharpnessAware(Wrapper):
    """A method that mixes gradients taken around ``w`` into one direction, which the base optimizer takes as its
    gradient.

    A method writes :meth:`direction` and hands its settings to this constructor; they become values of the parameter
    groups, and a group may bring its own. ``param_groups`` and ``state`` are the base optimizer's: schedulers, clipping
    and ``GradScaler`` find what they always find.

    Args:
        base: the optimizer that takes the step, built on the parameters.
        model: the network that the closure calls, or its DDP, FSDP or compiled wrapper: how batch norm is reached. None
            says that it has none. Where the closure runs other modules, too (the discriminator, when a generator is
            trained), a list of all of
            them, the trained one first: batch norm of all of them moves once a step, and gradients of parameters that
            ``base`` does not know stay as they were.
        settings: the method's group values by name; those called ``rho...`` are radii.
        m_sharpness: each rank of DDP perturbs along its own gradient, and the direction is averaged once.
        same_draws: all passes of a step see the same random draws (dropout, noise) of torch's generators, on the CPU
            and on CUDA devices; after the step these are where one pass would have left them. False lets each pass draw
            anew. Numbers from Python's ``random``, from NumPy and from generators that the closure has made itself are
            drawn anew in each pass either way. Passes of a
            step that is captured in a CUDA graph share their draws if :meth:`generators` were registered with the
            graph, and else draw anew.
    """

    model: nn.Module | None
    others: tuple[nn.Module, ...]  # that the closure runs beside the model
    m_sharpness: bool
    same_draws: bool
    _turn: Turn

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
        if not isinstance(same_draws, bool):
            raise BsamValueError(f"same_draws must be True or False, got {same_draws!r}")
        settings = {**settings, **dict.fromkeys(self.numbers), "steps_taken": 0, METHOD: self.method()}
        if self.follows:
            settings |= {LR_START: None, LR_SEEN: None}
        settings[OWN] = (*settings, OWN, *self.vectors)
        for group in base.param_groups:
            check_names(group, settings, base.defaults)
        groups = [
            self.completed({**settings, **group}) for group in base.param_groups
        ]  # refuses before anything is written
        self.__setstate__(
            {
                "base": base,
                "model": modules[0] if modules else None,
                "others": modules[1:],
                "m_sharpness": m_sharpness,
                "same_draws": same_draws,
                "defaults": {**base.defaults, **settings},
                "settings": settings,
                "_memory": MethodState(self.vectors, self.numbers),
            }
        )
        for group, completed in zip(base.param_groups, groups, strict=True):
            group.update(completed)

    # What a method writes, and what it writes it with.

    @abstractmethod
    def direction(self, L: Objective) -> Vector:
        """The method: gradients of ``L`` around ``w``, mixed into one vector."""

    def epsilon(self, v: Vector, radius: str, length: Tensor | None = None) -> Vector:
        """The perturbation ``rho v / length``; the length is ``|v|`` if not given."""
        return v * self.radii(radius) / ((v.norm() if length is None else length) + TINY)

    @property
    def params(self) -> list[Tensor]:
        """The parameters that this step moves: those that require a gradient."""
        return self._weights.params

    def vector(self, tensors: Iterable[Tensor]) -> Vector:
        """One tensor for each of :attr:`params`, as a vector that refers to them."""
        return Vector(tensors, self._weights.layout)

    def start_from(self, offset: Vector) -> None:
        """Let the base optimizer start this step from ``w + offset`` (from the mean of the offsets, if ``backward`` is
        called several times).
        """
        self._turn.offset = offset

    def keep(self, name: str, value: Vector | float) -> None:
        """Remember a vector or a number under a name of ``vectors`` or ``numbers``, once the step is taken.

        Not under DDP's ``no_sync``: what one rank saw alone must not decide what it does beside the others.
        """
        if self._ranks.in_step:
            self._memory.keep(name, value, self._weights)

    def kept(self, name: str) -> Any:
        """What the step before remembered; None if there is nothing."""
        return self.param_groups[0][name] if name in self.numbers else self._memory.vector(name, self._weights)

    def shared(self, number: float) -> float:
        """A number that decides what a rank does next, the same on all ranks of DDP: their mean, where gradients were
        not averaged (``no_sync``).
        """
        return self._ranks.mean(number)

    def mean_losses(self, losses: list[float]) -> list[float]:
        """Losses of this rank's part of the batch, as the gradients are: averaged over ranks where those are."""
        return self._ranks.mean_losses(losses, self._weights.mesh)

    # What a user calls.

    def backward(self, closure: Closure, scaler: torch.amp.GradScaler | None = None) -> Tensor:
        """Add this method's direction to ``p.grad``, where ``loss.backward()`` would add the gradient.

        Whatever the closure raises, the weights, the batch-norm flags and ``p.grad`` are then as they were before the
        call.
        Every pass must compute the loss anew: one that was computed outside the closure is refused.

        Args:
            closure: returns the loss, or one loss per sample; or runs ``backward`` itself and returns the loss; or
                yields one loss per micro-batch.
            scaler: the ``torch.amp.GradScaler`` in use; the direction is left scaled, for ``unscale_`` and
                ``scaler.step``. A closure that runs ``backward`` itself then scales the loss itself, as ever:
                ``scaler.scale(loss).backward()``.

        Returns:
            The loss at ``w``, detached.
        """
        if not callable(closure):
            raise BsamTypeError(f"backward needs a closure that computes the loss, got {type(closure).__name__}")
        if self._turn.phase == "busy":
            raise BsamRuntimeError(
                "backward was called from inside the closure: a closure computes the loss, at most calls "
                "loss.backward(), and returns it"
            )
        if any(group[METHOD] != self.method() for group in self.param_groups):
            raise BsamRuntimeError(
                f"base has the state of {self.param_groups[0][METHOD]}, loaded into it behind {self.method()}: "
                "load it by optimizer.load_state_dict, which gives base its part"
            )
        self._weights.refresh(self.param_groups)
        params = self._weights.params
        if not params:
            raise BsamRuntimeError("no parameter of base requires a gradient: unfreeze at least one")
        held = [p.grad for p in params]
        if all(g is None for g in held):
            self._reset()  # whoever cleared p.grad, what was prepared is gone with it
        if self._turn.offsets and self._turn.offsets[0].layout != self._weights.layout:
            raise BsamRuntimeError(
                "parameters were added, frozen or moved since the last backward: call zero_grad() before this one"
            )
        known = {p for group in self.param_groups for p in group["params"]} if self.others else set()
        modules = Modules(() if self.model is None else (self.model, *self.others), known)
        L = Objective(
            closure, self._weights, modules, self._ranks, self._draws, scaler, search=self.t & (self.t - 1) == 0
        )
        try:
            self._turn.phase, self._turn.offset = "busy", None
            self._memory.begin()
            for p in params:
                p.grad = None
            watchers = [watcher for watcher in self.watchers if watcher.due(self.t)]
            L.watched = bool(watchers)
            d = self.direction(L) * L.scale
            with L.aside():
                for watcher in watchers:
                    watcher.watch(self, L)
            L.close()
            if not any(L.reached):
                raise BsamRuntimeError(
                    "the loss reaches no parameter of base: does the closure call the model that base was built on?"
                )
            offset = self._turn.offset
            if offset is not None:
                offset = Vector(offset.tensors(), self._weights.layout)  # before d overwrites what it is made of
            self._fill(d, held, L.reached)
            if offset is not None:
                self._turn.offsets.append(offset)
                self._turn.apart |= self._ranks.ddp is not None and not self._ranks.reduces
            self._memory.settle([p for p, was in zip(params, L.reached, strict=True) if was])
            self._turn.phase = "ready"
            self._ranks.warn_if_alone()
        except BaseException:
            self._turn.phase = "stale"
            try:
                L.close()
            finally:
                L.close()  # a second Ctrl-C must not layout the way back short
                for p, g in zip(params, held, strict=True):
                    p.grad = g
            raise
        return L.loss  # type: ignore[return-value]

    def _fill(self, d: Vector, held: list[Tensor | None], reached: list[bool]) -> None:
        """``p.grad = held + d``, in the memory of this step's gradients."""
        params, parts = self._weights.params, d.materialize_()
        reached, entries = self._ranks.agreed(reached), self._weights.layout.join(parts)
        both = [(t, local(h)) for t, h in zip(entries, held, strict=True) if h is not None]
        self._ranks.settle([h for _, h in both], entries)
        if both:
            torch._foreach_add_([t for t, _ in both], [h for _, h in both])
        for p, t, h, was_reached in zip(params, self._weights.layout.join(parts, params), held, reached, strict=True):
            if was_reached or h is not None:
                p.grad = t

    def step(self, closure: Closure | None = None) -> Tensor | None:  # type: ignore[override]
        """Clear, :meth:`backward`, and the base optimizer's step. Without a closure: the base optimizer's step on what
        :meth:`backward` prepared.

        A closure that does nothing and returns None, such as the one that Lightning passes where the user gives none,
        counts as no closure.

        Returns:
            The loss at ``w`` before the step; None without a closure.
        """
        loss = None
        if closure is not None and self._turn.phase != "busy":
            loss = self._prepare(closure)
        if self._turn.phase != "ready":
            raise BsamRuntimeError(NOT_READY[self._turn.phase])
        try:
            start = self._turn.start(self._ranks)
            if start is not None:
                self._weights.move(start)
            self.base.step()
        except BaseException:
            self._weights.restore()
            raise
        self._weights.stay()
        self._memory.commit(self.param_groups)
        for group in self.param_groups:
            if group.get(LR_SEEN) is not None:
                note_lr(group)
        self._reset()
        self._count()
        return loss

    def _prepare(self, closure: Closure) -> Tensor | None:
        """Clear and :meth:`backward`; if the closure does nothing, what was prepared before stays prepared."""
        if self._turn.phase != "ready":
            self.zero_grad()
            return self.backward(closure)
        turn, needs_sync, pending = replace(self._turn), self._ranks.needs_sync, self._memory.pending
        grads = [(p, p.grad) for group in self.param_groups for p in group["params"]]
        self.zero_grad()
        try:
            return self.backward(closure)
        except NoLoss:
            for p, g in grads:
                p.grad = g
            self._turn.__dict__.update(turn.__dict__)
            self._ranks.needs_sync, self._memory.pending = needs_sync, pending
            return None

    def _count(self) -> None:
        for group in self.param_groups:
            group["steps_taken"] += 1

    def count_step(self) -> None:
        """Count a step that a CUDA graph replays; to call before the replay. :meth:`step` counts by itself.

        It also sets the :meth:`generators` that are registered with the graph to where the default generators are.
        """
        self._draws.align()
        self._count()

    def generators(self) -> list[torch.Generator]:
        """Generators with which the later passes of a step that a CUDA graph captures draw what the first does.

        To call after a few steps, so that their number is known, and to register before the capture. In a graph without
        them each pass draws anew. There are none with ``same_draws=False``, nor on a CPU. Those of the latest call are
        kept in line with the default generators by :meth:`count_step`.

        Example::

            graph = torch.cuda.CUDAGraph()
            for generator in optimizer.generators():
                graph.register_generator_state(generator)
            with torch.cuda.graph(graph):
                loss = optimizer.step(closure)
        """
        return self._draws.clones(self._weights.layout.devices)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear ``p.grad``, and with it what :meth:`backward` prepared."""
        super().zero_grad(set_to_none)
        if self._turn.phase != "busy":  # a closure that clears, as torch's closures do, clears the pass it is in
            self._reset()

    def __getstate__(self) -> dict[str, Any]:
        passing = {"step", "_weights", "_ranks", "_draws", "_turn", "watchers"}  # `step`: schedulers patch the instance
        return {k: v for k, v in self.__dict__.items() if k not in passing and not k.startswith("_optimizer_")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(
            state
        )  # makes the hooks, too; Optimizer.__init__ would make groups, and those are the base's
        self._weights, self._turn = Weights(), Turn()
        self._ranks, self._draws = Ranks(self.model, self.m_sharpness), Draws(self.same_draws)
        self.watchers: list[PassObserver] = []
        self._reset()

    def _reset(self) -> None:
        self._turn.clear()
        self._memory.forget()
        self._ranks.needs_sync = False
