"""An unpickler for the pickles of CIFAR: dictionaries of numbers, text and ``uint8`` arrays, and nothing else."""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ..core.errors import BsamRuntimeError

# what the documentation of pickle names, and what damaged files were seen to raise
_ERRORS: tuple[type[Exception], ...] = (pickle.UnpicklingError, struct.error, EOFError, MemoryError)
_ERRORS += (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError, Warning)

MAX_INSTRUCTIONS = 1_000_000  # the largest file of CIFAR takes fewer, whoever wrote it


class _Dtype:
    """Takes the place of ``numpy.dtype``; only ``uint8`` is accepted."""

    def __init__(self, name: Any, align: Any = False, copy: Any = True) -> None:
        if name not in ("u1", b"u1"):
            shown = name[:40] if isinstance(name, (str, bytes)) else type(name)  # the repr of a nest may have no end
            raise pickle.UnpicklingError(f"an array of dtype {shown!r} instead of bytes (uint8)")

    def __setstate__(self, state: Any) -> None:
        pass  # the byte order and the flags of uint8 are known


class _Array:
    """Takes the place of ``numpy.ndarray`` and of the function that makes an empty one."""

    array: NDArray[np.uint8] | None = None

    def __init__(self, *args: Any) -> None:
        pass  # the shape follows with the content

    def __setstate__(self, state: Any) -> None:
        _version, shape, dtype, fortran_order, content = state
        if not isinstance(dtype, _Dtype):
            raise pickle.UnpicklingError("an array of something other than bytes (uint8)")
        self.array = np.frombuffer(content, np.uint8).reshape(shape, order="F" if fortran_order else "C")


_GLOBALS = {
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Dtype,
}


def _checked(instruction: int, load: Callable[[Any], None]) -> Callable[[Any], None]:
    """Count an instruction, and check the keys that it gives a dictionary: the hash of a deep tuple ends Python."""

    def checked(self: _Unpickler) -> None:
        self.instructions += 1
        if self.instructions > MAX_INSTRUCTIONS:
            raise pickle.UnpicklingError(f"it has more than {MAX_INSTRUCTIONS:,} instructions")
        if instruction in b"sud" and not _are_text(self.stack[-2 if instruction == ord("s") else 0 :: 2]):
            raise pickle.UnpicklingError("it holds a dictionary with keys that are not text")
        load(self)

    return checked


class _Unpickler(pickle._Unpickler):
    """In Python: the one in C reserves memory up to the largest memo index, gigabytes after one damaged byte."""

    stack: list[Any]
    # without byte arrays, whose memory is reserved before they are read, and sets
    dispatch: ClassVar = {i: _checked(i, f) for i, f in pickle._Unpickler.dispatch.items() if i not in b"\x96\x8f\x91"}

    def __init__(self, content: bytes) -> None:
        self.file, self.instructions, self.bytes_left = io.BytesIO(content), 0, len(content)
        super().__init__(self.file, encoding="bytes")

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("_codecs", "encode"):
            return self._encode
        if (module, name) not in _GLOBALS:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}"[:80])
        return _GLOBALS[module, name]

    def _encode(self, text: str, encoding: str) -> bytes:
        """Takes the place of ``_codecs.encode``, which Python 3 writes for bytes in protocol 2."""
        if encoding not in ("latin1", "latin-1"):
            raise pickle.UnpicklingError("bytes of another encoding than latin1")
        self.bytes_left -= len(text)
        if self.bytes_left < 0:
            raise pickle.UnpicklingError("it makes more bytes than it has itself")
        return text.encode("latin-1")


def _are_text(keys: Iterable[Any]) -> bool:
    return all(isinstance(key, (str, bytes)) for key in keys)


def read_pickle(content: bytes) -> dict[str, Any]:
    """Return the dictionary in a pickle of numbers, text, bytes, lists, dictionaries and ``uint8`` arrays.

    No global that the pickle names is imported or called: the five that arrays of numpy need are replaced by classes
    of this module, and every other one is an error.

    Args:
        content: the whole file.

    Returns:
        The dictionary; its keys are ``str``, also where Python 2 or ``encoding="bytes"`` wrote bytes.

    Example:
        >>> read_pickle(
        ...     pickle.dumps(
        ...         {"labels": [3, 1], "data": np.arange(4, dtype=np.uint8)}, protocol=2
        ...     )
        ... )["data"]
        array([0, 1, 2, 3], dtype=uint8)
        >>> read_pickle(pickle.dumps({"labels": print}))
        Traceback (most recent call last):
        ...
        bsam.core.errors.BsamRuntimeError: not a pickle of numbers, text and arrays of bytes: it asks for builtins.print
    """
    unpickler = _Unpickler(content)
    try:
        found = unpickler.load()
        if type(found) is not dict:
            raise pickle.UnpicklingError("it holds no dictionary")
        if unpickler.file.read(1):
            raise pickle.UnpicklingError("bytes follow its end")
    except _ERRORS as error:
        reason = str(error) or type(error).__name__
        raise BsamRuntimeError(f"not a pickle of numbers, text and arrays of bytes: {reason}") from error
    return {
        key.decode("latin-1") if isinstance(key, bytes) else key: value.array if isinstance(value, _Array) else value
        for key, value in found.items()
    }
