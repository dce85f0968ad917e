"""Putting back what a block changes, even if Ctrl-C arrives while the block ends."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from ..common.errors import BsamRuntimeError


class Undo(contextlib.AbstractContextManager["Undo"]):
    """Call functions when a block ends, the last one first, like ``contextlib.ExitStack``. Enter it twice.

    CPython raises KeyboardInterrupt where a function begins, where a loop jumps back, and after calls. So it may raise
    it at the beginning of ``__exit__``, which then restores nothing, or inside a function that restores something. In
    ``with Undo() as undo, undo:`` the outer exit calls the functions that the inner one has not finished. A function
    may therefore be called twice, and must give the same result then. Register it before the change that it takes back.
    Most context managers allow neither: those made of generators, for example, can only be left once.

    Example:
        >>> values = [1]
        >>> with Undo() as undo, undo:
        ...     undo.callback(values.__setitem__, 0, 1)
        ...     values[0] = 2
        >>> values
        [1]
    """

    def __init__(self) -> None:
        self._functions: list[Callable[[], object]] = []
        self._begun: Callable[[], object] | None = None
        self._entered = 0

    def __enter__(self) -> Undo:
        self._entered += 1
        return self

    def __exit__(self, *_: object) -> None:
        while self._functions:
            function = self._functions[-1]
            again = function is self._begun
            self._begun = function
            try:
                function()
            except BaseException:
                if again:  # it was not interrupted: it raises by itself
                    self._functions.pop()
                    self.__exit__()
                raise
            self._functions.pop()

    def callback(self, function: Callable[..., object], *arguments: Any) -> None:
        """Call ``function(*arguments)`` at the end of the block."""
        if self._entered < 2:
            raise BsamRuntimeError("Undo was not entered twice: write `with Undo() as undo, undo:`")
        self._functions.append(partial(function, *arguments))

    def catch_warnings(self) -> None:
        """Restore the filters of warnings at the end of the block."""
        context = warnings.catch_warnings()
        context.__enter__()  # only copies the filters, so a Ctrl-C before the next line changes none
        self.callback(context.__exit__, None, None, None)  # assigns what it saved, any number of times

    def set_grad_enabled(self, enabled: bool) -> None:
        """Switch gradients on or off until the end of the block."""
        self.callback(torch.set_grad_enabled, torch.is_grad_enabled())
        torch.set_grad_enabled(enabled)

    def set_attributes(self, changes: Iterable[tuple[Any, str, Any]]) -> None:
        """Set attributes, given as ``(object, name, value)``, until the end of the block."""
        for target, name, value in changes:
            self.callback(setattr, target, name, getattr(target, name))
            setattr(target, name, value)

    def restore_random_states(self, devices: Iterable[torch.device] = ()) -> None:
        """Restore the states of torch's default generators, for the CPU and CUDA devices, at the end of the block."""
        generators = [torch.cuda.default_generators[device.index] for device in devices if device.type == "cuda"]
        for generator in (torch.default_generator, *generators):
            self.callback(generator.set_state, generator.get_state())
