"""Lists of tensors: their layout in buckets, foreach operations with little memory traffic, and their memory."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from .undo import Undo

Scalar: TypeAlias = float | Tensor  # a number, or a 0-dim tensor on the same device
Sharding: TypeAlias = tuple[Any, Any] | None  # (mesh, placements) of a DTensor; None for an ordinary tensor
BucketedTensors: TypeAlias = list[list[Tensor]]  # the local, real tensors of each bucket of a Layout
CHUNK = 2**16  # entries per dot product: longer float32 sums lose digits


@dataclass(frozen=True)
class Bucket:
    """The indices of tensors with the same parameter group, device, dtype and sharding."""

    group: int
    device: torch.device
    dtype: torch.dtype
    sharding: Sharding
    indices: tuple[int, ...]

    @property
    def real_dtype(self) -> torch.dtype:
        """The type of the entries of vectors; complex tensors are viewed as real ones."""
        return self.dtype.to_real()

    @property
    def on_cpu(self) -> bool:
        """Whether the tensors are in the memory of the CPU."""
        return self.device.type == "cpu"


class Layout:
    """Tensors grouped into buckets that one ``torch._foreach_*`` call can process. Equal layouts can be combined."""

    def __init__(self, tensors: Sequence[Tensor], groups: Sequence[int] | None = None) -> None:
        indices: dict[tuple[int, torch.device, torch.dtype, Sharding], list[int]] = {}
        for i, t in enumerate(tensors):
            group = groups[i] if groups is not None else 0
            indices.setdefault((group, t.device, t.dtype, sharding(t)), []).append(i)
        self.size = len(tensors)
        self.buckets = [Bucket(*key, tuple(members)) for key, members in indices.items()]
        dtypes = {bucket.dtype for bucket in self.buckets}
        self.scalar_dtype = torch.float64 if dtypes & {torch.float64, torch.complex128} else torch.float32
        self.devices = {bucket.device for bucket in self.buckets}
        self.on_cpu = all(bucket.on_cpu for bucket in self.buckets)
        self.mesh = next((bucket.sharding[0] for bucket in self.buckets if bucket.sharding is not None), None)
        self.plain = self.mesh is None and not any(dtype.is_complex for dtype in dtypes)  # needs no views

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and self.buckets == other.buckets

    __hash__ = None  # type: ignore[assignment]

    def split(self, tensors: Sequence[Tensor]) -> BucketedTensors:
        """Return this rank's part of ``tensors``, bucket by bucket, as real tensors with the same storage."""
        parts = tensors if self.plain else [local(t) for t in tensors]
        return [[parts[i] for i in bucket.indices] for bucket in self.buckets]

    def join(self, tensors: BucketedTensors, like: Sequence[Tensor] | None = None) -> list[Tensor]:
        """Invert :meth:`split`: return one tensor per parameter, complex or sharded if the one in ``like`` is."""
        out: list[Tensor] = [torch.empty(0)] * self.size
        for bucket, in_bucket in zip(self.buckets, tensors, strict=True):
            for i, t in zip(bucket.indices, in_bucket, strict=True):
                out[i] = t
        return out if self.plain or like is None else [_like(p, t) for p, t in zip(like, out, strict=True)]

    def total(self, values: BucketedTensors, reduce: Callable[[Tensor], Tensor]) -> Tensor:
        """Reduce one scalar per tensor, with a sum or a norm, over tensors, devices and shards."""
        home = values[0][0].device
        gathered: dict[Sharding, list[Tensor]] = {}
        for bucket, scalars in zip(self.buckets, values, strict=True):
            gathered.setdefault(bucket.sharding, []).extend(t if t.device == home else t.to(home) for t in scalars)
        totals = {shards: reduce(torch.stack(scalars)) for shards, scalars in gathered.items()}
        if self.mesh is not None:
            totals = {shards: _over_ranks(t, shards, reduce) for shards, t in totals.items()}
        first, *others = totals.values()
        return reduce(torch.stack([first, *others])) if others else first


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return float32 for half precision, and other types as they are: a running mean in half precision stops moving.

    Example:
        >>> wide_dtype(torch.bfloat16), wide_dtype(torch.float64)
        (torch.float32, torch.float64)
    """
    return torch.promote_types(dtype, torch.float32)


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


def is_one(c: Scalar) -> bool:
    """Whether ``c`` is the number 1. False for tensors: reading one would synchronize."""
    return not isinstance(c, Tensor) and c == 1.0


def scaled(tensors: list[Tensor], c: Scalar) -> list[Tensor]:
    """Return the products with ``c``, in new memory."""
    if isinstance(c, Tensor) and tensors[0].dtype == torch.float16:  # on a GPU c would be cast, and may exceed float16
        return [(t.float() * c).half() for t in tensors]
    return list(torch._foreach_mul(tensors, c))


def dots(x: list[Tensor], y: list[Tensor], dtype: torch.dtype, on_cpu: bool) -> list[Tensor]:
    """Return the inner product of each pair of tensors."""
    if on_cpu:
        return [_dot(a, b, dtype) for a, b in zip(x, y, strict=True)]  # no memory for the products
    wide = [t.to(dtype) for t in x]  # in float16, products of small entries would be 0
    return [product.sum() for product in torch._foreach_mul(wide, y)]


def norms(x: list[Tensor], dtype: torch.dtype, on_cpu: bool) -> list[Tensor]:
    """Return the norm of each tensor."""
    if on_cpu:  # more accurate than float32 norms of large tensors
        return [product.sqrt() for product in dots(x, x, dtype, on_cpu)]
    return list(torch._foreach_norm(x, 2, dtype=dtype))


def add_scaled(y: list[Tensor], x: list[Tensor], c: Scalar) -> None:
    """Add ``c x`` to ``y``, in place."""
    if not isinstance(c, Tensor):
        torch._foreach_add_(y, x, alpha=c)
    elif y[0].is_cuda and y[0].dtype != torch.float64 and [t.stride() for t in y] == [t.stride() for t in x]:
        # _foreach_add_ cannot read alpha from the device. SGD's fused kernel reads lr from it (as float32) and needs no
        # memory for the product.
        torch._fused_sgd_(
            y, x, [], weight_decay=0.0, momentum=0.0, lr=c.float(), dampening=0.0, nesterov=False,
            maximize=True, is_first_step=False,
        )  # fmt: skip
    else:
        torch._foreach_add_(y, scaled(x, c))


def combined(parts: Sequence[tuple[list[Tensor], Scalar]], dtype: torch.dtype) -> list[Tensor]:
    """Return the sum of lists of tensors times coefficients; a single list with the factor 1 is not copied.

    The sum has this type, but if a list has another one, it is computed and returned in float32.
    """
    (first, c), *rest = parts
    if not rest and is_one(c):
        return first
    if any(x[0].dtype != dtype for x, _ in parts):
        return combined_wide(parts, dtype)
    sums = scaled(first, c)
    for x, c in rest:
        add_scaled(sums, x, c)
    return sums


def combined_wide(parts: Sequence[tuple[list[Tensor], Scalar]], dtype: torch.dtype) -> list[Tensor]:
    """Return the sum of lists of tensors times coefficients in new memory, in float32 instead of half precision."""
    sums: list[Tensor] = []
    for x, c in parts:
        products = scaled([t.to(wide_dtype(dtype)) for t in x], c)
        if sums:
            torch._foreach_add_(sums, products)
        else:
            sums = products
    return sums


def _dot(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    if not (a.is_contiguous() and b.is_contiguous()):  # channels_last, transposed: in the order of the first's memory
        order = sorted(range(a.dim()), key=a.stride, reverse=True)
        a, b = a.permute(order), b.permute(order)
    a, b = a.reshape(-1), b.reshape(-1)
    if a.numel() > CHUNK:
        chunks = zip(a.split(CHUNK), b.split(CHUNK), strict=True)
        return torch.stack([_dot(x, y, dtype) for x, y in chunks]).sum()
    return torch.dot(a, b) if a.dtype == b.dtype == dtype else torch.dot(a.to(dtype), b.to(dtype))


def clear_weight_caches() -> None:
    """Clear the caches of values computed from weights: autocast's casts, and those of ``parametrize.cached``."""
    torch.clear_autocast_cache()
    parametrize._cache.clear()


