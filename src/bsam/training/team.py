"""One process, or those that ``torchrun`` started: who trains on what part of a batch, and who writes."""

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

from ..core.errors import BsamRuntimeError, BsamValueError

T = TypeVar("T")


@dataclass(frozen=True)
class DistributedContext:
    """The processes of a run: this one's rank, how many there are, and its device."""

    device: torch.device
    rank: int = 0
    size: int = 1

    @property
    def writes(self) -> bool:
        """Whether this process is the one that writes files and judges the network."""
        return self.rank == 0

    def share(self, batch: Tensor) -> Tensor:
        """This process' part of a batch."""
        return batch[self.rank :: self.size]

    def wrapped(self, network: nn.Module) -> nn.Module:
        """The network, averaging its gradients over the processes."""
        if self.size == 1:
            return network
        return DistributedDataParallel(network, device_ids=[self.device] if self.device.type == "cuda" else None)

    def mean(self, value: Tensor) -> Tensor:
        """The mean over the processes."""
        if self.size > 1:
            dist.all_reduce(value)
        return value / self.size

    def agreed(self, value: T) -> T:
        """What the first process has, in all of them."""
        box = [value]
        if self.size > 1:
            dist.broadcast_object_list(box, src=0, device=self.device)
        return box[0]

    def wait(self) -> None:
        """Until all are here."""
        if self.size > 1:
            dist.barrier()


@contextlib.contextmanager
def team(device: str | None = None) -> Iterator[DistributedContext]:
    """This process alone, or with those that ``torchrun`` started beside it.

    Args:
        device: ``"cpu"``, ``"cuda"`` or ``"cuda:1"``; None takes a GPU if there is one. Of several processes each takes
            the GPU of its local rank.

    Example:
        >>> with team("cpu") as alone:
        ...     print(alone)
        DistributedContext(device=device(type='cpu'), rank=0, size=1)
    """
    name = (None if device == "auto" else device) or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(name)
    except RuntimeError as error:
        raise BsamValueError(f"device must be cpu, cuda or cuda:N, got {name!r}") from error
    if place.type not in ("cpu", "cuda"):
        raise BsamValueError(f"device must be cpu, cuda or cuda:N, got {name!r}")
    if place.type == "cuda" and not torch.cuda.is_available():
        raise BsamRuntimeError("device is cuda, and torch sees no GPU here: take cpu")
    try:
        size = int(os.environ.get("WORLD_SIZE", "1"))
        int(os.environ["RANK"] if size > 1 else "0")
    except (ValueError, KeyError) as error:
        raise BsamRuntimeError(
            "WORLD_SIZE is set, but not as torchrun sets it, with RANK and LOCAL_RANK: start by torchrun, or unset it"
        ) from error
    if size == 1:
        yield DistributedContext(place)
        return
    if place.type == "cuda":
        place = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(place)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if place.type == "cuda" else "gloo")
        atexit.register(
            dist.destroy_process_group
        )  # not before: processes that parted would not find each other again for the next run
    yield DistributedContext(place, dist.get_rank(), dist.get_world_size())
