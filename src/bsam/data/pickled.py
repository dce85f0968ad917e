"""Pickles of bytes, numbers and names, read without unpickling: nothing that a pickle asks to be called is called."""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..core.errors import BsamError, BsamRuntimeError

# their argument is the value itself; a string of Python 2 comes as latin-1 text
_NUMBERS = {"BININT", "BININT1", "BININT2", "LONG1"}
_STRINGS = {
    "BINSTRING",
    "SHORT_BINSTRING",
    "BINUNICODE",
    "SHORT_BINUNICODE",
    "BINUNICODE8",
    "BINBYTES",
    "SHORT_BINBYTES",
    "BINBYTES8",
}
_CONSTANTS: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None, "NEWTRUE": lambda: True, "NEWFALSE": lambda: False, "EMPTY_TUPLE": tuple, "EMPTY_LIST": list, "EMPTY_DICT": dict,
}  # fmt: skip
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
# about 2 s; the largest file, the 50,000 images of CIFAR-100, takes a quarter of them, or a half as Python 3 may write
# it
_MOST_INSTRUCTIONS = 1_000_000
_LONGEST_KEY = 100


@dataclass(frozen=True)
class _Name:
    """Stands for a global of a pickle: compared and never looked up."""

    name: str


_RECONSTRUCT, _NDARRAY, _DTYPE, _ENCODE = (_Name(name) for name in ("_reconstruct", "ndarray", "dtype", "encode"))
_GLOBALS = {
    "numpy.core.multiarray _reconstruct": _RECONSTRUCT,
    "numpy._core.multiarray _reconstruct": _RECONSTRUCT,
    "numpy ndarray": _NDARRAY,
    "numpy dtype": _DTYPE,
    "_codecs encode": _ENCODE,
}


class _Mark:
    """Where a run of items begins on the stack."""


class _Bytes8:
    """Stands for the dtype ``uint8``."""


@dataclass
class _Array:
    """Stands for an array: what BUILD said of it."""

    shape: tuple[int, ...] = (0,)
    content: bytes = b""
    by_columns: bool = False

    def array(self) -> NDArray[np.uint8]:
        return np.frombuffer(self.content, np.uint8).reshape(self.shape, order="F" if self.by_columns else "C")


def read_pickle(content: bytes) -> dict[str, Any]:
    """The dictionary in a pickle, of nothing but dictionaries, lists, tuples, bytes, text, numbers and ``uint8``
    arrays.

    This is no ``Unpickler``: a small machine of its own follows the instructions, knows only those that such files
        contain, and stops at every other one.
    The five globals of numpy arrays stand for plain records here, and only the arguments that numpy writes are taken;
    no global is ever imported or called.
    Time and memory are bounded: by a million instructions, and by as many bytes made of text as the file has.

    Args:
        content: the whole file.

    Returns:
        Keys as text, also where Python 2 or ``encoding="bytes"`` wrote bytes.

    Example:
        >>> import pickle
        >>> read_pickle(pickle.dumps({"labels": [3, 1], "data": np.arange(4, dtype=np.uint8).reshape(2, 2)}, protocol=2))["data"]
        array([[0, 1],
               [2, 3]], dtype=uint8)
        >>> read_pickle(pickle.dumps({"labels": print}))
        Traceback (most recent call last):
        ...
        bsam.core.errors.BsamRuntimeError: a pickle that asks for builtins print: only arrays of bytes, lists, numbers
        and text belong here
    """
    file = BytesIO(content)
    machine = _Machine(len(content))
    try:
        for count, (operation, argument, _) in enumerate(pickletools.genops(file), start=1):
            if count > _MOST_INSTRUCTIONS:
                raise BsamRuntimeError(
                    f"a pickle of more than {_MOST_INSTRUCTIONS:,} instructions, which no file of this kind needs"
                )
            machine.do(operation.name, argument)
        found = machine.stack.pop()
    except BsamError:
        raise
    except (
        ValueError,
        LookupError,
        TypeError,
        Warning,
    ) as broken:  # pickletools warns of odd escapes, and a warning may be an error
        raise BsamRuntimeError(f"a broken pickle ({type(broken).__name__})") from broken
    if machine.stack or file.read(1):
        raise BsamRuntimeError("a pickle with something left over after its end")
    if type(found) is not dict:
        raise BsamRuntimeError("a pickle that holds no dictionary")
    return {key: value.array() if isinstance(value, _Array) else value for key, value in found.items()}


