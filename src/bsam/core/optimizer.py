"""The optimizer that every method of the family is."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .checks import check_base, check_model, check_names, check_radius
from .foreach import Scalar
from .memory import Memory
from .objective import Closure, Objective
from .parts import local
from .ranks import Ranks
from .refusal import Refusal
from .schedule import completed_schedule, follow_lr
from .vector import TINY, Coefficient, PerGroup, Vector
from .weights import Weights

_NOT_READY = {
    "idle": "step() has nothing to step with: call backward(closure) first, or step(closure)",
    "stale": "the last backward raised, so there is no whole direction to step with: call backward(closure) again, or zero_grad()",
    "busy": "step was called from inside the closure: a closure computes the loss, and the optimizer steps after it",
}


class Watcher(Protocol):
    """Somebody who wants to see what the passes of some steps saw."""

    def due(self, step: int) -> bool:
        """Whether this step is one of them."""

    def watch(self, optimizer: SharpnessAware, L: Objective) -> None:
        """Look at ``L.seen``, before the weights go back; further evaluations are allowed."""


class SharpnessAware(Optimizer):
    """A method that mixes gradients taken around ``w`` into one direction, which the base optimizer takes as its gradient.

    A method writes :meth:`direction` and hands its settings to this constructor; they become values of the parameter groups, and a group may bring
    its own. ``param_groups`` and ``state`` are the base optimizer's: schedulers, clipping and ``GradScaler`` find what they always find.

    Args:
        base: the optimizer that takes the step, built on the parameters.
        model: the network that the closure calls, or its DDP, FSDP or compiled wrapper: how batch norm is reached. None says that it has none.
        settings: the method's group values by name; those called ``rho...`` are radii.
        m_sharpness: each rank of DDP perturbs along its own gradient, and the direction is averaged once.
    """

    vectors: ClassVar[tuple[str, ...]] = ()  # names of the vectors that a method keeps between steps
    numbers: ClassVar[tuple[str, ...]] = ()  # and of the numbers
    follows: ClassVar[dict[str, str]] = {}  # radii that follow the learning rate, from lr_min to lr_max, and the names of their floors

    base: Optimizer
    model: nn.Module | None
    m_sharpness: bool
    settings: dict[str, Any]
    _memory: Memory
    _offset: Vector | None  # where this backward wants the step to start, from w
    _offsets: list[Vector]  # and where the backwards since the last step did
    _phase: str  # idle; busy: in backward; ready: to step; stale: the last backward raised

    def __init__(self, base: Optimizer, model: nn.Module | None, settings: dict[str, Any], *, m_sharpness: bool = False) -> None:
        check_base(base)
        check_model(model, base)
        settings = {**settings, **dict.fromkeys(self.numbers), "steps_taken": 0}
        for group in base.param_groups:
            check_names(group, settings, base.defaults)
        groups = [self.completed({**settings, **group}) for group in base.param_groups]  # refuses before anything is written
        self.__setstate__(
            {
                "base": base,
                "model": model,
                "m_sharpness": m_sharpness,
                "defaults": {**base.defaults, **settings},
                "settings": settings,
                "_memory": Memory(self.vectors, self.numbers),
            }
        )
        for group, completed in zip(base.param_groups, groups, strict=True):
            group.update(completed)

    # What a method writes, and what it writes it with.

    @abstractmethod
    def direction(self, L: Objective) -> Vector:
        """The method: gradients of ``L`` around ``w``, mixed into one vector."""

    def completed(self, group: dict[str, Any]) -> dict[str, Any]:
        """A group with the settings that follow from others filled in; refuses what cannot be right."""
        for name, value in group.items():
            if name.startswith("rho") and name not in self.follows.values():
                check_radius(name, value)
        for radius, floor in self.follows.items():
            group = completed_schedule(group, radius, floor)
        return group

    def radius(self, group: dict[str, Any], name: str) -> Scalar:
        """The radius ``name`` of a group in this step."""
        floor = group[self.follows[name]] if name in self.follows else None
        if floor is None:
            return group[name]
        return follow_lr(group["lr"], top=group[name], floor=floor, lr_max=group["lr_max"], lr_min=group["lr_min"])

    def radii(self, name: str) -> Coefficient:
        """The radius ``name`` in this step: one number, or one per group where they differ."""
        values = [self.radius(group, name) for group in self.param_groups]
        alike = not isinstance(values[0], Tensor) and all(not isinstance(v, Tensor) and v == values[0] for v in values)
        return values[0] if alike or len(values) == 1 else PerGroup(values)

    def epsilon(self, v: Vector, radius: str, length: Tensor | None = None) -> Vector:
        """The perturbation ``rho v / length``; the length is ``|v|`` if not given."""
        return v * self.radii(radius) / ((v.norm() if length is None else length) + TINY)

    @property
    def params(self) -> list[Tensor]:
        """The parameters that this step moves: those that require a gradient."""
        return self._weights.params

    def vector(self, tensors: Iterable[Tensor]) -> Vector:
        """One tensor for each of :attr:`params`, as a vector that refers to them."""
        return Vector(tensors, self._weights.cut)

    def start_from(self, offset: Vector) -> None:
        """Let the base optimizer start this step from ``w + offset`` (from the mean of the offsets, if ``backward`` is called several times)."""
        self._offset = offset

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
        """A number that decides what a rank does next, the same on all ranks of DDP: their mean, where gradients were not averaged (``no_sync``)."""
        return self._ranks.mean(number)

    def mean_losses(self, losses: list[float]) -> list[float]:
        """Losses of this rank's part of the batch, as the gradients are: averaged over ranks where those are."""
        return self._ranks.mean_losses(losses, self._weights.mesh)

    # What a user calls.

    def backward(self, closure: Closure, scaler: torch.amp.GradScaler | None = None) -> Tensor:
        """Add this method's direction to ``p.grad``, where ``loss.backward()`` would add the gradient.

        Whatever the closure raises, the weights, the batch-norm flags and ``p.grad`` are then as they were before the call.

        Args:
            closure: returns the loss, or one loss per sample; or runs ``backward`` itself and returns the loss; or yields one loss per micro-batch.
            scaler: the ``torch.amp.GradScaler`` in use; the direction is left scaled, for ``unscale_`` and ``scaler.step``. A closure that runs ``backward``
                itself then scales the loss itself, as ever: ``scaler.scale(loss).backward()``.

        Returns:
            The loss at ``w``, detached.
        """
        if not callable(closure):
            raise Refusal(f"backward needs a closure that computes the loss, got {type(closure).__name__}")
        if self._phase == "busy":
            raise Refusal("backward was called from inside the closure: a closure computes the loss, at most calls loss.backward(), and returns it")
        self._weights.survey(self.param_groups)
        params = self._weights.params
        if not params:
            raise Refusal("no parameter of base requires a gradient: unfreeze at least one")
        held = [p.grad for p in params]
        if all(g is None for g in held):
            self._reset()  # whoever cleared p.grad, what was prepared is gone with it
        if self._offsets and self._offsets[0].cut != self._weights.cut:
            raise Refusal("parameters were added, frozen or moved since the last backward: call zero_grad() before this one")
        L = Objective(closure, self._weights, self.model, self._ranks, scaler)
        try:
            self._phase, self._offset = "busy", None
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
                raise Refusal("the loss reaches no parameter of base: does the closure call the model that base was built on?")
            offset = None if self._offset is None else Vector(self._offset.tensors(), self._weights.cut)  # before d overwrites what it is made of
            self._fill(d, held, L.reached)
            if offset is not None:
                self._offsets.append(offset)
            self._memory.settle([p for p, was in zip(params, L.reached, strict=True) if was])
            self._phase = "ready"
        except BaseException:
            self._phase = "stale"
            try:
                L.close()
            finally:
                L.close()  # a second Ctrl-C must not cut the way back short
                for p, g in zip(params, held, strict=True):
                    p.grad = g
            raise
        return L.loss  # type: ignore[return-value]

    def _fill(self, d: Vector, held: list[Tensor | None], reached: list[bool]) -> None:
        """``p.grad = held + d``, in the memory of this step's gradients."""
        params, parts = self._weights.params, d.collapse()
        reached, entries = self._ranks.agreed(reached), self._weights.cut.join(parts)
        both = [(t, local(h)) for t, h in zip(entries, held, strict=True) if h is not None]
        self._ranks.settle([h for _, h in both], entries)
        if both:
            torch._foreach_add_([t for t, _ in both], [h for _, h in both])
        for p, t, h, was_reached in zip(params, self._weights.cut.join(parts, params), held, reached, strict=True):
            if was_reached or h is not None:
                p.grad = t

    def step(self, closure: Closure | None = None) -> Tensor | None:  # type: ignore[override]
        """Clear, :meth:`backward`, and the base optimizer's step. Without a closure: the base optimizer's step on what :meth:`backward` prepared.

        Returns:
            The loss at ``w`` before the step; None without a closure.
        """
        loss = None
        if closure is not None and self._phase != "busy":
            self.zero_grad()
            loss = self.backward(closure)
        if self._phase != "ready":
            raise Refusal(_NOT_READY[self._phase])
        try:
            if self._offsets:
                self._weights.move(sum(self._offsets[1:], self._offsets[0]) / len(self._offsets))
            self.base.step()
        except BaseException:
            self._weights.restore()
            raise
        self._weights.stay()
        self._memory.commit(self.param_groups)
        self._reset()
        self.count_step()
        return loss

    def count_step(self) -> None:
        """Count a step that was taken: :meth:`step` does, and whoever replays a CUDA graph of it calls this himself."""
        for group in self.param_groups:
            group["steps_taken"] += 1

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear ``p.grad``, and with it what :meth:`backward` prepared."""
        super().zero_grad(set_to_none)
        if self._phase != "busy":  # a closure that clears, as torch's closures do, clears the pass it is in
            self._reset()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the base optimizer; it may bring its own settings."""
        check_names(param_group, self.settings, self.base.defaults)
        self.base.add_param_group(param_group)
        group = self.param_groups.pop()
        known = {name: self.param_groups[0][name] for name in (*self.numbers, "steps_taken")}
        self.param_groups.append(self.completed({**self.settings, **group, **known}))

    @property
    def t(self) -> int:
        """Steps taken."""
        return self.param_groups[0]["steps_taken"]

    # One state for both.

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The base optimizer's own list."""
        return self.base.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The base optimizer's own state."""
        return self.base.state

    def state_dict(self) -> dict[str, Any]:
        """The base optimizer's state with the method's settings and memory merged in: one standard ``{state, param_groups}``."""
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        merged = self.base.state_dict()
        self._memory.merge_into(merged, self.param_groups)
        for after in self._optimizer_state_dict_post_hooks.values():
            merged = after(self, merged) or merged
        return merged

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` gave. The state of a base optimizer alone will do: the method then starts afresh, with the settings it has."""
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict) or state_dict
        afresh = {**dict.fromkeys(self.numbers), "steps_taken": 0}
        settings = [{**{name: group.get(name, self.settings[name]) for name in self.settings}, **afresh} for group in self.param_groups]
        self.base.load_state_dict({**state_dict, "state": self._memory.without(state_dict["state"])})
        for group, own in zip(self.param_groups, settings, strict=True):
            group.update({**own, **group})
        self._memory.load(state_dict, self.param_groups)
        self._reset()
        for finish in self._optimizer_load_state_dict_post_hooks.values():
            finish(self)

    def __getstate__(self) -> dict[str, Any]:
        passing = {"step", "_weights", "_ranks", "_phase", "_offset", "_offsets", "watchers"}  # `step`: schedulers patch the instance
        return {k: v for k, v in self.__dict__.items() if k not in passing and not k.startswith("_optimizer_")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # makes the hooks, too; Optimizer.__init__ would make groups, and those are the base's
        self._weights = Weights()
        self._ranks = Ranks(self.model, self.m_sharpness)
        self._offset = None
        self.watchers: list[Watcher] = []
        self._reset()

    def _reset(self) -> None:
        self._phase, self._offsets = "idle", []
        self._memory.forget()
        self._ranks.owing = False
