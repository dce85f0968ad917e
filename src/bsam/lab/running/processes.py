"""Worker processes, and the number of available cores."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch

PRELOAD = ["torch"]  # imported once, in the process from which workers are forked


def cores() -> int:
    """Return the number of cores available to this process: a cluster job may get fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextlib.contextmanager
def worker_pool(
    count: int, threads: int = 1, environment: Mapping[str, str] | None = None
) -> Iterator[ProcessPoolExecutor]:
    """Provide a pool of worker processes, which end with the block or with this process.

    An exception in the block kills the processes. They ignore Ctrl-C, which only this process handles.

    Args:
        count: the number of processes.
        threads: torch's threads in each process.
        environment: variables to add to their environment.
    """
    # a fork of this process could not use CUDA, and might copy locks that torch's threads hold
    is_posix = "forkserver" in multiprocessing.get_all_start_methods()
    context: Any = multiprocessing.get_context("forkserver" if is_posix else "spawn")
    if is_posix:
        context.set_forkserver_preload(PRELOAD)
    pool = ProcessPoolExecutor(count, context, _prepare, (threads, dict(environment or {})))
    try:
        yield pool
        pool.shutdown()
    finally:
        for process in list((pool._processes or {}).values()):  # like kill_workers in Python 3.14
            process.kill()
        pool.shutdown(cancel_futures=True)


def _prepare(threads: int, environment: Mapping[str, str]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends Ctrl-C to all processes; the parent handles it
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ.update(environment)
    torch.set_num_threads(threads)
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
