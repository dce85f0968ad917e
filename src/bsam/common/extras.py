"""Optional dependencies."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec

from .errors import BsamRuntimeError


def require_package(module: str, extra: str) -> None:
    """Raise if ``module`` is not installed; the message names the extra to install."""
    require_packages({module: extra})


def require_packages(extras: Mapping[str, str]) -> None:
    """Raise if any module is not installed; the message names all extras to install.

    Args:
        extras: maps each module to the extra that installs it.
    """
    missing = {module: extra for module, extra in extras.items() if find_spec(module) is None}
    if missing:
        modules, verb = " and ".join(missing), "are" if len(missing) > 1 else "is"
        raise BsamRuntimeError(
            f"this needs {modules}, which {verb} not installed: {install_line(*missing.values())} in a clone of bsam"
        )


def install_line(*extras: str) -> str:
    """Return the command that installs extras in a clone; the package is not on PyPI.

    Example:
        >>> install_line("train", "images", "train")
        "pip install -c constraints.txt '.[train,images]'"
    """
    return f"pip install -c constraints.txt '.[{','.join(dict.fromkeys(extras))}]'"
