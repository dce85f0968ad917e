"""Runs as tasks of Ray, on one machine or on many that share a file system."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..core.checks import is_number
from ..core.errors import BsamError, BsamRuntimeError, BsamValueError
from ..core.extras import require_package
from .executors import RETRIES
from .mps import CONTROL, TURNS, mps_runs
from .run_job import EachEpoch, Outcome, RunJob, message_of, train_in_worker

CONNECT = 5.0  # seconds to wait for the head node; Ray itself would wait for minutes, and then end the process
START = "start one with `ray start --head`, or leave the address out"
OBJECT_STORE = 100 * 2**20  # bytes, on a local cluster: no arrays go through it


class RayTasks:
    """Train as tasks of Ray, as a context manager.

    A run whose worker or node is lost is started again, on whatever node, and goes on after its last finished epoch.
    When the block ends by an exception, as by Ctrl-C, tasks are killed.

    Args:
        address: ``HOST:PORT`` of the head node; ``"auto"`` for the cluster that runs on this machine; empty starts one
            on this machine for this block, unless ``RAY_ADDRESS`` is set.
        gpus_per_run: what a run takes of a GPU, or how many; None: one if the cluster has any.
        device: ``"auto"``, ``"cpu"`` or ``"cuda"``.
        cpus: of the cluster that is started; None: as many as there are cores.
        tell: called with a sentence for the user.
    """

    def __init__(
        self,
        address: str = "",
        gpus_per_run: float | None = None,
        device: str | None = None,
        cpus: int | None = None,
        tell: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        require_package("ray", "ray")
        self._address = address or os.environ.get("RAY_ADDRESS", "")
        if device not in (None, "auto", "cpu", "cuda"):
            raise BsamValueError(f"with Ray, device must be auto, cpu or cuda, got {device!r}: Ray chooses the GPU")
        share = 0 if gpus_per_run is None else gpus_per_run
        if not is_number(share) or share < 0 or (share > 1 and share != int(share)):
            raise BsamValueError(
                f"gpus_per_run must be between 0 and 1, or a whole number; got {gpus_per_run!r}. 0 trains on CPUs"
            )
        self._gpus, self._device, self._cpus, self._tell = gpus_per_run, device, cpus, tell
        self._tasks: dict[Future[Outcome], Any] = {}
        self._owns = self._told_of_no_node = False

    def __enter__(self) -> RayTasks:
        _check_address(self._address)
        import ray  # here: it takes seconds

        if not ray.is_initialized():
            _connect(self._address, self._cpus)
            self._owns = True
        try:
            self._choose_gpus()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _choose_gpus(self) -> None:
        """Raise if no node can train a run: Ray would wait for such a node without a word."""
        nodes = _nodes()
        most = max(node["Resources"].get("GPU", 0.0) for node in nodes)
        wants_gpu = self._device == "cuda" or (self._device != "cpu" and most > 0)
        self._gpus = float(wants_gpu) if self._gpus is None else self._gpus
        self._device = "cuda" if self._gpus else "cpu"
        if not any(map(self._slots_of, nodes)):
            raise BsamValueError(
                f"a run takes 1 CPU and {self._gpus:g} GPUs, and no node of the cluster has them: the largest has "
                f"{most:g} GPUs. Choose another --gpus-per-run, or --device cpu"
            )

    def __exit__(self, *_: object) -> None:
        import ray

        for future, task in self._tasks.items():
            if not future.done():
                ray.cancel(task, force=True)
        if self._owns:
            ray.shutdown()

    @property
    def slots(self) -> int:
        """The number of runs that the nodes can train at the same time, if nothing else runs on them."""
        found = sum(map(self._slots_of, _nodes()))
        if not found and not self._told_of_no_node:
            self._tell("No node that can train is left: runs wait until one joins the cluster. Ctrl-C stops.")
            self._told_of_no_node = True
        return found

    def _slots_of(self, node: Mapping[str, Any]) -> int:
        """Return the number of runs that a node can train at the same time."""
        has = node["Resources"]
        runs = has.get("GPU", 0.0) / self._gpus + 1e-6 if self._gpus else float("inf")
        return int(min(has.get("CPU", 0.0), runs))

    def submit(self, job: RunJob, each_epoch: EachEpoch, tell: Callable[[str], None]) -> Future[Outcome]:
        """Train a run in a task."""
        import ray

        options = {name: value.absolute() if isinstance(value, Path) else value for name, value in job.options.items()}
        job = replace(job, out=job.out.absolute(), options={**options, "device": self._device})
        remote: Any = ray.remote(_train_in_task)  # its types do not know these options
        task = remote.options(num_cpus=1, num_gpus=self._gpus, max_retries=RETRIES).remote(job, os.getcwd())
        future: Future[Outcome] = task.future()
        self._tasks[future] = task
        return future

    def check(self, check: Callable[[], None], out: Path) -> None:
        """Call a function on every node that can train, and see that it has the folder of the runs."""
        is_new = not out.exists()
        out.mkdir(parents=True, exist_ok=True)
        try:
            for node, message in self._on_nodes(_check_node, check, out.absolute()):
                if message is not None:
                    raise BsamRuntimeError(f"node {node}: {message}")
        except BaseException:
            if is_new:
                with contextlib.suppress(OSError):
                    out.rmdir()
            raise
        if 0 < (self._gpus or 0.0) < 1:
            for node, runs in self._on_nodes(mps_runs):
                if not runs:
                    self._tell(f"NVIDIA MPS is not on at node {node}: {TURNS}. Start it there: `{CONTROL} -d`.")

    def _on_nodes(self, function: Callable[..., Any], *arguments: Any) -> list[tuple[str, Any]]:
        """Call a function on every node that can train; returns the address of each and what it returned there."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        remote: Any = ray.remote(function)
        tasks = []
        for node in filter(self._slots_of, _nodes()):
            there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            task = remote.options(num_cpus=0, scheduling_strategy=there).remote(*arguments)
            tasks.append((node["NodeManagerAddress"], task))
        found = []
        for node, task in tasks:
            try:
                found.append((node, ray.get(task)))
            except ray.exceptions.RayError as error:
                raise BsamRuntimeError(
                    f"node {node}: a task failed there ({str(error).splitlines()[-1]}). Is bsam installed on all nodes?"
                ) from error
        return found


