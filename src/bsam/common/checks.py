"""Validation of arguments, with error messages that name the argument."""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Iterable, Mapping
from fractions import Fraction
from inspect import Parameter
from numbers import Integral
from typing import Any

from torch import nn
from torch.optim import LBFGS, Optimizer

from .errors import BsamTypeError, BsamValueError


def check_radius(name: str, value: object) -> None:
    """Raise unless a radius is a finite, non-negative number."""
    if not is_number(value) or value < 0:  # type: ignore[operator]
        raise BsamValueError(f"{name} must be a finite number that is not negative, got {value!r}")


def check_number(name: str, value: object, low: float = -math.inf, high: float = math.inf) -> float:
    """Return ``value`` if it is a finite number between ``low`` and ``high``; otherwise raise."""
    if not is_number(value) or not low <= value <= high:  # type: ignore[operator]
        bounds = {(True, True): "", (False, True): f" of at least {low}", (True, False): f" of at most {high}"}
        between = bounds.get((low == -math.inf, high == math.inf), f" between {low} and {high}")
        raise BsamValueError(f"{name} must be a finite number{between}, got {value!r}")
    return value  # type: ignore[return-value]


def check_count(name: str, value: object, low: int = 1, high: float = math.inf) -> int:
    """Return ``value`` as an int if it is a Python or NumPy integer between ``low`` and ``high``; otherwise raise.

    Example:
        >>> import numpy as np
        >>> check_count("k", np.int64(3))
        3
    """
    count = operator.index(value) if isinstance(value, Integral) and not isinstance(value, bool) else None
    if count is None or not low <= count <= high:
        bounds = f"of at least {low}" if high == math.inf else f"between {low} and {high}"
        raise BsamValueError(f"{name} must be a whole number {bounds}, got {value!r}")
    return count


def check_share(name: str, value: object) -> float:
    """Return ``value`` if it is a number above 0 and at most 1; otherwise raise."""
    if not is_number(value) or not 0 < value <= 1:  # type: ignore[operator]
        raise BsamValueError(f"{name} must be a number above 0 and at most 1, got {value!r}")
    return value  # type: ignore[return-value]


def exact(share: float) -> Fraction:
    """Return the fraction that a share was meant to be, so that its products with whole numbers are not rounded.

    Example:
        >>> 0.28 * 25, exact(0.28) * 25
        (7.000000000000001, Fraction(7, 1))
    """
    return Fraction(share).limit_denominator(10**6)


def check_flag(name: str, value: object) -> bool:
    """Return ``value`` if it is True or False; otherwise raise."""
    if not isinstance(value, bool):
        raise BsamValueError(f"{name} must be True or False, got {value!r}")
    return value


def is_number(value: object) -> bool:
    """Whether ``value`` is a finite int or float (a bool is neither)."""
    try:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an int beyond the range of floats
        return False


def check_names(group: Mapping[str, object], settings: Mapping[str, object], defaults: Mapping[str, object]) -> None:
    """Raise if a group has a setting that the method does not use, or if base and method share a setting's name."""
    clash = sorted(settings.keys() & defaults.keys())
    if clash:
        raise BsamValueError(f"base and this method both have a setting {clash[0]}: use another base")
    for name in ("lr_max", "lr_min", "warmup", "start"):
        if name in group and name not in defaults and f"sharpness_{name}" in settings:
            raise BsamValueError(f"a parameter group has {name}, which is not used: rename it to sharpness_{name}")
    ours = ("rho", "sharpness_")
    unused = [name for name in group if name.startswith(ours) and name not in settings and name not in defaults]
    if unused and unused[0].startswith("sharpness_"):
        known = ", ".join(name for name in ("sharpness_warmup", "sharpness_start") if name in settings)
        raise BsamValueError(f"a parameter group has {unused[0]}, which this method does not use: it has {known}")
    if unused:
        known = ", ".join(name for name in settings if name.startswith("rho"))
        raise BsamValueError(
            f"a parameter group has {unused[0]}, which this method does not use: its radii are {known or 'none'}"
        )


