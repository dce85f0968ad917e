"""What only some installations have."""

from __future__ import annotations

from importlib.util import find_spec

from .errors import BsamRuntimeError


def need(module: str, extra: str) -> None:
    """Refuse, early and with the mend, what cannot be done without a package that is not there."""
    if find_spec(module) is None:
        raise BsamRuntimeError(f"this needs {module}, which is not installed: pip install 'bsam[{extra}]'")
