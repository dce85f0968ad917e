"""Vectors in weight space: one tensor per parameter, and linear combinations of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from ..common.errors import BsamRuntimeError
from .tensors import BucketedTensors, Layout, Scalar, dots, is_one, scale_, scaled, wide_dtype

TINY = 1e-12  # added to a norm before dividing by it


class PerGroup(tuple[Scalar, ...]):
    """One scalar per parameter group; multiplies a :class:`Vector` group by group."""


Coefficient: TypeAlias = Scalar | PerGroup


def ratio(a: Scalar, b: Scalar) -> Scalar:
    """Return ``a / b``, or 0 if ``b`` is 0.

    Example:
        >>> ratio(1.0, 4.0), ratio(1.0, 0.0)
        (0.25, 0.0)
        >>> ratio(torch.tensor(1.0), torch.tensor(0.0))
        tensor(0.)
    """
    if isinstance(b, Tensor):
        return torch.where(b == 0, b, a / b)
    return a / b if b != 0 else 0.0 * a


@dataclass(eq=False, slots=True)
class Term:
    """The stored entries of one term.

    With ``scratch``, evaluating a combination may overwrite them. Memory that is ``reused`` in the next step must never
    become ``p.grad``. Running means of half-precision parameters have float32 entries: sums with them are evaluated in
    float32, and rounded when they are added to the weights.
    """

    buckets: BucketedTensors
    scratch: bool = False
    reused: bool = False
    cached_norm: Tensor | None = None

    def norm(self, layout: Layout) -> Tensor:
        """Return the norm; it is computed only once."""
        if self.cached_norm is None:
            norms = []
            for tensors, bucket in zip(self.buckets, layout.buckets, strict=True):
                if bucket.device.type == "cpu":  # more accurate than float32 norms of large tensors
                    norms.append([product.sqrt() for product in dots(tensors, tensors, layout.scalar_dtype)])
                else:
                    norms.append(list(torch._foreach_norm(tensors, 2, dtype=layout.scalar_dtype)))
            self.cached_norm = layout.total(norms, torch.linalg.vector_norm)
        return self.cached_norm


class Vector:
    """A vector in weight space: a linear combination of stored terms, evaluated when its entries are needed.

    Args:
        tensors: one tensor per parameter; the vector shares their memory.
        layout: the buckets of the tensors; computed from them if not given.
        scratch: whether ``materialize_`` may overwrite the tensors.

    Example:
        >>> u = Vector([torch.tensor([3.0, 0.0]), torch.tensor([4.0])])
        >>> v = Vector([torch.tensor([1.0, 2.0]), torch.tensor([0.0])])
        >>> u.norm(), u.dot(v)
        (tensor(5.), tensor(3.))
        >>> (2 * u - v / 2).tensors()
        [tensor([ 5.5000, -1.0000]), tensor([8.])]
        >>> u.reject(v).dot(v)
        tensor(0.)
    """

    __slots__ = ("layout", "terms")

    def __init__(self, tensors: Iterable[Tensor], layout: Layout | None = None, *, scratch: bool = False) -> None:
        tensors = list(tensors)
        self.layout = layout if layout is not None else Layout(tensors)
        self.terms: dict[Term, Coefficient] = {Term(self.layout.split(tensors), scratch): 1.0}  # in order of appearance

    def _with(self, terms: dict[Term, Coefficient]) -> Vector:
        new = Vector.__new__(Vector)
        new.layout, new.terms = self.layout, terms
        return new

    # Algebra: these methods do not touch the entries.

    def __add__(self, other: Vector) -> Vector:
        if not isinstance(other, Vector):
            return NotImplemented
        if self.layout is not other.layout:
            self._check_like(other)
        terms = dict(self.terms)
        for term, c in other.terms.items():
            terms[term] = map_scalars(lambda a, b: a + b, terms[term], c) if term in terms else c
        return self._with(terms)

    def __mul__(self, c: Coefficient) -> Vector:
        if not isinstance(c, (int, float, Tensor, PerGroup)):
            return NotImplemented
        return self._with({term: map_scalars(_product, d, c) for term, d in self.terms.items()})

    __rmul__ = __mul__

    def __truediv__(self, c: Coefficient) -> Vector:
        return self * map_scalars(lambda a: 1.0 / a, c)

    def __neg__(self) -> Vector:
        return self * -1.0

    def __sub__(self, other: Vector) -> Vector:
        return self + -other if isinstance(other, Vector) else NotImplemented

    def _check_like(self, other: Vector) -> None:
        if self.layout != other.layout:
            raise BsamRuntimeError(
                "vectors of different parameters cannot be combined: their number, group, device or dtype differ"
            )

    # Operations on the entries.

    @torch.no_grad()
    def times(self, other: Vector) -> Vector:
        """Return the elementwise product, in new memory."""
        self._check_like(other)
        a, x = self._factored()
        b, y = other._factored()
        products = [list(torch._foreach_mul(s, t)) for s, t in zip(x.buckets, y.buckets, strict=True)]
        return self._with({Term(products, True): _product(a, b)})

    @torch.no_grad()
    def map(self, f: Callable[[int, Tensor], Tensor]) -> Vector:
        """Apply ``f(i, entries of parameter i)`` to every parameter; ``f`` returns new memory.

        ``f`` sees real, local tensors: a complex parameter as pairs in the last dimension, a sharded one as its shard.
        """
        buckets = zip(self.layout.buckets, self._narrow(self._evaluated()), strict=True)
        mapped = [[f(i, t) for i, t in zip(bucket.indices, tensors, strict=True)] for bucket, tensors in buckets]
        return self._with({Term(mapped, True): 1.0})

    @torch.no_grad()
    def norm(self) -> Tensor:
        """Return the global L2 norm, as a 0-dim tensor on the parameters' device."""
        (term, c), *rest = self.terms.items()
        if not rest and not isinstance(c, PerGroup):
            return term.norm(self.layout) if is_one(c) else (term.norm(self.layout) * c).abs()
        norm = self._norm_from_products() if self.layout.on_cpu else None
        return Term(self._evaluated()).norm(self.layout) if norm is None else norm

    def _norm_from_products(self) -> Tensor | None:
        """Compute ``|c B + d C|^2 = c^2 |B|^2 + 2 c d <B, C> + d^2 |C|^2``, without memory for the sum.

        Return None if the terms nearly cancel, which would lose digits. On the CPU this check needs no synchronization.
        """
        terms = [(term, c) for term, c in self.terms.items() if not isinstance(c, PerGroup)]
        if len(terms) < len(self.terms):
            return None
        squares = torch.stack([(term.norm(self.layout) * c) ** 2 for term, c in terms]).sum()
        mixed = [2 * c * d * self._product(a, b) for n, (a, c) in enumerate(terms) for b, d in terms[:n]]
        total = squares + torch.stack(mixed).sum()
        return total.sqrt() if total > 0.1 * squares else None

    def _product(self, a: Term, b: Term) -> Tensor:
        pairs = zip(a.buckets, b.buckets, strict=True)
        return self.layout.total([dots(x, y, self.layout.scalar_dtype) for x, y in pairs], torch.sum)

    @torch.no_grad()
    def dot(self, other: Vector) -> Tensor:
        """Return the inner product, for complex parameters its real part, as a 0-dim tensor on their device."""
        self._check_like(other)
        a, x = self._factored()
        b, y = other._factored()
        product = x.norm(self.layout) ** 2 if x is y else self._product(x, y)
        return product if is_one(a) and is_one(b) else product * a * b

    def _factored(self) -> tuple[Scalar, Term]:
        """Return a factor and entries whose product is this vector; several terms are summed."""
        (term, c), *rest = self.terms.items()
        if not rest and not isinstance(c, PerGroup):
            return c, term
        return 1.0, Term(self._evaluated())

    def reject(self, other: Vector) -> Vector:
        """Return the component of this vector orthogonal to ``other``."""
        return self - ratio(self.dot(other), other.norm() ** 2) * other

    def __repr__(self) -> str:
        sizes = [t.numel() for bucket in next(iter(self.terms)).buckets for t in bucket]
        return f"Vector({sum(sizes):,} entries in {len(sizes)} tensor(s))"

    def tensors(self, like: Sequence[Tensor] | None = None, *, wide: bool = False) -> list[Tensor]:
        """Return the entries in new tensors, one per parameter.

        They are real and local, unless ``like`` has complex or sharded tensors to match. With ``wide``, they are
        computed, and returned, in float32 instead of half precision.
        """
        buckets = self._wide_buckets() if wide else self._narrow(self._evaluated(copy=True))
        return self.layout.join(buckets, like)

    @torch.no_grad()
    def add_to(self, buckets: BucketedTensors, k: int) -> None:
        """Add bucket ``k`` of this vector to ``buckets[k]``, in place."""
        y = buckets[k]
        if any(term.buckets[k][0].dtype != y[0].dtype for term in self.terms):
            torch._foreach_add_(y, self._wide_bucket(k))
            return
        for term, coefficient in self.terms.items():
            x, c = term.buckets[k], self._coefficient(coefficient, k)
            if not isinstance(c, Tensor):
                torch._foreach_add_(y, x, alpha=c)
            elif y[0].is_cuda and y[0].dtype != torch.float64 and [t.stride() for t in y] == [t.stride() for t in x]:
                # _foreach_add_ cannot read alpha from the device. SGD's fused kernel reads lr from it (as float32) and
                # needs no memory for the product.
                torch._fused_sgd_(
                    y, x, [], weight_decay=0.0, momentum=0.0, lr=c.float(), dampening=0.0, nesterov=False,
                    maximize=True, is_first_step=False,
                )  # fmt: skip
            else:
                torch._foreach_add_(y, scaled(x, c))

    @torch.no_grad()
    def materialize_(self) -> BucketedTensors:
        """Return the entries, written over the first scratch term that is not reused; else in new memory."""
        target = next((term for term in self.terms if term.scratch and not term.reused), None)
        return self._narrow(self._evaluated(copy=True)) if target is None else self._written_over(target)

    @torch.no_grad()
    def evaluate_(self, *, copy: bool = False) -> Vector:
        """Return this vector as a single term, written over the first term if that is scratch: do not use it again.

        With ``copy``, the result is in new memory, and everything computed from it stays the same, bit for bit.
        """
        target = next(iter(self.terms))
        in_place = target.scratch and not copy
        buckets = self._written_over(target) if in_place else self._evaluated(copy=True)
        return self._with({Term(buckets, True, target.reused): 1.0})

    def _written_over(self, target: Term) -> BucketedTensors:
        rest = self._with({term: c for term, c in self.terms.items() if term is not target})
        for k in range(len(self.layout.buckets)):
            c = self._coefficient(self.terms[target], k)
            if not is_one(c):
                scale_(target.buckets[k], c)
            rest.add_to(target.buckets, k)
        target.cached_norm = None
        return target.buckets

    @torch.no_grad()
    def _evaluated(self, *, copy: bool = False) -> BucketedTensors:
        """Return the entries: without ``copy``, those of a single term with the factor 1 are not copied.

        They are in float32 if a term is.
        """
        (term, first), *rest = self.terms.items()
        if not rest and not copy and not isinstance(first, PerGroup) and is_one(first):
            return term.buckets
        others = self._with(dict(rest))
        buckets = []
        for k, bucket in enumerate(self.layout.buckets):
            if any(term.buckets[k][0].dtype != bucket.real_dtype for term in self.terms):
                buckets.append(self._wide_bucket(k))
                continue
            buckets.append(scaled(term.buckets[k], self._coefficient(first, k)))
            others.add_to(buckets, k)
        return buckets

    def _narrow(self, buckets: BucketedTensors) -> BucketedTensors:
        """Return the entries in the types of the parameters."""
        dtypes = (bucket.real_dtype for bucket in self.layout.buckets)
        pairs = zip(buckets, dtypes, strict=True)
        return [tensors if tensors[0].dtype == dtype else [t.to(dtype) for t in tensors] for tensors, dtype in pairs]

    def _wide_buckets(self) -> BucketedTensors:
        """Return the entries in new memory, in float32 instead of half precision."""
        narrow = [bucket.real_dtype.itemsize < 4 for bucket in self.layout.buckets]
        if not any(narrow):
            return self._evaluated(copy=True)
        return [self._wide_bucket(k) for k in range(len(narrow))]

    @torch.no_grad()
    def _wide_bucket(self, k: int) -> list[Tensor]:
        """Return the entries of bucket ``k`` in new memory, in float32 instead of half precision."""
        dtype = wide_dtype(self.layout.buckets[k].real_dtype)
        sums: list[Tensor] = []
        for term, coefficient in self.terms.items():
            wide = [t.to(dtype) for t in term.buckets[k]]
            products = scaled(wide, self._coefficient(coefficient, k))
            if sums:
                torch._foreach_add_(sums, products)
            else:
                sums = products
        return sums

    def _coefficient(self, c: Coefficient, k: int) -> Scalar:
        bucket = self.layout.buckets[k]
        factor = c[bucket.group] if isinstance(c, PerGroup) else c
        if isinstance(factor, Tensor):
            if bucket.device.type != "cpu":
                return factor.to(bucket.device)
            factor = factor.item()  # a number is cheaper, and item() does not wait
        # foreach operations convert a number to the type of the entries, which it may exceed, but not a 0-dim tensor
        return torch.tensor(factor, device=bucket.device) if abs(factor) > torch.finfo(bucket.dtype).max else factor


def map_scalars(op: Callable[..., Scalar], *coefficients: Coefficient) -> Coefficient:
    """Apply ``op`` to scalars; group by group if one of them is a :class:`PerGroup`."""
    groups = max((len(c) for c in coefficients if isinstance(c, PerGroup)), default=0)
    if not groups:
        return op(*coefficients)
    columns = (c if isinstance(c, PerGroup) else (c,) * groups for c in coefficients)
    return PerGroup(op(*row) for row in zip(*columns, strict=True))


def _product(a: Scalar, b: Scalar) -> Scalar:
    return b if is_one(a) else a if is_one(b) else a * b