class _Machine:
    """The stack and the memo of a pickle, and how many bytes it may still make of text."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def do(self, name: str, argument: Any) -> None:
        """Follow one instruction."""
        stack = self.stack
        if name in _NUMBERS or name in _STRINGS:
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name]())
        elif name in _TUPLES:
            items = [stack.pop() for _ in range(_TUPLES[name])]
            stack.append(tuple(reversed(items)))
        elif name == "MARK":
            stack.append(_Mark())
        elif name == "TUPLE":
            stack.append(tuple(self.since_mark()))
        elif name == "APPENDS":
            self.extend(self.since_mark())
        elif name == "APPEND":
            self.extend([stack.pop()])
        elif name == "SETITEMS":
            self.update(self.since_mark())
        elif name == "SETITEM":
            self.update([stack.pop(), stack.pop()][::-1])
        elif name in ("BINPUT", "LONG_BINPUT"):
            self.memo[argument] = stack[-1]
        elif name == "MEMOIZE":
            self.memo[len(self.memo)] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(self.memo[argument])
        elif name == "GLOBAL":
            stack.append(_look_up(argument))
        elif name == "STACK_GLOBAL":
            attribute, module = stack.pop(), stack.pop()
            stack.append(_look_up(f"{_text(module)} {_text(attribute)}"))
        elif name == "REDUCE":
            arguments, function = stack.pop(), stack.pop()
            stack.append(self.reduce(function, arguments))
        elif name == "BUILD":
            state = stack.pop()
            self.build(stack[-1], state)
        elif name not in ("PROTO", "FRAME", "STOP"):
            raise BsamRuntimeError(f"a pickle with the instruction {name}, which no file of this kind contains")

    def since_mark(self) -> list[Any]:
        items: list[Any] = []
        while type(item := self.stack.pop()) is not _Mark:
            items.append(item)
        return items[::-1]

    def extend(self, items: list[Any]) -> None:
        if type(self.stack[-1]) is not list:
            raise BsamRuntimeError("a pickle that appends to something other than a list")
        self.stack[-1].extend(items)

    def update(self, items: list[Any]) -> None:
        if type(self.stack[-1]) is not dict:
            raise BsamRuntimeError("a pickle that sets items of something other than a dictionary")
        for key, value in zip(items[::2], items[1::2], strict=True):
            self.stack[-1][_text(key)] = value

    def reduce(self, function: Any, arguments: Any) -> Any:
        match function, arguments:
            case _Name("_reconstruct"), (_Name("ndarray"), (0,), "b" | b"b"):
                return _Array()
            case _Name("dtype"), ("u1" | b"u1", 0, 1):  # False and True as well
                return _Bytes8()
            case _Name("encode"), (str() as text, "latin1" | "latin-1"):
                return self.encode(text)
        raise BsamRuntimeError("a pickle that makes something other than an array of bytes (uint8)")

    def build(self, made: Any, state: Any) -> None:
        match made, state:
            case _Array(shape=(0,)), (1, tuple(shape), _Bytes8(), 0 | 1 as by_columns, str() | bytes() as content) if (
                _is_shape(shape)
            ):
                content = content if isinstance(content, bytes) else self.encode(content)
                size = 1
                for length in shape:
                    size *= length
                if size != len(content):
                    raise BsamRuntimeError(f"a pickle with an array of {len(content)} bytes that says it holds {size}")
                made.shape, made.content, made.by_columns = shape, content, bool(by_columns)
            case _Bytes8(), (3, "|" | b"|", None, None, None, -1, -1, 0):
                pass
            case _:
                raise BsamRuntimeError("a pickle with an array that is not one of bytes (uint8)")

    def encode(self, text: str) -> bytes:
        """A text of the memo can be asked for again and again: all together may not be longer than the file, where each
        text stands once.
        """
        self.room -= len(text)
        if self.room < 0:
            raise BsamRuntimeError("a pickle that makes more bytes than it has itself")
        return text.encode("latin-1")


def _look_up(name: str) -> _Name:
    if name not in _GLOBALS:
        raise BsamRuntimeError(
            f"a pickle that asks for {name[:80]}: only arrays of bytes, lists, numbers and text belong here"
        )
    return _GLOBALS[name]


def _is_shape(shape: tuple[Any, ...]) -> bool:
    return 1 <= len(shape) <= 4 and all(type(length) is int and 0 <= length < 2**31 for length in shape)


def _text(key: Any) -> str:
    if not isinstance(key, (str, bytes)):
        raise BsamRuntimeError("a pickle with keys or names that are not text")
    if len(key) > _LONGEST_KEY:
        raise BsamRuntimeError(
            f"a pickle with a key or a name of {len(key):,} characters; {_LONGEST_KEY} are enough for every file of "
            "this kind"
        )
    return key.decode("latin-1") if isinstance(key, bytes) else key