def is_writable(t: Tensor) -> bool:
    """Whether a tensor can be written in place: not if it is lazy, expanded, sparse, sharded or for inference only."""
    if is_lazy(t) or t.layout != torch.strided or t.is_inference() or sharding(t) is not None:
        return False
    return all(stride != 0 or n == 1 for n, stride in zip(t.shape, t.stride(), strict=True))


def copy(source: list[Tensor], into: list[Tensor]) -> None:
    """Copy tensors, without new versions, so that autograd graphs that saved them stay valid.

    ``into`` is resized if the shapes differ.
    """
    with _unsafe_preserve_version_counter(tuple(into)):
        if [t.shape for t in into] != [t.shape for t in source]:  # an observer learns its shape from the first batch
            for t, s in zip(into, source, strict=True):
                t.resize_(s.shape)
        torch._foreach_copy_(into, source)


class Memory:
    """The memory that tensors occupy, from the first to the last byte. Tensors without a storage have none.

    Example:
        >>> t = torch.zeros(4)
        >>> Memory([t[:2]]).overlaps(t[1:]), Memory([t[:2]]).overlaps(t[2:])
        (True, False)
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._ranges: dict[int, list[tuple[int, int]]] = defaultdict(list)  # by the address of the storage
        for t in tensors:
            self.add(t)

    def add(self, t: Tensor) -> None:
        """Add a tensor."""
        storage, start, end = _address(t)
        self._ranges[storage].append((start, end))

    def overlaps(self, t: Tensor) -> bool:
        """Whether a tensor shares memory with one of those added."""
        storage, start, end = _address(t)
        return any(start < other_end and other_start < end for other_start, other_end in self._ranges[storage])


def _address(t: Tensor) -> tuple[int, int, int]:
    """Return the address of the storage, and the first and last byte that the tensor uses."""
    try:
        t = local(t)
        storage, start = t.untyped_storage().data_ptr(), int(t.storage_offset()) * t.itemsize
        last = sum((n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True))
    except RuntimeError:  # sparse tensors, and subclasses that wrap others, such as quantized weights
        return 0, 0, 0
    return storage, start, start + (last + 1) * t.itemsize if t.numel() and storage else start


def use_other_memory(undo: Undo, tensors: Sequence[Tensor], others: Sequence[Tensor] | None = None) -> None:
    """Let tensors use the memory of ``others`` until ``undo``, by default new memory, whose entries are undefined."""
    others = [torch.empty_like(t) for t in tensors] if others is None else others
    undo.set_attributes((t, "data", other.data) for t, other in zip(tensors, others, strict=True))
