"""Where the runs of an experiment are trained: in this process, or in several on this machine."""

from __future__ import annotations

import contextlib
import os
import queue
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from ..core.checks import check_count
from ..core.errors import BsamRuntimeError
from ..core.workers import Workers, cores
from ..training.environment import pick_device
from .mps import nvidia_mps
from .run_job import EachEpoch, Outcome, RunJob, train_in_worker

RETRIES = 3  # of a run whose process ended: killed by another program, or by the system when memory ran out


class Executor(Protocol):
    """Trains runs. Submitted ones may wait; whatever trains ends with the block of the executor."""

    @property
    def slots(self) -> int:
        """The number of runs that are trained at the same time."""

    def submit(self, job: RunJob, each_epoch: EachEpoch, tell: Callable[[str], None]) -> Future[Outcome]:
        """Train a run, some time. The two functions are called where training is in this process."""


class InProcess(contextlib.AbstractContextManager["InProcess"]):
    """Train in this process: a run that is submitted has ended."""

    slots = 1

    def submit(self, job: RunJob, each_epoch: EachEpoch, tell: Callable[[str], None]) -> Future[Outcome]:
        """Train a run, now."""
        future: Future[Outcome] = Future()
        future.set_result(replace(job.train(each_epoch, tell), told=()))  # the user was told
        return future

    def __exit__(self, *_: object) -> None:
        pass


@dataclass
class _Slot:
    """A process that trains one run at a time, on a device; a new one takes its place when it ends."""

    device: str
    threads: int
    environment: Mapping[str, str]
    pool: Workers = field(init=False)

    def prepare(self) -> None:
        self.pool = Workers(1, self.threads, self.environment)

    def start(self) -> None:
        self.pool.submit(os.getpid)  # starts the process

    def stop(self, exc_type: type[BaseException] | None, *_: object) -> None:
        """As the exit of a context manager: kill the process if the block ended by an exception."""
        if exc_type is None:
            self.pool.__exit__(None, None, None)
        else:
            self.pool.kill()


class LocalProcesses(contextlib.AbstractContextManager["LocalProcesses"]):
    """Train in several processes on this machine, as a context manager. A process is started for each of the first
    runs that are submitted.

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
        self._threads = threads or max(1, cores() // slots)
        self._tell = tell
        self._stack = contextlib.ExitStack()  # does all of it, also where Ctrl-C is pressed again meanwhile
        self._environment: Mapping[str, str] = {}
        self._free: queue.SimpleQueue[_Slot] = queue.SimpleQueue()
        self._calls = ThreadPoolExecutor(slots)  # each thread waits for one process
        self._stopped = False

    def __exit__(self, *exc: Any) -> None:
        self._stopped = True
        self._stack.__exit__(*exc)

    def submit(self, job: RunJob, each_epoch: EachEpoch, tell: Callable[[str], None]) -> Future[Outcome]:
        """Train a run in one of the processes, when one is free."""
        if len(self._devices) == self.slots:  # no process is started yet
            if self._devices[0] != "cpu" and len(set(self._devices)) < self.slots:
                self._environment = self._stack.enter_context(nvidia_mps(self._tell))
            self._stack.callback(self._calls.shutdown, cancel_futures=True)
        if self._devices:
            slot = _Slot(self._devices.pop(0), self._threads, self._environment)
            slot.prepare()
            self._stack.push(slot.stop)  # first: Ctrl-C may come while it starts
            slot.start()
            self._free.put(slot)
        return self._calls.submit(self._train, job)

    def _train(self, job: RunJob) -> Outcome:
        slot = self._free.get()
        try:
            for _ in range(1 + RETRIES):
                try:
                    return slot.pool.submit(train_in_worker, job.on(slot.device)).result()
                except BrokenProcessPool:
                    if self._stopped:
                        raise
                    self._tell(f"The process of {job.log.parent.name} was killed: perhaps memory ran out.")
                    slot.prepare()
                    slot.start()
                    if self._stopped:  # meanwhile: nobody else would kill it
                        slot.pool.kill()
                        raise
            raise BsamRuntimeError(
                f"its process ended {1 + RETRIES} times: perhaps memory ran out (try fewer --jobs), or the "
                'script has no `if __name__ == "__main__":`'
            )
        finally:
            self._free.put(slot)


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
