"""Processes that work on several tasks at the same time, with one thread each."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing.synchronize import Event
from types import TracebackType
from typing import Any, TypeVar

import torch

from .errors import BsamRuntimeError

T = TypeVar("T")
_stop: Event | None = None  # set in a worker: once the parent no longer waits for the results


class Workers:
    """A pool of processes, as a context manager: none outlives the block, or its parent.

    Ctrl-C reaches the parent only; the workers then end at their next call of :func:`stop_if_asked`.

    Args:
        count: the number of processes.
    """

    def __init__(self, count: int) -> None:
        context = multiprocessing.get_context("spawn")  # a fork would inherit torch's threads in any state
        self._stop = context.Event()
        self._pool = ProcessPoolExecutor(count, context, _prepare, (self._stop,))

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if exc_type is not None:
            self._stop.set()
        self._pool.shutdown(cancel_futures=True)

    def submit(self, function: Callable[..., T], *arguments: Any) -> Future[T]:
        """Call a function in one of the processes."""
        with _ignoring_interrupts():
            return self._pool.submit(function, *arguments)


def stop_if_asked(*_: object) -> None:
    """Raise InterruptedError in a worker whose parent no longer waits for it."""
    if _stop is not None and _stop.is_set():
        raise InterruptedError("the parent process stopped")


def check_main_guard() -> None:
    """Raise in a worker that still imports the user's script, before it waits for what its parent holds."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):  # as multiprocessing itself asks
        raise BsamRuntimeError(
            "several processes are started, and each of them first imports the script: put its code below `if __name__ "
            '== "__main__":`'
        )


@contextlib.contextmanager
def _ignoring_interrupts() -> Iterator[None]:
    """Start processes in here that ignore Ctrl-C from their first instruction: a child inherits that."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _prepare(stop: Event) -> None:
    global _stop
    _stop = stop
    torch.set_num_threads(1)
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)  # it was killed, and nothing waits for this process
