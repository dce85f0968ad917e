"""The processes of a run: a single one, or those launched with ``torchrun``."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .environment import pick_device

T = TypeVar("T")

NO_LIMIT = timedelta(days=365)  # NCCL ends a wait after ten minutes, gloo after thirty
LONGEST_SLEEP = 0.1  # seconds between two looks at whether all processes have arrived


@dataclass(frozen=True)
class DistributedContext:
    """This process's device and rank, and the number of processes.

    Values other than gradients are exchanged through the CPU, in a group of processes that wait without a time limit:
    one of them may be downloading data, or measuring the trained network.
    """

    device: torch.device
    rank: int = 0
    size: int = 1
    group: Any = None

    @property
    def is_main(self) -> bool:
        """Whether this process is the one that writes files and measures the network."""
        return self.rank == 0

    @property
    def is_main_of_machine(self) -> bool:
        """Whether this process is the first one on its machine."""
        return os.environ.get("LOCAL_RANK", "0") == "0"

    def share(self, batches: Tensor) -> Tensor:
        """Return this process's share of each batch; a row of ``batches`` holds one batch."""
        return batches[:, self.rank :: self.size]

    def wrap(self, network: nn.Module) -> nn.Module:
        """Return the network, wrapped to average gradients over the processes."""
        if self.size == 1:
            return network
        return DistributedDataParallel(network, device_ids=[self.device] if self.device.type == "cuda" else None)

    def mean(self, value: Tensor) -> Tensor:
        """Return the mean over the processes."""
        if self.size > 1:
            dist.all_reduce(value)
        return value / self.size

    def broadcast(self, value: T) -> T:
        """Return the first process's value on all processes."""
        values = [value]
        if self.size > 1:
            self.barrier()
            dist.broadcast_object_list(values, src=0, group=self.group)
        return values[0]

    def gather(self, value: T) -> list[T]:
        """Return the values of all processes, by rank."""
        values: list[Any] = [value] * self.size
        if self.size > 1:
            self.barrier()
            dist.all_gather_object(values, value, group=self.group)
        return values

    def copy_buffers(self, network: nn.Module) -> None:
        """Copy the first process's buffers, such as the statistics of batch norm, to all processes."""
        if self.size > 1:
            for buffer in network.buffers():
                dist.broadcast(buffer, src=0)

    def barrier(self) -> None:
        """Wait for all processes, without a time limit. Signals are handled meanwhile."""
        if self.size == 1:
            return
        work, pause = dist.barrier(self.group, async_op=True), 1e-3
        while not work.is_completed():
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_SLEEP)
        work.wait()  # raises if a process has ended


def is_first_process() -> bool:
    """Return whether this process prints: the only one of a run, or the first of those that torchrun started."""
    return os.environ.get("RANK", "0") == "0"


class Vote:
    """Let all processes act at the same step on a number that one of them has received."""

    def __init__(self, context: DistributedContext) -> None:
        self._context = context
        self._pending: tuple[Any, Tensor] | None = None

    def __call__(self, number: int) -> int:
        """Give this process's number, and return the largest number that the processes gave in the previous call.

        With a single process, return its number at once.
        """
        if self._context.size == 1:
            return number
        largest = self.result()
        given = torch.tensor(number)
        self._pending = dist.all_reduce(given, dist.ReduceOp.MAX, self._context.group, async_op=True), given
        return largest

    def result(self) -> int:
        """Return the largest number of the last call."""
        if self._pending is None:
            return 0
        work, largest = self._pending
        work.wait()
        self._pending = None
        return int(largest)


@contextlib.contextmanager
def distributed_context(device: str | None = None) -> Iterator[DistributedContext]:
    """Provide this process's device and rank. If the block succeeds, the processes wait for each other on exit.

    Args:
        device: as for :func:`pick_device`. With several processes, each takes the GPU of its local rank.
    """
    torch_device = pick_device(device)
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield DistributedContext(torch_device)
        return
    if torch_device.type == "cuda":
        torch_device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(torch_device)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if torch_device.type == "cuda" else "gloo")
        atexit.register(dist.destroy_process_group)  # not earlier: the next run in this process needs the group again
    group = _group_without_limit(dist.group.WORLD)
    context = DistributedContext(torch_device, dist.get_rank(), dist.get_world_size(), group)
    yield context
    context.barrier()  # otherwise a process could exit and close connections that another one still uses


@functools.cache
def _group_without_limit(world: Any) -> Any:
    """Return a group of all processes that exchanges values through the CPU; a single one for each world."""
    return dist.new_group(backend="gloo", timeout=NO_LIMIT)
