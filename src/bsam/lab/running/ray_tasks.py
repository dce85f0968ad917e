"""Train runs as Ray tasks, on one machine or on several that share a file system."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ...common.checks import is_number
from ...common.errors import BsamRuntimeError, BsamValueError
from ...common.extras import require_package
from .job import OnEpoch, OnMessage, Outcome, RunJob, train_in_worker
from .runner import RETRIES

CONNECT = 5.0  # seconds to wait for the head node; Ray itself would wait for minutes and then exit the process
START = "give HOST:PORT of a head node (`ray start --head`), or leave the address out"
OBJECT_STORE = 100 * 2**20  # bytes, on a local cluster; small, since no arrays go through it


@contextlib.contextmanager
def ray_tasks(
    address: str = "", gpus_per_run: float | None = None, device: str | None = None, cpus: int | None = None
) -> Iterator[RayTasks]:
    """Provide an executor that trains runs as Ray tasks. Unfinished tasks are killed at the end of the block.

    Args:
        address: ``HOST:PORT`` of the head node, or ``"auto"`` for the cluster running on this machine. An empty string
            uses ``RAY_ADDRESS``; if that is not set either, it starts a cluster on this machine for this block.
        gpus_per_run: the number of GPUs per run, possibly a fraction; None means one if the cluster has any.
        device: ``"auto"``, ``"cpu"`` or ``"cuda"``.
        cpus: the number of CPUs of a cluster started here; None uses all cores.
    """
    require_package("ray", "ray")
    if device not in (None, "auto", "cpu", "cuda"):
        raise BsamValueError(f"with Ray, device must be auto, cpu or cuda, got {device!r}: Ray chooses the GPU")
    share = 0 if gpus_per_run is None else gpus_per_run
    if not is_number(share) or share < 0 or (share > 1 and share != int(share)):
        raise BsamValueError(
            f"gpus_per_run must be between 0 and 1, or a whole number; got {gpus_per_run!r}. Use 0 to train on CPUs"
        )
    with contextlib.ExitStack() as stack:
        import ray  # not at the top: it takes seconds

        if not ray.is_initialized():
            _connect(ray, address or os.environ.get("RAY_ADDRESS", ""), cpus)
            stack.callback(ray.shutdown)
        if gpus_per_run is None:
            gpus_per_run = float(device == "cuda" or (device != "cpu" and ray.cluster_resources().get("GPU", 0) > 0))
        executor = RayTasks(ray, gpus_per_run)
        if not executor.capacity():
            raise BsamValueError(
                f"a run needs 1 CPU and {gpus_per_run:g} GPUs, which no node of the cluster has: choose another "
                "--gpus-per-run, or --device cpu"
            )
        stack.callback(executor.cancel)
        yield executor


class RayTasks:
    """Train runs as Ray tasks. If a worker or node is lost, its run is restarted and continues from its checkpoint.

    Args:
        ray: the module.
        gpus_per_run: the number of GPUs per run, possibly a fraction.
    """

    def __init__(self, ray: Any, gpus_per_run: float) -> None:
        self._ray = ray
        self._gpus = gpus_per_run
        self._tasks: dict[Future[Outcome], Any] = {}

    @property
    def slots(self) -> int:
        """The number of runs that the nodes can train at the same time; at least 1, since a run can wait for a node."""
        return max(1, self.capacity())

    def capacity(self) -> int:
        """Return the number of runs that the nodes can train at the same time, if nothing else runs on them."""
        total = 0
        for resources in (node["Resources"] for node in self._ray.nodes() if node["Alive"]):
            runs = resources.get("GPU", 0.0) / self._gpus + 1e-6 if self._gpus else float("inf")
            total += int(min(resources.get("CPU", 0.0), runs))
        return total

    def submit(self, job: RunJob, on_epoch: OnEpoch, on_message: OnMessage) -> Future[Outcome]:
        """Train a run in a task."""
        options = {name: value.absolute() if isinstance(value, Path) else value for name, value in job.options.items()}
        job = replace(job, out=job.out.absolute(), options=options).on("cuda" if self._gpus else "cpu")
        remote = self._ray.remote(_train_in_task)
        task = remote.options(num_cpus=1, num_gpus=self._gpus, max_retries=RETRIES).remote(job, os.getcwd())
        future: Future[Outcome] = task.future()
        self._tasks[future] = task
        return future

    def cancel(self) -> None:
        """Kill the tasks that have not ended."""
        for future, task in self._tasks.items():
            if not future.done():
                self._ray.cancel(task, force=True)


def _train_in_task(job: RunJob, folder: str) -> Outcome:
    with contextlib.suppress(OSError):  # relative paths in the settings work if the node has this folder
        os.chdir(folder)
    torch.set_num_threads(1)
    return train_in_worker(job)


def _connect(ray: Any, address: str, cpus: int | None) -> None:
    """Connect to a cluster, or start one. Raise if nothing listens at the address."""
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if not address:
        options |= {"num_cpus": cpus, "include_dashboard": False, "object_store_memory": OBJECT_STORE}
    handler = signal.getsignal(signal.SIGTERM)
    try:
        if address not in ("", "auto"):
            host, _, port = address.rpartition(":")
            socket.create_connection((host, int(port)), CONNECT).close()
        ray.init(address or "local", **options)
    except (OSError, OverflowError, RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise BsamRuntimeError(f"Ray at {address or 'local'} cannot be used ({reason}): {START}") from error
    with contextlib.suppress(ValueError):  # only the main thread can set handlers
        signal.signal(signal.SIGTERM, handler or signal.SIG_DFL)  # Ray's handler would exit the process at once
