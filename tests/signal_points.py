"""Ctrl-C wherever CPython looks for signals: where a function begins, where a loop jumps back, and after calls."""

from __future__ import annotations

import _thread
import dis
import gc
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, TypeAlias

import bsam

FOLDER = str(Path(bsam.__file__).parent)
CALLED = (  # functions of these files are part of the library's, where they are called by it
    "torch/utils/_contextlib.py",
    "torch/autograd/grad_mode.py",
    "torch/autograd/forward_ad.py",
    "torch/nn/attention/__init__.py",
    "torch/overrides.py",
    "/contextlib.py",
)
CHECKED = ("CALL", "JUMP_BACKWARD", "POP_JUMP_BACKWARD")  # CPython looks for signals after these instructions

Point: TypeAlias = tuple[int, int]  # the number of the call of a function, and of an instruction in it
Stack: TypeAlias = tuple[tuple[CodeType, int], ...]
Trace: TypeAlias = Callable[[FrameType, str, Any], Any]

# Looking up a missing key runs this function, but is no call: CPython does not look for signals after it.
press_ctrl_c: defaultdict[int, Any] = defaultdict(_thread.interrupt_main)


@cache
def _checked_offsets(code: CodeType) -> frozenset[int]:
    return frozenset(i.offset for i in dis.get_instructions(code) if i.opname.startswith(CHECKED))


@contextmanager
def _traced(trace: Trace) -> Iterator[None]:
    before = sys.gettrace()
    gc.disable()  # finalizers are functions, too
    try:
        sys.settrace(trace)
        yield
    finally:
        sys.settrace(before)
        gc.enable()


def _trace_instructions(
    frame: FrameType, see: Callable[[FrameType, int], object], leave: Callable[[FrameType], object] = lambda frame: None
) -> Trace:
    """Call ``see`` before each instruction of a frame, with the number of the instruction; at its end ``leave``."""
    number = 0
    frame.f_trace_opcodes = True
    frame.f_trace_lines = False

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal number
        if event == "opcode":
            see(frame, number)
            number += 1
        elif event == "return":
            leave(frame)
        return trace

    return trace


def signal_points(
    run: Callable[[], object], prepare: Callable[[], object], within: Collection[str] = ()
) -> list[Point]:
    """Return the instructions of the library after which CPython looks for signals in a run, after ``prepare``.

    Of those that are reached many times from the same lines, such as in a loop, return the first and the last.
    With ``within``, return only those in functions with these names, and in what they call.
    """
    first: dict[Stack, Point] = {}
    last: dict[Stack, Point] = {}
    latest: dict[FrameType, Point] = {}  # the latest instruction of each frame
    calls = 0
    outside = sys._getframe()  # with its callers, below every frame of the run

    def add(frame: FrameType | None, point: Point) -> None:
        stack = []
        while frame is not None and frame is not outside:
            stack.append((frame.f_code, frame.f_lasti))
            frame = frame.f_back
        if not within or any(code.co_name in within for code, _ in stack):
            first.setdefault(tuple(stack), point)
            last[tuple(stack)] = point

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal calls
        calls += 1
        if frame.f_back in latest:  # the library has called this function
            add(frame.f_back, latest[frame.f_back])
        file = frame.f_code.co_filename
        if not (file.startswith(FOLDER) or (frame.f_back in latest and file.endswith(CALLED))):
            return None
        call = calls

        def see(frame: FrameType, number: int) -> None:
            latest[frame] = call, number
            if frame.f_lasti in _checked_offsets(frame.f_code):
                add(frame, (call, number))

        return _trace_instructions(frame, see, leave)

    def leave(frame: FrameType) -> None:
        latest.pop(frame, None)  # so that its variables live as long as in an untraced run

    prepare()
    run()  # fills caches
    prepare()
    with _traced(trace):
        run()
    return sorted({*first.values(), *last.values()})


def interrupt(run: Callable[[], object], point: Point) -> None:
    """Run with a Ctrl-C at an instruction; raise an error unless it ends the run with a KeyboardInterrupt."""
    calls = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal calls
        calls += 1
        return _trace_instructions(frame, see) if calls == point[0] else None

    def see(frame: FrameType, number: int) -> None:
        if number == point[1]:
            press_ctrl_c[number]

    press_ctrl_c.clear()
    ended = False
    try:
        with _traced(trace):
            run()
            ended = True
    except KeyboardInterrupt:
        assert not ended, f"the Ctrl-C at {point} came after the run"
    else:
        raise AssertionError(f"there was no Ctrl-C at {point}, or the run went on")
