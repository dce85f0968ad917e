"""Many runs, side by side in processes of one thread each."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing.synchronize import Event
from types import TracebackType

import torch

from .config import Run
from .loop import fit
from .result import Result

_stop: Event | None = None  # set in a worker: when the one who asked for the runs no longer waits for them


class Workers:
    """Processes that train. They start with the first run that they get, and are a context manager: nobody is left
    behind.

    An interrupt (Ctrl-C) reaches the caller only; the workers then leave their runs after the epoch they are in.

    Args:
        count: how many; two runs at a time on two cores.
    """

    def __init__(self, count: int = 2) -> None:
        context = multiprocessing.get_context(
            "spawn"
        )  # a fork would inherit torch's threads in whatever state they are
        self._stop = context.Event()
        self._pool = ProcessPoolExecutor(count, context, _prepare, (self._stop,))

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._stop.set()
        self._pool.shutdown(cancel_futures=True)

    def fit_all(self, runs: Iterable[Run], finished: Callable[[Result], None]) -> None:
        """Train every run, and hand each result over as soon as it is there."""
        with _deaf_to_interrupts():
            futures = [self._pool.submit(_fit, run) for run in runs]
        for future in as_completed(futures):
            finished(future.result())


@contextlib.contextmanager
def _deaf_to_interrupts() -> Iterator[None]:
    """Processes started in here ignore Ctrl-C from their first instruction on: a child inherits that, and prints no
    traceback while it imports torch.
    """
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
    threading.Thread(target=_leave_with_parent, daemon=True).start()


def _leave_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)  # it was killed, and nobody will ask this process for anything


def _fit(run: Run) -> Result:
    _go_on_or_leave(0)
    return fit(run, device="cpu", each_epoch=_go_on_or_leave)


def _go_on_or_leave(epoch: int, _: Mapping[str, float] | None = None) -> None:
    if _stop is not None and _stop.is_set():
        raise InterruptedError(f"stopped after {epoch} epochs")
