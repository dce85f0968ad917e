"""The methods that runs train with: those of bsam by name, and classes of the user as ``MODULE:CLASS``."""

from __future__ import annotations

import inspect
from typing import TypeAlias

from ...common.checks import is_number
from ...common.errors import BsamValueError
from ...core.optimizer import SharpnessAware
from ...methods import METHODS
from ...methods.distillation import Distillation
from .names import find_object, known_object

Method: TypeAlias = type[SharpnessAware] | type[Distillation]


def is_own(name: str) -> bool:
    """Return whether a name is that of an object of the user, ``MODULE:NAME``."""
    return ":" in name


def method_class(name: str) -> Method:
    """Return the class of a method; import it if it is a class of the user.

    Args:
        name: a name in ``bsam.METHODS``, or ``MODULE:CLASS``. To import a module is to run its code: the name must come
            from the user, not only from a file.
    """
    return METHODS[name] if name in METHODS else _checked(name, find_object(name, "method"))


def known_method(name: str) -> Method | None:
    """Return the class of a method without importing it; None for a class of the user that was not imported before."""
    own = known_object(name)
    return METHODS.get(name) or (None if own is None else _checked(name, own))


def title_of_method(name: str) -> str:
    """Return the title of a method for tables: that of bsam, or the ``title`` or the name of a class of the user."""
    if name in METHODS:
        return METHODS[name].title
    cls = known_method(name)
    return (cls and cls.__dict__.get("title")) or name.rpartition(":")[2]


def _checked(name: str, given: object) -> Method:
    if not isinstance(given, type) or not issubclass(given, SharpnessAware | Distillation):
        kind = "a function" if inspect.isfunction(given) else f"{given!r}"
        raise BsamValueError(
            f"the method {name} must be a class derived from bsam.SharpnessAware (or, for a loss, from "
            f"bsam.methods.distillation.Distillation), got {kind}: check the name"
        )
    missing = [part for part in dir(given) if getattr(getattr(given, part, None), "__isabstractmethod__", False)]
    if missing:
        raise BsamValueError(f"the method {name} has no {missing[0]}: add it to the class")
    if not is_number(given.passes_with({})):
        raise BsamValueError(
            f"the method {name} must say how many gradient passes a step takes: set the class attribute passes, such "
            "as passes = 2, or override the class method passes_with"
        )
    return given
