"""Names of a package that are imported on first use, so that `bsam --help` does not wait for torch."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from importlib import import_module
from types import ModuleType
from typing import Any

# One thread imports at a time: two that begin with modules that import each other would wait for each other. Modules of
# bsam import from each other directly, never names that are imported on use, because they may hold locks of imports.
_IMPORT = threading.RLock()


def import_on_use(package: str, modules: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` (PEP 562) of a package.

    Args:
        package: the name of the package.
        modules: for each name, the module that defines it, relative to the package; a module has its own name.

    Example:
        >>> from bsam.common import errors
        >>> find, names = import_on_use(
        ...     "bsam", {"BsamError": "common.errors", "common": "common"}
        ... )
        >>> find("BsamError") is errors.BsamError, find("common").__name__
        (True, 'bsam.common')
    """
    namespace = vars(sys.modules[package])

    def find(name: str) -> Any:
        if name not in modules:
            raise AttributeError(
                f"module {package!r} has no attribute {name!r}", name=name, obj=sys.modules[package]
            )  # the traceback suggests the closest name of ``dir``
        with _IMPORT:
            module = import_module(f"{package}.{modules[name]}")
        namespace[name] = module if name == modules[name] else getattr(module, name)
        return namespace[name]

    def names() -> list[str]:
        kept = [name for name, value in namespace.items() if name.startswith("_") or isinstance(value, ModuleType)]
        return sorted({*kept, *modules})

    return find, names