def check_call(cls: type, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
    """Raise if a method is called in the style of another package; the message says which line to write."""
    name, parameters = cls.__name__, inspect.signature(cls).parameters
    line = f"{'bsam.' if cls.__module__.startswith('bsam.') else ''}{name}(base, model"
    first = arguments[0] if arguments else named.get("base")
    if isinstance(first, nn.Module):
        raise BsamTypeError(f"base must be an optimizer, got {type(first).__name__}: write {line}), base first")
    iterable = isinstance(first, Iterable) and not isinstance(first, (Optimizer, type, str))
    if iterable or "params" in named or "base_optimizer" in named:
        classes = [a.__name__ for a in (*arguments[1:], *named.values()) if isinstance(a, type)]
        raise BsamTypeError(
            f"{name} takes an optimizer, not parameters: write base = torch.optim.{(*classes, 'SGD')[0]}"
            f"(model.parameters(), lr=...) and {line})"
        )
    kinds = {p.kind for p in parameters.values()}
    settings = [p.name for p in parameters.values() if p.kind == p.KEYWORD_ONLY]
    positional = [p.name for p in parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    radii = [setting for setting in settings if setting.startswith("rho") and "floor" not in setting]
    hint = f"it has {', '.join(settings)}"
    if len(arguments) > len(positional) and Parameter.VAR_POSITIONAL not in kinds:
        extra = arguments[len(positional)]
        got = f"a {type(extra).__name__}"
        if radii and is_number(extra):
            got, hint = repr(extra), f"write {line}, {radii[0]}={extra!r})"
        raise BsamTypeError(f"{name} takes its settings by name, got {got} without one: {hint}")
    unknown = next((argument for argument in named if argument not in parameters), None)
    if unknown is not None and Parameter.VAR_KEYWORD not in kinds:
        if unknown in ("lr", "momentum", "weight_decay", "betas", "nesterov"):
            hint = "pass it to the base optimizer"
        elif unknown.startswith("rho"):
            hint = f"its radii are {', '.join(f'{radius}=...' for radius in radii)}"
        raise BsamTypeError(f"{name} has no argument {unknown}: {hint}")
    given = {*positional[: len(arguments)], *named}
    for missing in [*positional, *settings]:
        if missing not in given and parameters[missing].default is Parameter.empty:
            hints = {"total_steps": ", the number of training steps", "model": ", the network to train"}
            more = "" if missing in ("base", "model") else f", {missing}=..."
            raise BsamTypeError(f"{name} needs {missing}{hints.get(missing, '')}: write {line}{more})")


def missing_attribute(optimizer: object, name: str) -> AttributeError:
    """Return the error for a missing attribute, with a hint if SAM of other packages has it."""
    hint = ": it is called base" if name == "base_optimizer" else ""
    if name in ("first_step", "second_step"):
        hint = ": write optimizer.step(closure), where the closure computes the loss; the step runs all passes"
    if "base" not in vars(optimizer):
        hint = ": its __init__ must first call super().__init__(base, model, ...)"
    return AttributeError(f"{type(optimizer).__name__} has no attribute {name}{hint}")


def check_base(base: object) -> None:
    """Raise unless ``base`` is an optimizer that can step on a prepared gradient."""
    if isinstance(base, type) and issubclass(base, Optimizer):
        raise BsamTypeError(
            f"base must be an optimizer, got the class {base.__name__}: pass {base.__name__}(model.parameters(), ...)"
        )
    if not isinstance(base, Optimizer):
        raise BsamTypeError(f"base must be a torch.optim.Optimizer, got {type(base).__name__}")
    if isinstance(base, LBFGS):
        raise BsamValueError(
            "base must step on p.grad alone, but LBFGS calls the closure several times: use SGD, AdamW or another "
            "optimizer"
        )
    if any("steps_taken" in group for group in base.param_groups):
        raise BsamValueError(
            "base already belongs to a sharpness-aware optimizer, or has loaded the state of one: build a new base, "
            "and load checkpoints into the sharpness-aware optimizer"
        )
    if any(group.get("differentiable") for group in base.param_groups):
        raise BsamValueError(
            "base has differentiable=True, but a sharpness-aware step cannot be differentiated: remove the option"
        )
    if any(group.get("maximize") for group in base.param_groups):
        raise BsamValueError(
            "base has maximize=True, with which perturbations would point the wrong way: minimize the negated loss"
        )


def check_modules(model: object, base: Optimizer) -> tuple[nn.Module, ...]:
    """Return the modules that the closure calls, the trained one first; an empty tuple for None.

    Raise if the first has trainable parameters that ``base`` does not have: their gradients would accumulate.
    """
    if model is None:
        return ()
    modules = tuple(model) if isinstance(model, (list, tuple)) else (model,)
    if not modules or not all(isinstance(module, nn.Module) for module in modules):
        got = ", ".join(type(module).__name__ for module in modules) or "an empty list"
        raise BsamTypeError(
            "model must be the torch.nn.Module that the closure calls, None if it has no buffers, or a list of all "
            f"modules that the closure calls, the trained one first; got {got}"
        )
    known = {p for group in base.param_groups for p in group["params"]}
    unknown = [name for name, p in modules[0].named_parameters() if p.requires_grad and p not in known]
    if unknown:
        raise BsamValueError(
            f"model has {len(unknown)} trainable parameter(s) that base does not have "
            f"({', '.join(unknown[:3])}{', ...' if len(unknown) > 3 else ''}): "
            "pass them to base, or freeze them with requires_grad_(False)"
        )
    return modules
