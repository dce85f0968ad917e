"""Train the runs of an experiment in this process, or in several processes on this machine."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

import torch

from ...common.checks import check_count
from ..training.environment import pick_device
from .job import OnEpoch, OnMessage, Outcome, RunJob, train_in_worker
from .mps import is_installed, nvidia_mps
from .processes import cores, worker_pool

RUNS_PER_GPU = 3  # through MPS; five or eight have no higher throughput on an H200


class Executor(Protocol):
    """Train runs, as a context manager. An exception in the block, such as Ctrl-C, stops them."""

    @property
    def slots(self) -> int:
        """The number of runs trained at the same time. Callers must not have more unfinished runs than this."""

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
        device: as for :func:`bsam.lab.training.environment.pick_device`; ``"cuda"`` without an index uses all GPUs.
        threads: torch's threads in each process; None divides the cores among the processes.
        on_message: called with messages for the user.
        is_default: whether :func:`default_slots` chose ``slots``. Then each GPU gets one process if MPS cannot be
            started.
    """

    def __init__(
        self,
        slots: int,
        device: str | None = None,
        threads: int | None = None,
        on_message: OnMessage = lambda sentence: None,
        is_default: bool = False,
    ) -> None:
        check_count("jobs", slots)
        self.slots = slots
        self._slots = [_Slot(name) for name in spread(device, slots)]
        self._threads = threads
        self._on_message = on_message
        self._is_default = is_default
        self._environment: Mapping[str, str] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> LocalProcesses:
        devices = {slot.device for slot in self._slots}
        if "cpu" in devices:
            return self
        is_mps_on = False
        if len(devices) < self.slots:
            environment = self._stack.enter_context(nvidia_mps(self._on_message))
            is_mps_on = environment is not None
            self._environment = environment or {}
            if self._is_default and not is_mps_on:
                del self._slots[len(devices) :]
                self.slots = len(devices)
        if self._is_default or is_mps_on:
            runs = "one run" if self.slots == 1 else f"{self.slots} runs"
            gpus = "one GPU" if len(devices) == 1 else f"{len(devices)} GPUs"
            other = "; choose another number with --jobs" * self._is_default
            self._on_message(f"Training {runs} at a time on {gpus}{' (NVIDIA MPS)' * is_mps_on}{other}.")
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
        threads = self._threads or max(1, cores() // self.slots)
        slot.pool = self._stack.enter_context(worker_pool(1, threads, self._environment))
        slot.future = slot.pool.submit(train_in_worker, job.on(slot.device))
        return slot.future


def default_slots(device: str | None, unfinished: int, on_cpu: int = 1) -> int:
    """Return the number of runs to train at the same time: three per GPU if MPS is installed, otherwise one.

    Args:
        device: as for :class:`LocalProcesses`.
        unfinished: the number of runs left to train, which limits the result on GPUs.
        on_cpu: the number for a CPU.
    """
    devices = _devices(device)
    if devices == ["cpu"]:
        return on_cpu
    return max(1, min(unfinished, len(devices) * (RUNS_PER_GPU if is_installed() else 1)))


def spread(device: str | None, slots: int) -> list[str]:
    """Return the device of each process.

    Example:
        >>> spread("cpu", 2)
        ['cpu', 'cpu']
    """
    return list(itertools.islice(itertools.cycle(_devices(device)), slots))


def _devices(device: str | None) -> list[str]:
    picked = pick_device(device)
    if picked.type == "cpu":
        return ["cpu"]
    if picked.index is not None:
        return [str(picked)]
    return [f"cuda:{i}" for i in range(torch.cuda.device_count())]
