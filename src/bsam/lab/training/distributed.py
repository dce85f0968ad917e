"""The processes of a run: a single one, or those launched with ``torchrun``."""

from __future__ import annotations

import atexit
import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .environment import pick_device

T = TypeVar("T")


@dataclass(frozen=True)
class DistributedContext:
    """This process's device and rank, and the number of processes."""

    device: torch.device
    rank: int = 0
    size: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this process is the one that writes files and evaluates the network."""
        return self.rank == 0

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
            dist.broadcast_object_list(values, src=0, device=self.device)
        return values[0]

    def barrier(self) -> None:
        """Wait for all processes."""
        if self.size > 1:
            dist.barrier()


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
    yield DistributedContext(torch_device, dist.get_rank(), dist.get_world_size())
    dist.barrier()  # otherwise a process could exit and close connections that another one still uses
