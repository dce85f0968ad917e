"""An optimizer around another, with one state for both."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor
from torch.optim import Optimizer

from .checks import check_names, check_radius
from .foreach import Scalar
from .method_state import MethodState, of_base
from .schedule import completed_schedule, scheduled
from .vector import Coefficient, PerGroup

# Keys of the parameter groups, and with them of a state dict: whose it is, and the names in it that are the method's.
METHOD, OWN = "sharpness_method", "sharpness_names"


class Wrapper(Optimizer):
    """A method around a base optimizer: parameter groups and state are the base's, and a state dict holds both.

    ``settings`` of the method are values of the groups; what it remembers between steps is in ``_memory``.
    """

    vectors: ClassVar[tuple[str, ...]] = ()  # names of the vectors that a method keeps between steps
    numbers: ClassVar[tuple[str, ...]] = ()  # and of the numbers
    follows: ClassVar[dict[str, str]] = {}  # radii that follow the learning rate, and the names of their floors

    base: Optimizer
    settings: dict[str, Any]
    _memory: MethodState

    @abstractmethod
    def _reset(self) -> None:
        """Forget what was prepared for the next step."""

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
        return scheduled(group, name, self.follows[name]) if name in self.follows else group[name]

    def radii(self, name: str) -> Coefficient:
        """The radius ``name`` in this step: one number, or one per group where they differ."""
        values = [self.radius(group, name) for group in self.param_groups]
        alike = not isinstance(values[0], Tensor) and all(not isinstance(v, Tensor) and v == values[0] for v in values)
        return values[0] if alike or len(values) == 1 else PerGroup(values)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the base optimizer; it may bring its own settings."""
        check_names(param_group, self.settings, self.base.defaults)
        self.base.add_param_group(param_group)
        group = self.param_groups.pop()
        known = {name: self.param_groups[0][name] for name in (*self.numbers, "steps_taken")}
        self.param_groups.append(self.completed({**self.settings, **group, **known}))

    @property
    def train(self) -> Callable[[], None]:
        """The base optimizer's ``train``, which schedule-free optimizers have; an AttributeError where it has none."""
        return self.base.train  # type: ignore[attr-defined]

    @property
    def eval(self) -> Callable[[], None]:
        """The base optimizer's ``eval``, which schedule-free optimizers have; an AttributeError where it has none."""
        return self.base.eval  # type: ignore[attr-defined]

    @property
    def t(self) -> int:
        """Steps taken."""
        return self.param_groups[0]["steps_taken"]

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The base optimizer's own list."""
        return self.base.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The base optimizer's own state."""
        return self.base.state

    def state_dict(self) -> dict[str, Any]:
        """The base optimizer's state with the method's settings and memory merged in, as ``{state, param_groups}``."""
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        merged = self.base.state_dict()
        self._memory.merge_into(merged, self.param_groups)
        for after in self._optimizer_state_dict_post_hooks.values():
            merged = after(self, merged) or merged
        return merged

    @classmethod
    def method(cls) -> str:
        """The name of the method: of the class that defines :meth:`direction`, whatever frameworks derive from it."""
        return next(base.__name__ for base in cls.__mro__ if "direction" in vars(base))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` gave.

        The state of a base optimizer alone will do: the method then starts afresh, with the settings it has. So it does
        with the state of another method, of which base gets its part; a warning says so.
        """
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict) or state_dict
        saved = next((group[METHOD] for group in state_dict["param_groups"] if METHOD in group), self.method())
        if saved != self.method():
            afresh = f"base gets its part, and {self.method()} starts afresh with the settings it has"
            warnings.warn(f"this is the state of {saved}, loaded into {self.method()}: {afresh}", stacklevel=2)
            state_dict = of_base(state_dict, OWN)
        start = {**dict.fromkeys(self.numbers), "steps_taken": 0}
        settings = [{**self.settings, **group, **start} for group in self.param_groups]
        settings = [{name: group[name] for name in self.settings} for group in settings]
        self.base.load_state_dict({**state_dict, "state": self._memory.without(state_dict["state"])})
        for group, own in zip(self.param_groups, settings, strict=True):
            group.update({**own, **group})
        self._memory.load(state_dict, self.param_groups)
        self._reset()
        for finish in self._optimizer_load_state_dict_post_hooks.values():
            finish(self)
