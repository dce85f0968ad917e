"""Optional dependencies."""

from __future__ import annotations

from importlib.util import find_spec

from .errors import BsamRuntimeError


def require_package(module: str, extra: str) -> None:
    """Raise an error that names the extra to install if ``module`` is not installed."""
    if find_spec(module) is None:
        raise BsamRuntimeError(f"this needs {module}, which is not installed: pip install 'bsam[{extra}]'")
