"""A wrapper around the base optimizer, with one state dict for both."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from typing import Any, ClassVar

from torch.optim import Optimizer

from ..common.checks import check_names, check_radius
from ..common.errors import BsamValueError
from .method_state import MethodState
from .schedule import completed_schedule
from .state_dicts import base_state, without

# Keys of the parameter groups, and so of a state dict: the method's name, and the names of all its entries.
METHOD, ENTRY_NAMES = "sharpness_method", "sharpness_names"
PERTURB = "perturb"  # a key for the user's groups: parameters of a group with False are not perturbed


class OptimizerWrapper(Optimizer):
    """A method that wraps a base optimizer and uses its parameter groups and state; a state dict holds both.

    The ``settings`` of the method are values of the groups; ``_method_state`` holds values that it remembers.
    """

    vectors: tuple[str, ...] = ()  # names of the vectors that a method remembers between steps
    numbers: ClassVar[tuple[str, ...]] = ()  # names of the numbers that it remembers
    scheduled_radii: ClassVar[dict[str, str]] = {}  # from radii that follow the learning rate to their floors

    base: Optimizer
    settings: dict[str, Any]
    _method_state: MethodState

    @abstractmethod
    def _reset(self) -> None:
        """Discard the prepared step."""

    def completed(self, group: dict[str, Any]) -> dict[str, Any]:
        """Check the settings of a group, and return it with derived settings filled in."""
        if not isinstance(group.get(PERTURB, True), bool):
            raise BsamValueError(f"{PERTURB} of a parameter group must be True or False, got {group[PERTURB]!r}")
        for name, value in group.items():
            if name.startswith("rho") and name not in self.scheduled_radii.values():
                check_radius(name, value)
        for radius, floor in self.scheduled_radii.items():
            group = completed_schedule(group, radius, floor)
        return group

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the base optimizer; it may override the method's settings."""
        check_names(param_group, self.settings, self.base.defaults)
        self.base.add_param_group(param_group)
        group = self.param_groups.pop()
        self.param_groups.append(self._with_settings(group))

    def _with_settings(self, group: dict[str, Any]) -> dict[str, Any]:
        """Add the method's settings to a group, as if it had been there from the start."""
        progress = {name: self.param_groups[0][name] for name in (*self.numbers, "steps_taken")}
        return self.completed({**self.settings, **group, **progress})

    def __repr__(self) -> str:
        """Show the base optimizer and the radii of each group, but no internal values."""
        lines = [f"{type(self).__name__} with {type(self.base).__name__} ("]
        for i, group in enumerate(self.param_groups):
            internal = {"params", "steps_taken", "initial_lr", *self.numbers}
            names = (name for name in group if name not in internal and not name.startswith("sharpness_"))
            shown = (f"{name}: {group[name]}" for name in names if group[name] is not None and group[name] is not False)
            lines += [f"Parameter group {i}", *(f"    {line}" for line in shown)]
        return "\n".join(lines) + "\n)"

    @property
    def t(self) -> int:
        """The number of steps taken."""
        return self.param_groups[0]["steps_taken"]

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

    def state_dict(self) -> dict[str, Any]:
        """Return the base optimizer's state merged with the method's, as a standard ``{state, param_groups}``."""
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        merged = self.base.state_dict()
        self._method_state.merge_into(merged, self.param_groups)
        for after in self._optimizer_state_dict_post_hooks.values():
            merged = after(self, merged) or merged
        return merged

    @classmethod
    def method(cls) -> str:
        """Return the name of the class that defines :meth:`direction`; frameworks may derive from it."""
        return next(base.__name__ for base in cls.__mro__ if "direction" in vars(base))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict from :meth:`state_dict`.

        The state of a bare base optimizer is accepted: the method then starts from scratch, with its current settings.
        From the state of another method, only the base optimizer's part is loaded, with a warning.
        """
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict) or state_dict
        saved = next((group[METHOD] for group in state_dict["param_groups"] if METHOD in group), self.method())
        if saved != self.method():
            warnings.warn(
                f"this state dict belongs to {saved}, not to {self.method()}: only the base optimizer's part is "
                f"loaded, and {self.method()} starts from scratch with its current settings",
                stacklevel=2,
            )
            state_dict = base_state(state_dict, ENTRY_NAMES)
        start = {**dict.fromkeys(self.numbers), "steps_taken": 0}
        settings = [{**self.settings, **group, **start} for group in self.param_groups]
        settings = [{name: group[name] for name in self.settings} for group in settings]
        # with other arguments, the same method may have remembered other vectors
        names = {*self.vectors, *(name for group in state_dict["param_groups"] for name in group.get(ENTRY_NAMES, ()))}
        self.base.load_state_dict({**state_dict, "state": without(state_dict["state"], names)})
        for group, defaults in zip(self.param_groups, settings, strict=True):
            group.update({**defaults, **group, ENTRY_NAMES: self.settings[ENTRY_NAMES]})
        self._method_state.load(state_dict, self.param_groups)
        self._reset()
        for finish in self._optimizer_load_state_dict_post_hooks.values():
            finish(self)
