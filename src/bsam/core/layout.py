"""Grouping tensors into buckets that a single ``torch._foreach_*`` call can process."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

Sharding: TypeAlias = tuple[Any, Any] | None  # (mesh, placements) of a DTensor; None for an ordinary tensor
BucketedTensors: TypeAlias = list[list[Tensor]]  # the local, real tensors of each bucket of a Layout


@dataclass(frozen=True)
class Bucket:
    """The indices of tensors with the same parameter group, device, dtype and sharding."""

    group: int
    device: torch.device
    dtype: torch.dtype
    sharding: Sharding
    indices: tuple[int, ...]

    @property
    def plain(self) -> bool:
        """Whether the tensors are real and not sharded, so that they need no view."""
        return self.sharding is None and not self.dtype.is_complex


class Layout:
    """The buckets of a list of tensors. Vectors of equal layouts can be combined."""

    def __init__(self, tensors: Sequence[Tensor], groups: Sequence[int] | None = None) -> None:
        indices: dict[tuple[int, torch.device, torch.dtype, Sharding], list[int]] = {}
        for i, t in enumerate(tensors):
            group = groups[i] if groups is not None else 0
            indices.setdefault((group, t.device, t.dtype, sharding(t)), []).append(i)
        self.size = len(tensors)
        self.buckets = [Bucket(*key, tuple(members)) for key, members in indices.items()]
        wide = any(bucket.dtype in (torch.float64, torch.complex128) for bucket in self.buckets)
        self.scalar_dtype = torch.float64 if wide else torch.float32
        self.devices = {bucket.device for bucket in self.buckets}
        self.on_cpu = all(device.type == "cpu" for device in self.devices)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Layout) and self.buckets == other.buckets)

    __hash__ = None  # type: ignore[assignment]

    def split(self, tensors: Sequence[Tensor]) -> BucketedTensors:
        """Return this rank's part of ``tensors``, bucket by bucket, as real tensors with the same storage."""
        return [
            [tensors[i] for i in bucket.indices] if bucket.plain else [local(tensors[i]) for i in bucket.indices]
            for bucket in self.buckets
        ]

    def join(self, tensors: BucketedTensors, like: Sequence[Tensor] | None = None) -> list[Tensor]:
        """Invert :meth:`split`: return one tensor per parameter, complex or sharded if the one in ``like`` is."""
        out: list[Tensor] = [torch.empty(0)] * self.size
        for bucket, in_bucket in zip(self.buckets, tensors, strict=True):
            as_is = bucket.plain or like is None
            for i, t in zip(bucket.indices, in_bucket, strict=True):
                out[i] = t if as_is else _like(like[i], t)  # type: ignore[index]
        return out

    def total(self, values: BucketedTensors, reduce: Callable[[Tensor], Tensor]) -> Tensor:
        """Reduce one scalar per tensor, with a sum or a norm, over tensors, devices and shards."""
        home = values[0][0].device
        gathered: dict[Sharding, list[Tensor]] = {}
        for bucket, scalars in zip(self.buckets, values, strict=True):
            gathered.setdefault(bucket.sharding, []).extend(t if t.device == home else t.to(home) for t in scalars)
        totals = [_over_ranks(reduce(torch.stack(scalars)), shards, reduce) for shards, scalars in gathered.items()]
        return totals[0] if len(totals) == 1 else reduce(torch.stack(totals))


def sharding(t: Tensor) -> Sharding:
    """Return the mesh and placements of a DTensor; None for an ordinary tensor."""
    module = sys.modules.get("torch.distributed.tensor")  # without this import there are no DTensors
    return (t.device_mesh, t.placements) if module is not None and isinstance(t, module.DTensor) else None


def local(t: Tensor) -> Tensor:
    """Return this rank's part of ``t`` as a real tensor with the same storage."""
    if sharding(t) is not None:
        t = t.to_local()  # type: ignore[attr-defined]
    return torch.view_as_real(t) if t.is_complex() else t


def _like(t: Tensor, real: Tensor) -> Tensor:
    """Invert :func:`local`: view ``real`` as complex or sharded, as ``t`` is."""
    part = torch.view_as_complex(real) if t.is_complex() else real
    shards = sharding(t)
    if shards is None:
        return part
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(part, *shards, run_check=False, shape=t.shape, stride=t.stride())


def _over_ranks(value: Tensor, shards: Sharding, reduce: Callable[[Tensor], Tensor]) -> Tensor:
    if shards is None:
        return value
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh, placements = shards
    spread = [Shard(0) if placement.is_shard() else Replicate() for placement in placements]
    return reduce(DTensor.from_local(value.reshape(1), mesh, spread, run_check=False).full_tensor())
