"""Where the runs of an experiment are trained: in this process, or in several on this machine."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Protocol

import torch

from ..core.checks import check_count
from ..core.errors import BsamRuntimeError
from ..core.workers import Workers, stop_if_asked
from ..training.environment import pick_device
from .mps import nvidia_mps
from .run_job import EachEpoch, Outcome, RunJob, logging_to

RETRIES = 3  # of a run whose process ended: killed by another program, or by the system when memory ran out


class Executor(Protocol):
    """Trains runs. Submitted ones may wait; whatever trains ends with the block of the executor."""

    @property
    def slots(self) -> int:
        """The number of runs that are trained at the same time."""

    def submit(self, job: RunJob, each_epoch: EachEpoch, tell: Callable[[str], None]) -> Future[Outcome]:
        """Train a run, some time. The two functions are called where training is in this process."""

    def check(self, check: Callable[[], None], out: Path) -> None:
        """Call a function on every machine that may train, which raises if something is missing there; and see that
        these machines have the folder of the runs.
        """


class InProcess:
    """Train in this process: a run that is submitted has ended."""

    slots = 1

    def submit(self, job: RunJob, each_epoch: EachEpoch, tell: Callable[[str], None]) -> Future[Outcome]:
        """Train a run, now."""
        future: Future[Outcome] = Future()
        future.set_result(replace(job.train(each_epoch, tell), told=()))  # the user was told
        return future

    def check(self, check: Callable[[], None], out: Path) -> None:
        """Call a function here."""
        check()

    def __enter__(self) -> InProcess:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@dataclass
class _Slot:
    """A process that trains one run at a time, on a device; a new one takes its place when it ends."""

    device: str
    threads: int
    environment: Mapping[str, str]
    pool: Workers = field(init=False)
    pid: Future[int] = field(init=False)

    def start(self) -> None:
        self.pool = Workers(1, self.threads, self.environment)
        self.pid = self.pool.submit(os.getpid)  # starts the process

    def kill(self) -> None:
        self.pool.stop()  # one that is still starting then trains nothing
        if self.pid.done() and self.pid.exception() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid.result(), signal.SIGKILL)


class LocalProcesses:
    """Train in several processes on this machine, as a context manager.

    The processes are spread over the GPUs; where there are more of them than GPUs, they share them through NVIDIA MPS,
    if it can be started. A run whose process is killed goes on in a new one. When the block ends by an exception, as by
    Ctrl-C, the processes are killed: runs continue after their last finished epoch when they are called again.

    Args:
        slots: the number of processes.
        device: as for :func:`bsam.training.environment.pick_device`; without a number, all GPUs are used.
        threads: of torch in each process; None shares the cores among them.
        tell: called with a sentence for the user.
    """

    def __init__(
        self,
        slots: int,
        device: str | None = None,
        threads: int | None = None,
        tell: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        check_count("jobs", slots)
        self.slots = slots
        self._devices = spread(device, slots)
        self._threads = threads or max(1, (os.cpu_count() or 1) // slots)
        self._tell = tell
        self._stack = contextlib.ExitStack()
        self._free: queue.SimpleQueue[_Slot] = queue.SimpleQueue()
        self._all: list[_Slot] = []
        self._calls = ThreadPoolExecutor(slots)  # each thread waits for one process
        self._stopped = False

    def __enter__(self) -> LocalProcesses:
        shared = self._devices[0] != "cpu" and len(set(self._devices)) < self.slots
        environment = self._stack.enter_context(nvidia_mps(self._tell)) if shared else {}
        for device in self._devices:
            slot = _Slot(device, self._threads, environment)
            slot.start()
            self._all.append(slot)
            self._free.put(slot)
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stopped = True
        for slot in self._all:
            if exc_type is None:
                slot.pool.__exit__(None, None, None)
            else:
                slot.kill()
        self._calls.shutdown(cancel_futures=True)
        self._stack.close()

    def submit(self, job: RunJob, each_epoch: EachEpoch, tell: Callable[[str], None]) -> Future[Outcome]:
        """Train a run in one of the processes, when one is free."""
        return self._calls.submit(self._train, job)

    def check(self, check: Callable[[], None], out: Path) -> None:
        """Call a function here."""
        check()

    def _train(self, job: RunJob) -> Outcome:
        slot = self._free.get()
        try:
            for _ in range(1 + RETRIES):
                try:
                    return slot.pool.submit(_train_in_worker, job.on(slot.device)).result()
                except BrokenProcessPool:
                    if self._stopped:
                        raise
                    slot.start()
            raise BsamRuntimeError(
                f"its process ended {1 + RETRIES} times: perhaps memory ran out, and fewer --jobs help. See {job.log}"
            )
        finally:
            self._free.put(slot)


def _train_in_worker(job: RunJob) -> Outcome:
    stop_if_asked()
    with logging_to(job.log):
        return job.train(stop_if_asked, lambda sentence: None)  # the outcome has the sentences


def spread(device: str | None, slots: int) -> list[str]:
    """Return the device of each process.

    Example:
        >>> spread("cpu", 2)
        ['cpu', 'cpu']
    """
    found = pick_device(device)
    if found.type == "cpu":
        return ["cpu"] * slots
    if found.index is not None:
        return [str(found)] * slots
    return [f"cuda:{i % torch.cuda.device_count()}" for i in range(slots)]
