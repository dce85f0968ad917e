"""Train the runs of an experiment in this process, or in several processes on this machine."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

import torch

from ..common.checks import check_count
from ..training.environment import pick_device
from .job import OnEpoch, OnMessage, Outcome, RunJob, train_in_worker
from .mps import nvidia_mps
from .processes import cores, worker_pool


class Executor(Protocol):
    """Train runs, as a context manager. An exception in the block, such as Ctrl-C, stops them."""

    @property
    def slots(self) -> int:
        """The number of runs trained at the same time. Callers submit no more than this before one has ended."""

    def submit(self, job: RunJob, on_epoch: OnEpoch, on_message: OnMessage) -> Future[Outcome]:
        """Schedule a run. The callbacks are called only if it trains in this process. If the future raises
        ``BrokenProcessPool``, the run's process was killed; the run can be submitted again.
        """


class InProcess(contextlib.AbstractContextManager["InProcess"]):
    """Train in this process: ``submit`` blocks until the run ends."""

    slots = 1

    def submit(self, job: RunJob, on_epoch: OnEpoch, on_message: OnMessage) -> Future[Outcome]:
        """Train a run."""
        future: Future[Outcome] = Future()
        future.set_result(job.train(on_epoch, on_message))
        return future

    def __exit__(self, *_: object) -> None:
        pass


@dataclass
class _Slot:
    device: str
    pool: ProcessPoolExecutor | None = None
    future: Future[Outcome] | None = None


class LocalProcesses:
    """Train in several processes on this machine, as a context manager. A process starts with its first run.

    The processes are spread over the GPUs; extra ones share the GPUs through NVIDIA MPS, if it can be started.

    Args:
        slots: the number of processes.
        device: as for :func:`bsam.training.environment.pick_device`; ``"cuda"`` without an index uses all GPUs.
        threads: torch's threads in each process; None divides the cores among the processes.
        on_message: called with messages for the user.
    """

    def __init__(
        self,
        slots: int,
        device: str | None = None,
        threads: int | None = None,
        on_message: OnMessage = lambda sentence: None,
    ) -> None:
        check_count("jobs", slots)
        self.slots = slots
        self._slots = [_Slot(name) for name in spread(device, slots)]
        self._threads = threads or max(1, cores() // slots)
        self._on_message = on_message
        self._environment: Mapping[str, str] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> LocalProcesses:
        devices = {slot.device for slot in self._slots}
        if "cpu" not in devices and len(devices) < self.slots:
            self._environment = self._stack.enter_context(nvidia_mps(self._on_message))
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.__exit__(exc_type, exc, traceback)

    def submit(self, job: RunJob, on_epoch: OnEpoch, on_message: OnMessage) -> Future[Outcome]:
        """Train a run in a free process; a killed process is replaced by a new one."""
        slot = next(slot for slot in self._slots if slot.future is None or slot.future.done())
        with contextlib.suppress(BrokenProcessPool):
            if slot.pool is not None:
                slot.future = slot.pool.submit(train_in_worker, job.on(slot.device))
                return slot.future
        slot.pool = self._stack.enter_context(worker_pool(1, self._threads, self._environment))
        slot.future = slot.pool.submit(train_in_worker, job.on(slot.device))
        return slot.future


def spread(device: str | None, slots: int) -> list[str]:
    """Return the device of each process.

    Example:
        >>> spread("cpu", 2)
        ['cpu', 'cpu']
    """
    picked = pick_device(device)
    if picked.type == "cpu":
        return ["cpu"] * slots
    if picked.index is not None:
        return [str(picked)] * slots
    return [f"cuda:{i % torch.cuda.device_count()}" for i in range(slots)]
