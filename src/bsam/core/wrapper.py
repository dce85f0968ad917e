"""A wrapper around the base optimizer: its groups hold the method's settings, and one state dict saves both."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Collection, Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..common.checks import check_count, check_flag, check_names, check_radius, is_number
from ..common.errors import BsamValueError
from .schedule import LR_MAX, LR_MIN, LR_SEEN, LR_START, START, WARMUP
from .tensors import wide_dtype

# Keys of the parameter groups, and so of a state dict: the method's name, and the names of all its entries.
METHOD, ENTRY_NAMES = "sharpness_method", "sharpness_names"
# Keys for the user's groups: parameters of a group with False are not perturbed, or do not count in the length |g| that
# a perturbation rho g / |g| is divided by.
PERTURB, IN_NORM = "perturb", "in_norm"


class OptimizerWrapper(Optimizer):
    """A method that wraps a base optimizer and uses its parameter groups and state.

    The ``settings`` of the method and the numbers that it remembers are values of the groups; the vectors that it
    remembers are entries of ``base.state[p]``, beside those of the base optimizer.
    """

    vectors: tuple[str, ...] = ()  # names of the vectors that a method remembers between steps
    # Those vectors that are means over steps. They keep the entries of parameters without a gradient in a step, and are
    # float32 for parameters in half precision.
    running_means: tuple[str, ...] = ()
    numbers: tuple[str, ...] = ()  # names of the numbers that it remembers
    scheduled_radii: ClassVar[dict[str, str]] = {}  # from radii that follow the learning rate to their floors

    base: Optimizer
    settings: dict[str, Any]
    _checked: list[list[Any]]  # the names and the settings in each group when they were last checked

    @classmethod
    def method(cls) -> str:
        """Return the name of the class that defines :meth:`direction`; frameworks may derive from it."""
        return next(base.__name__ for base in cls.__mro__ if "direction" in vars(base))

    def completed(self, group: dict[str, Any]) -> dict[str, Any]:
        """Check the settings of a group, and return it with derived settings filled in."""
        for name in (PERTURB, IN_NORM):
            check_flag(f"{name} of a parameter group", group.get(name, True))
        for name in (WARMUP, START):
            check_count(name.removeprefix("sharpness_"), group[name], low=0)
        for name, value in group.items():
            if name.startswith("rho") and name not in self.scheduled_radii.values():
                check_radius(name, value)
        for radius, floor in self.scheduled_radii.items():
            group = _completed_schedule(group, radius, floor)
        return group

    @property
    def radius_names(self) -> list[str]:
        """The names of the method's radii."""
        return [name for name in self.settings if name.startswith("rho") and name not in self.scheduled_radii.values()]

    def check_groups(self) -> None:
        """Check the settings in the groups again if they were edited. Tensors, which CUDA graphs read, are left out."""
        names = [name for name in self.settings if name.startswith("rho") or name in (WARMUP, START, LR_MAX, LR_MIN)]
        names += [PERTURB, IN_NORM]
        current = [[*group, *(_plain(group.get(name)) for name in names)] for group in self.param_groups]
        if current == self._checked:
            return
        for group in self.param_groups:
            check_names(group, self.settings, self.base.defaults)
            known = {name: self.settings.get(name, True) for name in names if isinstance(group.get(name), Tensor)}
            for radius, floor in self.scheduled_radii.items():
                if {radius, floor} & known.keys():
                    known |= {radius: 0.0, floor: None}
            if group.get(LR_START) is not None:
                known["initial_lr"] = group[LR_START]
            self.completed({**group, **known})
        self._checked = current

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
        lines = [f"{type(self).__name__} with {type(self.base).__name__} ("]
        for i, group in enumerate(self.param_groups):
            internal = {"params", "steps_taken", "initial_lr", *self.numbers}
            names = [name for name in group if name not in internal and not name.startswith("sharpness_")]
            names = [name for name in names if group[name] is not None and group[name] is not False]
            names += [name for name in (WARMUP, START) if group[name]]
            names += [name for name in (PERTURB, IN_NORM) if group.get(name) is False]
            shown = (f"{name}: {group[name]}" for name in names)
            lines += [f"Parameter group {i}", *(f"    {line}" for line in shown)]
        return "\n".join(lines) + "\n)"

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the base optimizer and of the method, as a standard ``{state, param_groups}``."""
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        merged = self.base.state_dict()
        for after in self._optimizer_state_dict_post_hooks.values():
            merged = after(self, merged) or merged
        return merged

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict from :meth:`state_dict`.

        The state of a bare base optimizer is accepted: the method then starts from scratch, with its current settings.
        From the state of another method, only the base optimizer's part is loaded, with a warning.
        """
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict) or state_dict
        groups = state_dict["param_groups"]
        saved = next((group[METHOD] for group in groups if METHOD in group), self.method())
        entries = {name for group in groups for name in group.get(ENTRY_NAMES, ())}
        if saved != self.method():
            warnings.warn(
                f"this state dict belongs to {saved}, not to {self.method()}: only the base optimizer's part is "
                f"loaded, and {self.method()} starts from scratch with its current settings",
                stacklevel=2,
            )
            groups = [{k: v for k, v in group.items() if k not in entries} for group in groups]
            state = _without(state_dict["state"], entries)
        else:  # with other arguments, the same method may have remembered other vectors
            state = _without(state_dict["state"], entries - {*self.vectors})
        start = {**dict.fromkeys(self.numbers), "steps_taken": 0}
        settings = [{**self.settings, **group, **start} for group in self.param_groups]
        self.base.load_state_dict({**state_dict, "state": state, "param_groups": groups})
        for entry in self.state.values():  # copies: later steps write to the vectors
            if isinstance(entry, dict):
                entry.update({name: entry[name].clone() for name in self.vectors if name in entry})
        self._load_running_means(state, [i for group in groups for i in group["params"]])
        for group, current in zip(self.param_groups, settings, strict=True):
            defaults = {name: current[name] for name in self.settings}
            group.update({**defaults, **group, ENTRY_NAMES: self.settings[ENTRY_NAMES]})
        self._reset()
        for finish in self._optimizer_load_state_dict_post_hooks.values():
            finish(self)

    def _load_running_means(self, saved: dict[Any, Any], indices: Iterable[Any]) -> None:
        """Load the running means again: base optimizers cast them to the type of the parameters."""
        params = (p for group in self.param_groups for p in group["params"])
        for i, p in zip(indices, params, strict=True):
            means = {name: t for name, t in saved.get(i, {}).items() if name in self.running_means}
            if means:
                wide = {name: t.to(p.device, wide_dtype(p.dtype), copy=True) for name, t in means.items()}
                self.state[p].update(wide)

    @abstractmethod
    def _reset(self) -> None:
        """Discard the prepared step."""


