"""Names that the user gives: registered names, in upper or lower case, and objects named as ``MODULE:NAME``."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Collection
from typing import Any

from ...common.errors import BsamValueError

LONG = 40  # names


def find_name(kind: str, name: object, known: Collection[str]) -> str:
    """Return the known name that equals ``name``, ignoring case; if there is none, raise with the closest match.

    Args:
        kind: what is looked up, for the error message, such as ``"method"``.
        name: the user's input.
        known: the valid names.
    """
    by_lower = {valid.lower(): valid for valid in known}
    if (lower := str(name).lower()) in by_lower:
        return by_lower[lower]
    hint = suggestion(lower, known)
    if hint and len(known) > LONG:  # the list would hide the hint
        raise BsamValueError(f"there is no {kind} {name!r}{hint}")
    raise BsamValueError(f"{kind} must be one of {', '.join(known)}; got {name!r}{hint}")


def suggestion(name: str, known: Collection[str]) -> str:
    """Return the end of an error message with the closest known name; empty if none is close.

    Example:
        >>> suggestion("vit_tiny", ["vit-tiny", "resnet8"])
        ". Did you mean 'vit-tiny'?"
    """
    by_lower = {valid.lower(): valid for valid in known}
    closest = difflib.get_close_matches(name.lower(), by_lower, n=1)
    return f". Did you mean {by_lower[closest[0]]!r}?" if closest else ""


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
    """Import an object. Its module may be in the current folder, as with ``python -m``.

    Args:
        name: ``module:name``.
        role: what the object is for, in error messages.
    """
    module_name, _, object_name = name.partition(":")
    parts = module_name.split(".")
    if not object_name or parts[-1] == "py" or not all(part.isidentifier() for part in parts):
        raise BsamValueError(f"the {role} must be named as module:name, got {name!r} (for my_data.py write my_data)")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    importlib.invalidate_caches()  # the module may have been created after its folder was searched
    try:
        module = importlib.import_module(module_name)
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
