"""Finding DDP wrappers, and averaging over the ranks of torch.distributed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


def several_ranks() -> bool:
    """Whether torch.distributed connects this process with others."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def find_ddp(module: nn.Module | None, params: set[Tensor] | None = None) -> Any:
    """Return the DDP wrapper that ``module`` is or contains (the one of ``params``, if given), or None."""
    if module is None or not dist.is_available():
        return None
    from torch.nn.parallel import DistributedDataParallel

    wrappers = (m for m in module.modules() if isinstance(m, DistributedDataParallel))
    return next((m for m in wrappers if params is None or any(p in params for p in m.parameters())), None)


def average_(tensors: list[Tensor], group: Any) -> None:
    """Average tensors over the ranks of a process group, in place."""
    buckets: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for t in tensors:
        buckets[t.device, t.dtype].append(t)
    for bucket in buckets.values():
        flat = torch.cat([t.reshape(-1) for t in bucket]).div_(group.size())
        dist.all_reduce(flat, group=group)
        pieces = flat.split([t.numel() for t in bucket])
        torch._foreach_copy_(bucket, [piece.view(t.shape) for piece, t in zip(pieces, bucket, strict=True)])


def mean(numbers: list[float], groups: Sequence[Any], device: torch.device | str) -> list[float]:
    """Return the means of numbers over the ranks of process groups, one group after another."""
    means = torch.tensor(numbers, dtype=torch.float64, device=device)
    for group in groups:
        dist.all_reduce(means, group=group)
        means /= group.size()
    return means.tolist()
