"""Combining several optimizers into one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from .errors import BsamRuntimeError, BsamTypeError, BsamValueError


class CombinedOptimizer(Optimizer):
    """Several optimizers as one, such as Muon (torch 2.9 or newer) for matrices and AdamW for the other parameters.

    ``param_groups`` lists the members' groups in order, so a scheduler reaches all of them. ``state_dict`` returns one
    standard ``{state, param_groups}``.

    Args:
        members: the optimizers; no parameter may belong to two of them.

    Example:
        >>> import bsam
        >>> model = torch.nn.Linear(3, 2)
        >>> base = bsam.CombinedOptimizer(
        ...     [
        ...         torch.optim.SGD([model.weight], lr=0.02),
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
            raise BsamTypeError(f"members must be a non-empty list of optimizers, got {members!r}")
        for member in members:
            if not isinstance(member, Optimizer) or isinstance(member, LBFGS):
                raise BsamTypeError(f"members must be optimizers that need no closure, got {type(member).__name__}")
        params = [p for member in members for group in member.param_groups for p in group["params"]]
        if len(set(params)) < len(params):
            shared = next(p for i, p in enumerate(params) if p in set(params[:i]))
            raise BsamValueError(
                f"a parameter with the shape {tuple(shared.shape)} belongs to two members: pass it to only one"
            )
        defaults = {name: value for member in reversed(members) for name, value in member.defaults.items()}
        # not Optimizer.__init__, which would create parameter groups
        self.__setstate__({"members": tuple(members), "defaults": defaults})

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The members' groups, in order."""
        return [group for member in self.members for group in member.param_groups]

    @property
    def state(self) -> dict[Any, Any]:  # type: ignore[override]
        """The members' state by parameter; :meth:`state_dict` also has entries without a parameter."""
        return _MergedState(self.members)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Run one step of every member. A closure is called once, before them."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for member in self.members:
            member.step()
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise an error: a group must be added to one of the members."""
        raise BsamRuntimeError(
            "CombinedOptimizer does not know which member a new group belongs to: add it to a member, before "
            "CombinedOptimizer is built"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the members' states as one state dict.

        Parameters are numbered consecutively; the keys of other entries start with the member's index.
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
        """Load a state dict from :meth:`state_dict`. Raise before anything is loaded if the group sizes differ."""
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict) or state_dict
        groups, state = list(state_dict["param_groups"]), state_dict["state"]
        sizes, saved = ([len(group["params"]) for group in listed] for listed in (self.param_groups, groups))
        if sizes != saved:
            raise BsamValueError(
                f"this state dict has parameter groups of sizes {saved}, but the members' groups have {sizes}: build "
                "the members as they were when it was saved"
            )
        for n, member in enumerate(self.members):
            member_groups, groups = groups[: len(member.param_groups)], groups[len(member.param_groups) :]
            indices = {i for group in member_groups for i in group["params"]}
            entries = {k: v for k, v in state.items() if k in indices}
            entries |= {k.removeprefix(f"{n}."): v for k, v in state.items() if str(k).startswith(f"{n}.")}
            member.load_state_dict({"state": entries, "param_groups": member_groups})
        for finish in self._optimizer_load_state_dict_post_hooks.values():
            finish(self)

    @property
    def train(self) -> Callable[[], None]:
        """``train`` of all members that have one, as schedule-free optimizers do; AttributeError if none has."""
        return self._all("train")

    @property
    def eval(self) -> Callable[[], None]:
        """``eval`` of all members that have one; AttributeError if none has."""
        return self._all("eval")

    def _all(self, name: str) -> Callable[[], None]:
        calls = [getattr(member, name) for member in self.members if hasattr(member, name)]
        if not calls:
            raise AttributeError(f"no member of CombinedOptimizer has {name}()")

        def call() -> None:
            for member_call in calls:
                member_call()

        return call

    def __getstate__(self) -> dict[str, Any]:
        # without hooks and the `step` that schedulers patch on the instance
        return {"members": self.members, "defaults": self.defaults}


class _MergedState(dict[Any, Any]):
    """The entries of all members by parameter. The entry of a parameter without state is created by its member."""

    def __init__(self, members: Sequence[Optimizer]) -> None:
        super().__init__((p, entry) for member in members for p, entry in member.state.items() if isinstance(p, Tensor))
        self._members = members

    def __missing__(self, p: Tensor) -> dict[str, Any]:
        member = next(m for m in self._members if any(p is q for group in m.param_groups for q in group["params"]))
        self[p] = member.state[p]
        return self[p]