def _train_in_task(job: RunJob, folder: str) -> Outcome:
    with contextlib.suppress(OSError):  # where the node has it: for relative paths in the settings of a run
        os.chdir(folder)
    torch.set_num_threads(1)
    return train_in_worker(job)


def _check_node(check: Callable[[], None], out: Path) -> str | None:
    """Return what is wrong with a node."""
    try:
        check()
    except BsamError as error:
        return message_of(error)
    return None if out.is_dir() else f"there is no folder {out}: --out must be on a file system that all nodes share"


def _check_address(address: str) -> None:
    """Raise if nothing listens at an address."""
    if address in ("", "auto"):
        return
    host, _, port = address.rpartition(":")
    if "/" in host or not host or not port.isdecimal():
        raise BsamValueError(f"the address of Ray must be HOST:PORT of its head node, or auto; got {address!r}")
    try:
        socket.create_connection((host, int(port)), CONNECT).close()
    except (OSError, OverflowError) as error:
        raise BsamRuntimeError(f"no Ray cluster answers at {address} ({error}): {START}") from error


def _connect(address: str, cpus: int | None) -> None:
    import ray

    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if not address:
        options |= {"num_cpus": cpus, "include_dashboard": False, "object_store_memory": OBJECT_STORE}
    stop = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address or "local", **options)
    except (ConnectionError, RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise BsamRuntimeError(f"Ray at {address or 'local'} cannot be used ({reason}): {START}") from error
    if threading.current_thread() is threading.main_thread() and stop is not None:
        signal.signal(signal.SIGTERM, stop)  # Ray's handler ends the process at once


def _nodes() -> list[Mapping[str, Any]]:
    """Return the nodes that are up, as Ray describes them."""
    import ray

    return [node for node in ray.nodes() if node["Alive"]]
