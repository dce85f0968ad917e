"""Processes that work on several tasks at the same time."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.synchronize import Event
from types import TracebackType
from typing import Any, TypeVar

import torch

from .errors import BsamRuntimeError

T = TypeVar("T")
PRELOAD = ["bsam.core.fork_server"]  # imported once, by the process from which the workers are forked
SIGNALS = (signal.SIGINT, signal.SIGTERM)  # sent to all processes of a job: the parent decides, and stops the others
KILL_SECONDS = 5.0  # to wait at most until the pool has noticed that its processes are killed
_stop: Event | None = None  # set in a worker: once the parent no longer waits for the results


class Workers:
    """A pool of processes, as a context manager: none outlives the block, or its parent.

    Ctrl-C reaches the parent only; the workers then end at their next call of :func:`stop_if_asked`.

    Args:
        count: the number of processes.
        threads: of torch, in each of them.
        environment: variables that they have besides.
    """

    def __init__(self, count: int, threads: int = 1, environment: Mapping[str, str] | None = None) -> None:
        context = multiprocessing.get_context(
            "forkserver"
        )  # a fork of this one would have torch's threads in any state
        context.set_forkserver_preload(PRELOAD)
        self._stop = context.Event()
        self._pool = ProcessPoolExecutor(count, context, _prepare, (self._stop, threads, dict(environment or {})))

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if exc_type is not None and issubclass(exc_type, BrokenProcessPool):
            self.kill()  # the others may wait for what the one that ended had locked
            return
        if exc_type is not None:
            self._stop.set()
        self._pool.shutdown(cancel_futures=True)

    def kill(self) -> None:
        """Kill the processes, also those that still start; whoever waits for them gets a BrokenProcessPool."""
        processes = list((self._pool._processes or {}).values())  # as kill_workers of Python 3.14 does
        manager: Any = self._pool._executor_manager_thread  # typeshed has another class
        self._pool.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.kill()
        if manager is not None:
            manager.join(KILL_SECONDS)  # at exit it would print a traceback if it found its pipes closed

    def submit(self, function: Callable[..., T], *arguments: Any) -> Future[T]:
        """Call a function in one of the processes."""
        with _blocking_signals():
            return self._pool.submit(function, *arguments)


def cores() -> int:
    """Return the number of cores that this process may use, as a job of a cluster may fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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
def _blocking_signals() -> Iterator[None]:
    """Start the process from which workers are forked so that neither Ctrl-C nor SIGTERM ends it: a child inherits what
    is blocked. What arrives meanwhile, this process gets at the end of the block, also where another thread takes it.
    """
    arrived: list[int] = []
    before, handlers = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS), {}
    if threading.current_thread() is threading.main_thread():  # which runs the handlers, whoever takes a signal
        handlers = {number: signal.signal(number, lambda found, _: arrived.append(found)) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for found in arrived:
            signal.raise_signal(found)


def _prepare(stop: Event, threads: int, environment: dict[str, str]) -> None:
    global _stop
    _stop = stop
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    os.environ.update(environment)
    torch.set_num_threads(threads)
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)  # it was killed, and nothing waits for this process
