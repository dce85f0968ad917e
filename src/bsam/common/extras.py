"""Optional dependencies."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec

from .errors import BsamRuntimeError


def require_package(module: str, extra: str) -> None:
    """Raise an error that names the extra to install if ``module`` is not installed."""
    require_packages({module: extra})


def require_packages(extras: Mapping[str, str]) -> None:
    """Raise one error that names all extras to install if modules are not installed.

    Args:
        extras: the extra that installs each module.
    """
    missing = {module: extra for module, extra in extras.items() if find_spec(module) is None}
    if missing:
        modules, which = " and ".join(missing), "are" if len(missing) > 1 else "is"
        raise BsamRuntimeError(
            f"this needs {modules}, which {which} not installed: {install_line(*missing.values())} in a clone of bsam"
        )


def install_line(*extras: str) -> str:
    """Return the command that installs extras, in a clone: the package is not on the index.

    Example:
        >>> install_line("train", "images", "train")
        "pip install -c constraints.txt '.[train,images]'"
    """
    return f"pip install -c constraints.txt '.[{','.join(dict.fromkeys(extras))}]'"
