"""Objects of a user's own modules, named on the command line as ``module:name``."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from ..common.errors import BsamValueError


def import_name(kind: str, name: str) -> Any:
    """Return the object that ``module:name`` names; the module may be a file in the current folder.

    Args:
        kind: what the object is, for errors.
        name: the module and the name in it.
    """
    module_name, _, object_name = name.partition(":")
    if not module_name or not object_name or module_name.startswith("."):
        raise BsamValueError(f"the {kind} must be named as module:name, got {name!r}")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise BsamValueError(
            f"the {kind}'s module {module_name!r} cannot be imported, neither installed nor from {os.getcwd()}: {error}"
        ) from error
    if not hasattr(module, object_name):
        raise BsamValueError(f"the {kind}'s module {module_name!r} has no {object_name!r}")
    return getattr(module, object_name)
