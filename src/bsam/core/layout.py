"""How a list of parameters is layout into parts that one ``torch._foreach_*`` call can take."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

Sharding: TypeAlias = tuple[Any, Any] | None  # (mesh, placements) of a DTensor; None for an ordinary tensor
Buckets: TypeAlias = list[list[Tensor]]


@dataclass(frozen=True)
class Bucket:
    """Tensors of one parameter group, device, dtype and sharding, by their place in the list of parameters."""

    group: int
    device: torch.device
    dtype: torch.dtype
    sharding: Sharding
    indices: tuple[int, ...]

    @property
    def plain(self) -> bool:
        """Whether its tensors are real and whole, as nearly all are: they then need no view."""
        return self.sharding is None and not self.dtype.is_complex


class Layout:
    """A list of parameters, layout into parts. Vectors of equal cuts can be combined."""

    def __init__(self, tensors: Sequence[Tensor], groups: Sequence[int] | None = None) -> None:
        indices: dict[tuple[int, torch.device, torch.dtype, Sharding], list[int]] = {}
        for i, t in enumerate(tensors):
            indices.setdefault((groups[i] if groups is not None else 0, t.device, t.dtype, sharding(t)), []).append(i)
        self.size = len(tensors)
        self.parts = [Bucket(*key, tuple(places)) for key, places in indices.items()]
        wide = any(part.dtype in (torch.float64, torch.complex128) for part in self.parts)
        self.scalar_dtype = torch.float64 if wide else torch.float32
        self.devices = {part.device for part in self.parts}
        self.on_cpu = all(device.type == "cpu" for device in self.devices)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Layout) and self.parts == other.parts)

    __hash__ = None  # type: ignore[assignment]

    def split(self, tensors: Sequence[Tensor]) -> Buckets:
        """Bucket by part, what of ``tensors`` is on this rank, as real tensors of the same storage."""
        pieces = ([tensors[i] for i in part.indices] for part in self.parts)
        return [
            piece if part.plain else [local(t) for t in piece] for part, piece in zip(self.parts, pieces, strict=True)
        ]

    def join(self, parts: Buckets, like: Sequence[Tensor] | None = None) -> list[Tensor]:
        """The inverse of :meth:`split`: one tensor per parameter; complex and sharded ones as ``like`` has them, if
        given, else as they are.
        """
        out: list[Tensor] = [torch.empty(0)] * self.size
        for part, tensors in zip(self.parts, parts, strict=True):
            as_is = part.plain or like is None
            for i, t in zip(part.indices, tensors, strict=True):
                out[i] = t if as_is else _like(like[i], t)  # type: ignore[index]
        return out

    def total(self, values: Buckets, reduce: Callable[[Tensor], Tensor]) -> Tensor:
        """One number from one scalar per tensor, part by part: ``reduce`` (a sum or a norm) over tensors, devices and,
        for sharded parts, ranks.
        """
        home = values[0][0].device
        gathered: dict[Sharding, list[Tensor]] = {}
        for part, scalars in zip(self.parts, values, strict=True):
            gathered.setdefault(part.sharding, []).extend(t if t.device == home else t.to(home) for t in scalars)
        totals = [_over_ranks(reduce(torch.stack(scalars)), shards, reduce) for shards, scalars in gathered.items()]
        return totals[0] if len(totals) == 1 else reduce(torch.stack(totals))


def sharding(t: Tensor) -> Sharding:
    """Mesh and placements of a DTensor, None for an ordinary tensor."""
    module = sys.modules.get("torch.distributed.tensor")  # a DTensor cannot exist before this was imported
    return (t.device_mesh, t.placements) if module is not None and isinstance(t, module.DTensor) else None


def local(t: Tensor) -> Tensor:
    """The real tensor on this rank that shares the storage of ``t``."""
    if sharding(t) is not None:
        t = t.to_local()  # type: ignore[attr-defined]
    return torch.view_as_real(t) if t.is_complex() else t


def _like(t: Tensor, part: Tensor) -> Tensor:
    """The inverse of :func:`local`: ``part`` as a tensor of the kind of ``t``."""
    part = torch.view_as_complex(part) if t.is_complex() else part
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
