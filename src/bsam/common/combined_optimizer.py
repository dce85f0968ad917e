"""Combining several optimizers into one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from .errors import BsamRuntimeError, BsamTypeError, BsamValueError


class CombinedOptimizer(Optimizer):
    """Several optimizers as one, each with parameters of its own, such as Muon for matrices and AdamW for the rest.

    ``param_groups`` are the members' own, in their order, so that a scheduler reaches all of them. ``state_dict`` is
    one standard ``{state, param_groups}``.

    Args:
        members: the optimizers, already built; no parameter may belong to two of them.

    Example:
        >>> import bsam
        >>> model = torch.nn.Linear(3, 2)
        >>> base = bsam.CombinedOptimizer(
        ...     [
        ...         torch.optim.Muon([model.weight], lr=0.02),
        ...         torch.optim.AdamW([model.bias], lr=0.001),
        ...     ]
        ... )
        >>> optimizer = bsam.BSAM(base, model)
        >>> loss = optimizer.step(lambda: model(torch.ones(4, 3)).square().mean())
        >>> [group["lr"] for group in optimizer.param_groups]
        [0.02, 0.001]
    """

    members: tuple[Optimizer, ...]

    def __init__(self, members: Sequence[Optimizer]) -> None:
        if not isinstance(members, (list, tuple)) or not members:
            raise BsamTypeError(f"members must be a list of optimizers, got {members!r}")
        for member in members:
            if not isinstance(member, Optimizer) or isinstance(member, LBFGS):
                raise BsamTypeError(f"members must be optimizers that need no closure, got {type(member).__name__}")
        params = [p for member in members for group in member.param_groups for p in group["params"]]
        if len(set(params)) < len(params):
            shared = next(p for i, p in enumerate(params) if p in set(params[:i]))
            raise BsamValueError(
                f"a parameter of the shape {tuple(shared.shape)} belongs to two members: give it to one"
            )
        defaults = {name: value for member in reversed(members) for name, value in member.defaults.items()}
        # not Optimizer.__init__, which would make groups of its own
        self.__setstate__({"members": tuple(members), "defaults": defaults})

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The members' own groups, in their order."""
        return [group for member in self.members for group in member.param_groups]

    @property
    def state(self) -> dict[Any, Any]:  # type: ignore[override]
        """The members' state by parameter, to read; other entries of a member are in :meth:`state_dict` only."""
        return {p: entry for member in self.members for p, entry in member.state.items() if isinstance(p, Tensor)}

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step of each member; the closure, if there is one, is called once before them."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for member in self.members:
            member.step()
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise an error: it is not known which member a new group belongs to."""
        raise BsamRuntimeError(
            "a new group belongs to one of the members: add it there, before CombinedOptimizer is built"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the members' state as one.

        Parameters are numbered consecutively; the keys of a member's other entries begin with the member's number.
        """
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        merged: dict[str, Any] = {"state": {}, "param_groups": []}
        offset = 0
        for n, member in enumerate(self.members):
            saved = member.state_dict()
            merged["state"] |= {k + offset if isinstance(k, int) else f"{n}.{k}": v for k, v in saved["state"].items()}
            groups = saved["param_groups"]
            merged["param_groups"] += [{**group, "params": [i + offset for i in group["params"]]} for group in groups]
            offset += sum(len(group["params"]) for group in groups)
        for after in self._optimizer_state_dict_post_hooks.values():
            merged = after(self, merged) or merged
        return merged

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` returned. Groups of other sizes are an error, before a member loads anything."""
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict) or state_dict
        groups, state = list(state_dict["param_groups"]), state_dict["state"]
        sizes, saved = ([len(group["params"]) for group in own] for own in (self.param_groups, groups))
        if sizes != saved:
            raise BsamValueError(
                f"this state dict has parameter groups of {saved} parameters, and the members' groups have {sizes}: "
                "build the members as they were when it was saved"
            )
        for n, member in enumerate(self.members):
            own, groups = groups[: len(member.param_groups)], groups[len(member.param_groups) :]
            indices = {i for group in own for i in group["params"]}
            entries = {k: v for k, v in state.items() if k in indices}
            for k, v in state.items():
                if isinstance(k, str) and k.startswith(f"{n}."):
                    entries[k.removeprefix(f"{n}.")] = v
            member.load_state_dict({"state": entries, "param_groups": own})
        for finish in self._optimizer_load_state_dict_post_hooks.values():
            finish(self)

    @property
    def train(self) -> Callable[[], None]:
        """``train`` of the members that have one, as schedule-free optimizers do; an AttributeError where none has."""
        return self._all("train")

    @property
    def eval(self) -> Callable[[], None]:
        """``eval`` of the members that have one; an AttributeError where none has."""
        return self._all("eval")

    def _all(self, name: str) -> Callable[[], None]:
        calls = [getattr(member, name) for member in self.members if hasattr(member, name)]
        if not calls:
            raise AttributeError(f"no member of CombinedOptimizer has {name}()")

        def call() -> None:
            for own in calls:
                own()

        return call

    def __getstate__(self) -> dict[str, Any]:
        # hooks and the `step` that schedulers patch belong to the instance
        return {"members": self.members, "defaults": self.defaults}
