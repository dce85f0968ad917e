"""Names that the user gives: registered names, in upper or lower case, and objects named as ``MODULE:NAME``."""

from __future__ import annotations

import difflib
import importlib
import inspect
import json
import os
import re
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...common.errors import BsamValueError

MANY_NAMES = 40  # names
_OWN: dict[str, Any] = {}  # the user's objects that were imported or passed, by MODULE:NAME


OWN_CLASS = "MODULE:CLASS"  # how the user names a method or a task of their own


imported_packages: set[str] = set()  # of the modules that the user has named: their errors are the user's


def find_name(kind: str, name: object, known: Collection[str], own: str = "") -> str:
    """Return the known name that equals ``name``, ignoring case; if there is none, raise with the closest match.

    Args:
        kind: what is looked up, for the error message, such as ``"method"``.
        own: how the user may name one of their own, such as ``"MODULE:CLASS"``.
    """
    by_lower = {valid.lower(): valid for valid in known}
    if (lower := str(name).lower()) in by_lower:
        return by_lower[lower]
    hint = suggestion(lower, known)
    if hint and len(known) > MANY_NAMES:  # the list would hide the hint
        raise BsamValueError(f"there is no {kind} {name!r}{hint}{f' One of your own is {own}' if own else ''}")
    others = f", or {own} for one of your own" if own else ""
    raise BsamValueError(f"{kind} must be one of {', '.join(known)}{others}; got {name!r}{hint}")


def suggestion(name: str, known: Collection[str]) -> str:
    """Return the end of an error message with the closest known name; empty if none is close.

    Example:
        >>> suggestion("vit_tiny", ["vit-tiny", "resnet8"])
        ". Did you mean 'vit-tiny'?"
    """
    by_lower = {valid.lower(): valid for valid in known}
    closest = difflib.get_close_matches(name.lower(), by_lower, n=1)
    return f". Did you mean {by_lower[closest[0]]!r}?" if closest else ""


def is_own(name: object) -> bool:
    """Return whether a name is that of an object of the user, ``MODULE:NAME``."""
    return isinstance(name, str) and ":" in name


def find_function(name: str, role: str) -> Callable[..., Any]:
    """Import a function, as :func:`find_object` does.

    Example:
        >>> find_function("os.path:basename", "loader")("a/b")
        'b'
    """
    function = find_object(name, role)
    if not callable(function):
        raise BsamValueError(f"the {role} {name} must be a function, got {type(function).__name__}")
    return function


def find_object(name: str, role: str) -> Any:
    """Import an object, unless it was imported or passed before. Its module may be in the current folder, as with
    ``python -m``.

    To import a module is to run its code, so call this only with names that the user gives, never with one that is
    only in a file; :func:`known_object` is for these.

    Args:
        name: ``module:name``.
        role: what the object is for, in error messages.
    """
    if name not in _OWN:
        _OWN[name] = _import_object(name, role)
    return _OWN[name]


def known_object(name: str) -> Any | None:
    """Return an object that was imported or passed before; None for all others."""
    return _OWN.get(name)


def name_of(given: Any, role: str) -> str:
    """Return the ``MODULE:NAME`` of a class or function of the user, under which it is found from now on.

    The module of a script is named after its file, as it is for a process that imports it.

    Example:
        >>> name_of(os.path.basename, "loader")
        'posixpath:basename'
    """
    name = getattr(given, "__qualname__", None)
    module = getattr(given, "__module__", None)
    if not isinstance(name, str) or not name.isidentifier() or not isinstance(module, str):
        raise BsamValueError(
            f"the {role} must be a name, or a class or function at the top level of a module; got {given!r}"
        )
    if module == "__main__" and (file := getattr(sys.modules["__main__"], "__file__", None)):
        module = Path(file).stem
    _OWN[f"{module}:{name}"] = given
    return f"{module}:{name}"


def names_given(given: Iterable[Any], role: str) -> list[str]:
    """Return the names of what the user gives: names, or classes and functions, as :func:`name_of` has them."""
    return [one if isinstance(one, str) else name_of(one, role) for one in given]