def _plain(value: Any) -> Any:
    """Return a value that can be compared without reading a tensor."""
    return Tensor if isinstance(value, Tensor) else value


def _without(state: dict[Any, Any], names: Collection[str]) -> dict[Any, Any]:
    """Return the state without the entries whose names are in ``names``. State that belongs to no parameter is kept."""
    entries: dict[Any, Any] = {
        i: {k: v for k, v in entry.items() if k not in names} if isinstance(entry, dict) else entry
        for i, entry in state.items()
    }
    return {i: entry for i, entry in entries.items() if not isinstance(entry, dict) or entry}


def _completed_schedule(group: dict[str, Any], radius: str, floor: str) -> dict[str, Any]:
    """Check and complete a group whose ``radius`` follows the learning rate down to ``floor``."""
    lr_min, lr_max = group[LR_MIN], group[LR_MAX]
    lr = group.get("lr")
    if group[floor] is not None:
        check_radius(floor, group[floor])
        if group[floor] > group[radius]:
            raise BsamValueError(f"{floor} must not be above {radius}, got {group[floor]} and {group[radius]}")
    if not is_number(lr_min) or lr_min < 0:
        raise BsamValueError(f"lr_min must be a finite number that is not negative, got {lr_min!r}")
    if lr is not None:  # optimizers that choose their step length may have lr=None
        group = {**group, LR_START: float(group.get("initial_lr", lr))}
        group[LR_SEEN] = torch.zeros_like(lr) if isinstance(lr, Tensor) else 0.0
        if lr_max is None:
            lr_max = float(group.get("max_lr", group[LR_START]))
            if lr_max == lr_min == 0:  # a scheduler may raise the rate from 0 later
                return group
    elif group[floor] not in (None, group[radius]):
        raise BsamValueError(
            f"{radius} follows the learning rate, but base has no lr in its parameter groups: "
            f"pass {floor}={group[radius]} to keep {radius} fixed, or use another base"
        )
    elif lr_max is None:
        return group
    if not is_number(lr_max) or lr_max <= lr_min:
        raise BsamValueError(
            f"lr_max must be a finite number above lr_min, got lr_max={lr_max!r} and lr_min={lr_min!r}"
        )
    return group
