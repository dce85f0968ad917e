"""Code of the user: whether it has changed, and where it raised an error."""

from __future__ import annotations

import hashlib
import inspect
import os
import sys
import traceback
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from ...common.errors import BsamError

PACKAGE = __name__.partition(".")[0]
OUT_OF_MEMORY = "OutOfMemoryError"  # a class of torch, which takes seconds to import
INSTALLED = {"site-packages", "dist-packages"}


def source_digest(module: str) -> str | None:
    """Return the SHA-256 of the source file of a module; None if it is not imported, or has no source file.

    The script that runs is the module with the name of its file.
    """
    script = sys.modules["__main__"]
    is_script = Path(getattr(script, "__file__", None) or "").stem == module
    found = sys.modules.get(module, script if is_script else None)
    try:
        file = None if found is None else inspect.getsourcefile(found)
        return None if file is None else hashlib.sha256(Path(file).read_bytes()).hexdigest()
    except (TypeError, OSError):  # a built-in module; a file that is gone
        return None


class OwnError(NamedTuple):
    """Where code of the user raised an error: the part of the traceback that begins with it, and a sentence."""

    traceback: str
    sentence: str


def own_error(error: BaseException) -> OwnError | None:
    """Return where code of the user raised an error, or the error that caused it; None if no such code did.

    The traceback begins where bsam calls this code. Lack of memory says nothing about the code that was running.
    """
    if isinstance(error, MemoryError) or type(error).__name__ == OUT_OF_MEMORY:
        return None
    for raised in (error, error.__cause__):
        frames = [] if raised is None else list(traceback.walk_tb(raised.__traceback__))
        own = [i for i, (frame, _) in enumerate(frames) if _is_own(frame)]
        if raised is None or not own:
            continue
        last = own[-1]
        ours = [i for i, (frame, _) in enumerate(frames[:last]) if _package(frame) == PACKAGE]
        first = min(i for i in own if not ours or i > ours[-1])
        is_refusal = isinstance(raised, BsamError)  # its message says everything about the arguments of the last call
        shown = traceback.extract_tb(raised.__traceback__)[first : last + 1 if is_refusal else None]
        called = frames[first][0]
        inner, line = frames[last]
        name = f"{called.f_globals['__name__']}:{called.f_code.co_qualname}"
        place = f"{os.path.basename(inner.f_code.co_filename)}, line {line}"
        message = f"{type(raised).__name__}: {raised}" if str(raised) else type(raised).__name__
        return OwnError(
            f"Traceback (most recent call last):\n{''.join(traceback.format_list(shown))}",
            f"{name} raised {message} ({place}): correct it.",
        )
    return None


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _is_own(frame: FrameType) -> bool:
    """Return whether a frame is neither ours nor that of an installed package, and its source is a file."""
    file = Path(frame.f_code.co_filename)
    is_installed = _package(frame) in sys.stdlib_module_names or INSTALLED.intersection(file.parts)
    return _package(frame) != PACKAGE and not is_installed and file.is_file()