def _import_object(name: str, role: str) -> Any:
    module_name, _, object_name = name.partition(":")
    parts = module_name.split(".")
    if not object_name or parts[-1] == "py" or not all(part.isidentifier() for part in parts):
        raise BsamValueError(f"the {role} must be named as module:name, got {name!r} (for my_data.py write my_data)")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    importlib.invalidate_caches()  # the module may have been created after its folder was searched
    try:
        module = importlib.import_module(module_name)
        imported_packages.add(module_name.partition(".")[0])
    except ImportError as error:
        raise BsamValueError(
            f"the {role}'s module {module_name!r} cannot be imported from the installed packages or from "
            f"{os.getcwd()}: {error}. Check the name, or change to the folder that holds the module"
        ) from error
    except Exception as error:
        raise BsamValueError(
            f"the {role}'s module {module_name!r} cannot be imported: {describe_error(error)}. Correct the module"
        ) from error
    if not hasattr(module, object_name):
        raise BsamValueError(f"the {role}'s module {module_name!r} has no {object_name!r}: check the name")
    return getattr(module, object_name)


def call_with(function: Callable[..., Any], offered: Mapping[str, Any], name: str, more: Iterable[str] = ()) -> Any:
    """Call a function of the user with those of the offered arguments that its signature names.

    Args:
        offered: what it can get, by name.
        more: names of what it could also get, for the error message.

    Example:
        >>> call_with(
        ...     lambda classes, width=8: (classes, width),
        ...     {"classes": 10, "channels": 3},
        ...     "nets:build",
        ... )
        (10, 8)
    """
    parameters = inspect.signature(function).parameters.values()
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    for parameter in named:
        if parameter.default is parameter.empty and parameter.name not in offered:
            known = ", ".join(dict.fromkeys([*offered, *more]))
            raise BsamValueError(
                f"{name} asks for {parameter.name!r}; it can get {known}: rename the argument, or give it a default"
            )
    return function(**{p.name: offered[p.name] for p in named if p.name in offered})


def named_values(pairs: Sequence[str], flag: str = "--set", example: str = "rho_max=0.1") -> dict[str, Any]:
    """Return the values of ``NAME=VALUE`` pairs by name, decoded as JSON where possible and as text otherwise.

    ``flag`` and ``example`` are for error messages.
    """
    values: dict[str, Any] = {}
    for pair in pairs:
        name, sign, text = pair.partition("=")
        if not name or not sign:
            raise BsamValueError(f"{flag} takes NAME=VALUE, for example {example}; got {pair!r}")
        if name in values:
            raise BsamValueError(f"{flag} gives {name} twice: give it once")
        try:
            values[name] = json.loads(text)
        except json.JSONDecodeError:
            values[name] = text
    return values


def with_arguments(text: str) -> tuple[str, dict[str, Any]]:
    """Return the name and the arguments in ``NAME:ARGUMENT=VALUE,...``; the name may be ``MODULE:NAME``.

    Example:
        >>> with_arguments("wsam:WSAM:rho=0.1,beta=[1,2]"), with_arguments("wsam:WSAM")
        (('wsam:WSAM', {'rho': 0.1, 'beta': [1, 2]}), ('wsam:WSAM', {}))
    """
    name, _, last = text.rpartition(":")
    if not name or "=" not in last:
        return text, {}
    return name, named_values(re.split(r",(?=\w+=)", last), text, "rho=0.1")


def describe_error(error: Exception, module: str | None = None) -> str:
    """Return the type and the message of an error, and the line that raised it.

    Args:
        module: if given and imported, show the innermost line in this module, not one in a library that it calls.
    """
    frames = list(traceback.extract_tb(error.__traceback__))
    if file := getattr(sys.modules.get(module or ""), "__file__", None):
        frames = [frame for frame in frames if frame.filename == file]
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    if not frames or isinstance(error, SyntaxError):
        return text
    return f"{text} ({os.path.basename(frames[-1].filename)}, line {frames[-1].lineno})"


def first_line(error: BaseException) -> str:
    """Return the first line of an error message, without its full stop."""
    return str(error).strip().partition("\n")[0].rstrip(".")
