"""Train runs in several processes on this machine, or as Ray tasks on machines that share a file system."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import secrets
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from ...common.errors import BsamRuntimeError, BsamValueError
from ...common.extras import require_package
from ..common.printing import count_text
from ..common.termination import SIGNALS, Terminated, deferred_signals, terminable
from ..training.machine import Machine, devices_of, is_mps_installed, nvidia_mps
from .job import Job, Outcome, train_in_worker

RUNS_PER_GPU = 3  # through MPS; five or eight have no higher throughput on an H200
RETRIES = 3  # restarts of a run whose process was killed, for example when memory ran out
PRELOAD = ["torch"]  # imported once, in the process from which workers are forked
GRACE = 60.0  # seconds for the checkpoints of the workers after a signal
CONNECT = 5.0  # seconds to wait for the head node; Ray itself would wait for minutes and then exit the process
TOKEN = "RAY_AUTH_TOKEN"  # the environment variable that Ray and its processes read before any file
OBJECT_STORE = 100 * 2**20  # bytes, on a local cluster; small, since no arrays go through it


class Executor(NamedTuple):
    """Trains runs in other processes. If a future raises ``BrokenProcessPool``, its process was killed."""

    slots: Callable[[], int]  # returns the number of runs trained at the same time; callers do not submit more
    submit: Callable[[Job], Future[Outcome]]  # schedules a run


@contextlib.contextmanager
def local_processes(
    jobs: int,
    device: str | None = None,
    threads: int | None = None,
    on_message: Callable[[str], None] = lambda sentence: None,
    is_default: bool = False,
) -> Iterator[Executor]:
    """Provide processes on this machine, which end with the block; an exception in the block kills them.

    If it is :class:`~bsam.lab.common.termination.Terminated`, they first get the signal and time for a checkpoint.

    Args:
        jobs: the number of processes. They are spread over the GPUs and share them through MPS, if it can be started.
        device: as for :func:`bsam.lab.training.machine.devices_of`.
        threads: torch's threads in each process; None divides those of this process.
        is_default: whether :func:`default_slots` chose ``jobs``. Then each GPU gets one process if MPS is off.
    """
    devices = devices_of(device)
    gpus = 0 if devices == ["cpu"] else len(devices)
    with nvidia_mps(on_message) if 0 < gpus < jobs else contextlib.nullcontext() as mps:
        if gpus and (is_default or mps is not None):
            jobs = jobs if mps is not None else min(jobs, gpus)
            places = count_text(gpus, "GPU") + ("" if mps is None else " (NVIDIA MPS)")
            other = "; choose another number with --jobs" if is_default else ""
            on_message(f"Training {count_text(jobs, 'run')} at a time on {places}{other}.")
        threads = threads or max(1, torch.get_num_threads() // jobs)
        pools: dict[int, ProcessPoolExecutor] = {}
        futures: dict[int, Future[Outcome]] = {}

        def submit(job: Job) -> Future[Outcome]:
            i = next(i for i in range(jobs) if i not in futures or futures[i].done())
            machine = replace(job.machine, device=devices[i % len(devices)])
            call = partial(_call_terminable, train_in_worker, replace(job, machine=machine))
            try:
                futures[i] = pools[i].submit(call)
            except (KeyError, BrokenProcessPool):  # not started, or killed
                pools[i] = _new_pool(threads, mps or {})
                futures[i] = pools[i].submit(call)
            return futures[i]

        try:
            yield Executor(lambda: jobs, submit)
        except BaseException as error:  # also on Ctrl-C: kill the workers and re-raise
            processes = [process for pool in pools.values() for process in (pool._processes or {}).values()]
            if isinstance(error, Terminated):
                _forward(error.number, processes, list(futures.values()))
            for process in processes:
                process.kill()  # like kill_workers in Python 3.14
            raise
        finally:
            for pool in pools.values():
                pool.shutdown(cancel_futures=True)


def _new_pool(threads: int, variables: Mapping[str, str]) -> ProcessPoolExecutor:
    """Return a pool of a single process: one that is killed breaks its whole pool."""
    # a fork of this process could not use CUDA, and might copy locks that torch's threads hold
    is_posix = "forkserver" in multiprocessing.get_all_start_methods()
    context: Any = multiprocessing.get_context("forkserver" if is_posix else "spawn")
    if is_posix:
        context.set_forkserver_preload(PRELOAD)
    return ProcessPoolExecutor(1, context, _prepare, (threads, variables))


def _forward(number: int, processes: Sequence[Any], futures: Sequence[Future[Outcome]]) -> None:
    """Send a signal to the workers, and wait until their runs have written a checkpoint."""
    with deferred_signals():
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)
        wait(futures, GRACE)


def _call_terminable(function: Callable[..., Outcome], *arguments: Any) -> Outcome:
    with terminable():
        return function(*arguments)


def _prepare(threads: int, variables: Mapping[str, str]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends Ctrl-C to all processes; the parent handles it
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)  # until a run begins
    os.environ.update(variables)
    torch.set_num_threads(threads)
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    multiprocessing.parent_process().join()  # type: ignore[union-attr] # a worker has one
    os._exit(1)


def default_slots(device: str | None, unfinished: int, on_cpu: int = 1) -> int:
    """Return how many of the unfinished runs to train at a time: three per GPU if MPS is installed, otherwise one."""
    devices = devices_of(device)
    if devices == ["cpu"]:
        return on_cpu
    return max(1, min(unfinished, len(devices) * (RUNS_PER_GPU if is_mps_installed() else 1)))


@contextlib.contextmanager
def ray_tasks(machine: Machine) -> Iterator[Executor]:
    """Provide an executor that trains runs as Ray tasks. Unfinished tasks are killed at the end of the block.

    Ray restarts the run of a lost worker or node, which continues from its checkpoint.

    Args:
        machine: gives the cluster, the kind of device, and the number of GPUs per run. A cluster that is started on
            this machine ends with the block.
    """
    require_package("ray", "ray")
    import ray  # not at the top: it takes seconds

    with contextlib.ExitStack() as stack:
        if not ray.is_initialized():
            address = machine.ray or os.environ.get("RAY_ADDRESS", "")
            if not address:
                stack.enter_context(_private_cluster(ray))
            _connect(ray, address)
            stack.callback(ray.shutdown)
        gpus_per_run = machine.gpus_per_run
        if gpus_per_run is None and machine.device in ("cpu", "cuda"):
            gpus_per_run = float(machine.device == "cuda")
        elif gpus_per_run is None:
            gpus_per_run = float(ray.cluster_resources().get("GPU", 0) > 0)
        train = ray.remote(_train_in_task).options(num_cpus=1, num_gpus=gpus_per_run, max_retries=RETRIES)
        tasks = []

        def slots() -> int:
            total = 0
            for resources in (node["Resources"] for node in ray.nodes() if node["Alive"]):
                runs = resources.get("GPU", 0.0) / gpus_per_run + 1e-6 if gpus_per_run else float("inf")
                total += int(min(resources.get("CPU", 0.0), runs))
            return total

        def submit(job: Job) -> Future[Outcome]:
            folders: dict[str, Any] = {name: folder.absolute() for name, folder in job.machine.folders.items()}
            device = "cuda" if gpus_per_run else "cpu"
            there = replace(job.machine, **folders, device=device, ray=None, gpus_per_run=None)
            init = None if job.init is None else job.init.absolute()
            tasks.append(
                train.remote(os.getcwd(), replace(job, folder=job.folder.absolute(), init=init, machine=there))
            )
            return tasks[-1].future()

        if not slots():
            raise BsamValueError(
                f"a run needs 1 CPU and {gpus_per_run:g} GPUs, which no node of the cluster has: choose another "
                "--gpus-per-run, or --device cpu"
            )
        try:
            yield Executor(slots, submit)
        finally:
            for task in tasks:
                ray.cancel(task, force=True)  # does nothing if it has ended


def _train_in_task(folder: str, job: Job) -> Outcome:
    with contextlib.suppress(OSError):  # relative paths in the settings work if the node has this folder
        os.chdir(folder)
    torch.set_num_threads(1)
    return train_in_worker(job)


@contextlib.contextmanager
def _private_cluster(ray: Any) -> Iterator[None]:
    """Let no other machine and no other user reach the cluster that Ray starts in the block.

    By default it listens on all network interfaces, and its token lies in a file that everybody can read. Ray replaces
    a loopback address in its arguments by that of the machine, except where it does not support clusters.
    """
    constants = ray._private.ray_constants
    loader = getattr(ray._raylet, "AuthenticationTokenLoader", None)  # Ray before 2.52 has no tokens
    supports_clusters = constants.ENABLE_RAY_CLUSTER
    token = os.environ.get(TOKEN)
    constants.ENABLE_RAY_CLUSTER = False
    os.environ[TOKEN] = secrets.token_hex()
    try:
        if loader is not None:
            loader.instance().reset_cache()  # it may know another token
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = supports_clusters
        del os.environ[TOKEN]
        if token is not None:
            os.environ[TOKEN] = token
        if loader is not None:
            loader.instance().reset_cache()


def _connect(ray: Any, address: str) -> None:
    """Connect to a cluster, or start one. Raise if nothing listens at the address."""
    options = {} if address else {"include_dashboard": False, "object_store_memory": OBJECT_STORE}
    handler = signal.getsignal(signal.SIGTERM)
    try:
        if address not in ("", "auto"):
            host, _, port = address.rpartition(":")
            socket.create_connection((host, int(port)), CONNECT).close()
        ray.init(address or "local", log_to_driver=False, logging_level="ERROR", **options)
    except (OSError, OverflowError, RuntimeError, ValueError) as error:
        raise BsamRuntimeError(
            f"Ray at {address or 'local'} cannot be used ({' '.join(str(error).split())}): give HOST:PORT of a head "
            "node (`ray start --head`), or leave the address out"
        ) from error
    with contextlib.suppress(ValueError):  # only the main thread can set handlers
        signal.signal(signal.SIGTERM, handler or signal.SIG_DFL)  # Ray's handler would exit the process at once
