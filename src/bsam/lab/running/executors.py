"""Train the runs of an experiment in this process, or in several processes on this machine.

Several processes share a GPU through NVIDIA MPS: they use it at the same time instead of taking turns.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from types import FrameType
from typing import Any, Protocol

import torch

from ...common.checks import check_count
from ..training.environment import pick_device
from .job import OnEpoch, OnMessage, Outcome, RunJob, train_in_worker

RUNS_PER_GPU = 3  # through MPS; five or eight have no higher throughput on an H200
MPS_CONTROL = "nvidia-cuda-mps-control"
PRELOAD = ["torch"]  # imported once, in the process from which workers are forked


class Terminated(KeyboardInterrupt):
    """The process received SIGTERM."""


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Let SIGTERM raise :class:`Terminated`. Does nothing outside the main thread, where signals cannot be handled.

    Example:
        >>> with contextlib.suppress(Terminated), terminable():
        ...     signal.raise_signal(signal.SIGTERM)
        ...     print("not reached")
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise Terminated

    previous = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if previous is None else previous)


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


@dataclass
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

    slots: int
    device: str | None = None
    threads: int | None = None
    on_message: OnMessage = lambda sentence: None
    is_default: bool = False

    def __post_init__(self) -> None:
        check_count("jobs", self.slots)
        self._slots = [_Slot(name) for name in spread(self.device, self.slots)]
        self._environment: Mapping[str, str] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> LocalProcesses:
        devices = {slot.device for slot in self._slots}
        if "cpu" in devices:
            return self
        is_mps_on = False
        if len(devices) < self.slots:
            environment = self._stack.enter_context(nvidia_mps(self.on_message))
            is_mps_on = environment is not None
            self._environment = environment or {}
            if self.is_default and not is_mps_on:
                del self._slots[len(devices) :]
                self.slots = len(devices)
        if self.is_default or is_mps_on:
            runs = "one run" if self.slots == 1 else f"{self.slots} runs"
            gpus = "one GPU" if len(devices) == 1 else f"{len(devices)} GPUs"
            mps = " (NVIDIA MPS)" if is_mps_on else ""
            other = "; choose another number with --jobs" if self.is_default else ""
            self.on_message(f"Training {runs} at a time on {gpus}{mps}{other}.")
        return self

    def __exit__(self, *exception: Any) -> None:
        self._stack.__exit__(*exception)

    def submit(self, job: RunJob, on_epoch: OnEpoch, on_message: OnMessage) -> Future[Outcome]:
        """Train a run in a free process; a killed process is replaced by a new one."""
        slot = next(slot for slot in self._slots if slot.future is None or slot.future.done())
        with contextlib.suppress(BrokenProcessPool):
            if slot.pool is not None:
                slot.future = slot.pool.submit(train_in_worker, job.on(slot.device))
                return slot.future
        threads = self.threads or max(1, cores() // self.slots)
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
    return max(1, min(unfinished, len(devices) * (RUNS_PER_GPU if is_mps_installed() else 1)))


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


def is_mps_installed() -> bool:
    """Return whether NVIDIA's control program is on the PATH; MPS may still fail to start."""
    return shutil.which(MPS_CONTROL) is not None


@contextlib.contextmanager
def nvidia_mps(on_message: OnMessage) -> Iterator[Mapping[str, str] | None]:
    """Use the running MPS daemon, or start one for this block. If neither works, report it and continue without MPS.

    Args:
        on_message: called with messages for the user.

    Returns:
        the environment variables with which processes find the daemon; None without MPS.
    """
    if _control("get_server_list", {}) is None:
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix="bsam-mps-") as folder:  # socket paths must be short
        environment = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        try:
            problem = _control("", environment, "-d")
            if problem is not None:
                on_message(f"NVIDIA MPS is off ({problem}): runs on one GPU take turns, which saves little time.")
            yield {**environment, **_visible_devices()} if problem is None else None
        finally:
            _control("quit", environment)


def _visible_devices() -> dict[str, str]:
    """Return CUDA_VISIBLE_DEVICES for clients of a daemon started here, which numbers its GPUs from 0."""
    if not re.fullmatch(r"[\d, ]+", os.environ.get("CUDA_VISIBLE_DEVICES", "")):
        return {}  # not set, or UUIDs, which stay valid
    return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(torch.cuda.device_count())))}


def _control(command: str, environment: Mapping[str, str], *flags: str) -> str | None:
    """Start the daemon or send it a command, and return the error message, or None on success."""
    try:
        process = subprocess.run(
            [MPS_CONTROL, *flags],
            input=f"{command}\n",
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    output = " ".join((process.stdout + process.stderr).split())
    return None if process.returncode == 0 else output or f"{MPS_CONTROL} exited with status {process.returncode}"
