"""Vectors in weight space: one tensor per parameter, and linear combinations of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn, TypeAlias, cast

import torch
from torch import Tensor

from ..common.errors import BsamRuntimeError
from .tensors import (
    BucketedTensors,
    Layout,
    Scalar,
    add_scaled,
    combined,
    combined_wide,
    dots,
    is_one,
    norms,
    scaled,
)

TINY = 1e-12  # added to a norm before dividing by it
SLICE = 2**25  # bytes of a combination that are evaluated at a time where its entries are not all needed at once


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


BY_KEEP = "this vector was given up by keep=: list it, or a combination that contains it, in keep of that pass"
BY_STORE = "this vector was given up by L.store: list it, or a combination that contains it, among its arguments"
BY_MAP = "this vector was computed from one that map_ has overwritten: use map instead"
BY_RESTART = "this vector is from before L.restart(), which gives up the gradients of the passes so far"


class GivenUp:
    """Stands for the entries of a vector whose memory was given back."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def _raise(self, *_: object) -> NoReturn:
        raise BsamRuntimeError(self._reason)

    __iter__ = _raise
    __getitem__ = _raise
    __len__ = _raise


@dataclass(eq=False, slots=True, weakref_slot=True)
class Term:
    """The stored entries of one term.

    With ``scratch``, they belong to the step, which may overwrite them where nothing else needs them; ``stable``
    entries belong to the optimizer's state and stay the same during the step. Memory that is ``reused`` in the next
    step must never become ``p.grad``. What an observer reads is ``observed``, and not overwritten before the end of
    the step. Running means of half-precision parameters have float32 entries: sums with them are evaluated in float32,
    and rounded when they are added to the weights.
    """

    buckets: BucketedTensors
    scratch: bool = False
    stable: bool = False
    reused: bool = False
    observed: bool = False
    cached_norm: Tensor | None = None

    def norm(self, layout: Layout) -> Tensor:
        """Return the norm; it is computed only once."""
        if self.cached_norm is None:
            pairs = zip(self.buckets, layout.buckets, strict=True)
            each = [norms(tensors, layout.scalar_dtype, bucket.on_cpu) for tensors, bucket in pairs]
            self.cached_norm = layout.total(each, torch.linalg.vector_norm)
        return self.cached_norm

    def give_up(self, reason: str) -> None:
        """Free the entries: using them raises an error with this reason from now on."""
        self.buckets = cast(BucketedTensors, GivenUp(reason))

    @property
    def is_given_up(self) -> bool:
        """Whether the entries were freed."""
        return isinstance(self.buckets, GivenUp)


class Vector:
    """A vector in weight space: a linear combination of stored terms, evaluated when its entries are needed.

    Args:
        tensors: one tensor per parameter; the vector shares their memory.
        layout: the buckets of the tensors; computed from them if not given.
        scratch: whether the step may overwrite the tensors.
        stable: whether the tensors keep their values during the step.

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

    def __init__(
        self, tensors: Iterable[Tensor], layout: Layout | None = None, *, scratch: bool = False, stable: bool = False
    ) -> None:
        tensors = list(tensors)
        self.layout = layout if layout is not None else Layout(tensors)
        term = Term(self.layout.split(tensors), scratch, stable)
        self.terms: dict[Term, Coefficient] = {term: 1.0}  # in order of appearance

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
        products = []
        for k, bucket in enumerate(self.layout.buckets):
            factors = [combined(v._parts(k), bucket.real_dtype) for v in (x, y)]
            products.append(list(torch._foreach_mul(*factors)))
        return self._with({Term(products, True): _product(a, b)})

    def observe(self) -> None:
        """Note that an observer reads the entries at the end of the step."""
        for term in self.terms:
            term.observed = True

    def copy(self) -> Vector:
        """Return this vector in new memory, which the step may overwrite."""
        return Vector(self.tensors(), self.layout, scratch=True)

    @torch.no_grad()
    def map(self, f: Callable[..., Tensor], *others: Vector) -> Vector:
        """Apply ``f(i, entries of parameter i)`` to every parameter; ``f`` returns new memory.

        ``f`` sees real, local tensors: a complex parameter as pairs in the last dimension, a sharded one as its shard.
        The entries of ``others`` follow as further arguments.
        """
        mapped = [list(self._mapped(f, others, k)) for k in range(len(self.layout.buckets))]
        return self._with({Term(mapped, True): 1.0})

    @torch.no_grad()
    def map_(self, f: Callable[..., Tensor], *others: Vector) -> Vector:
        """Apply ``f`` as :meth:`map` does, in the memory of this vector if it is a gradient that nobody observes.

        Vectors that were computed from it lazily can no longer be used.
        """
        (term, *rest) = self.terms
        if rest or not term.scratch or term.observed:
            self.terms = self.map(f, *others).terms
            return self
        for k, old in enumerate(term.buckets):
            for t, new in zip(old, self._mapped(f, others, k), strict=True):
                t.copy_(new)
        self.terms = {Term(term.buckets, True, reused=term.reused): 1.0}
        term.give_up(BY_MAP)
        return self

    def _mapped(self, f: Callable[..., Tensor], others: Sequence[Vector], k: int) -> Iterator[Tensor]:
        """Apply ``f`` to the parameters of bucket ``k``, one after the other."""
        indices = iter(self.layout.buckets[k].indices)
        for other in others:
            self._check_like(other)
        for slices in zip(self._slices(k), *(other._slices(k) for other in others), strict=True):
            for entries in zip(*(self._narrow_bucket(x, k) for x in slices), strict=True):
                yield f(next(indices), *entries)

    @torch.no_grad()
    def norm(self) -> Tensor:
        """Return the global L2 norm, as a 0-dim tensor on the parameters' device."""
        (term, c), *rest = self.terms.items()
        if not rest and not isinstance(c, PerGroup):
            return term.norm(self.layout) if is_one(c) else (term.norm(self.layout) * c).abs()
        norm = self._norm_from_products() if self.layout.on_cpu else None
        if norm is not None:
            return norm
        dtype = self.layout.scalar_dtype
        each = [
            [n for x in self._slices(k) for n in norms(x, dtype, bucket.on_cpu)]
            for k, bucket in enumerate(self.layout.buckets)
        ]
        return self.layout.total(each, torch.linalg.vector_norm)

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
        return self._with({a: 1.0})._dot(self._with({b: 1.0}))

    def _dot(self, other: Vector) -> Tensor:
        each = []
        for k, bucket in enumerate(self.layout.buckets):
            pairs = zip(self._slices(k), other._slices(k), strict=True)
            each.append([p for x, y in pairs for p in dots(x, y, self.layout.scalar_dtype, bucket.on_cpu)])
        return self.layout.total(each, torch.sum)

    @torch.no_grad()
    def dot(self, other: Vector) -> Tensor:
        """Return the inner product, for complex parameters its real part, as a 0-dim tensor on their device."""
        self._check_like(other)
        a, x = self._factored()
        b, y = other._factored()
        product = x.norm() ** 2 if x.is_term and x.terms.keys() == y.terms.keys() else x._dot(y)
        return product if is_one(a) and is_one(b) else product * a * b

    @property
    def is_term(self) -> bool:
        """Whether the vector is a single term with the factor 1."""
        (c, *rest) = self.terms.values()
        return not rest and not isinstance(c, PerGroup) and is_one(c)

    @property
    def is_mixed(self) -> bool:
        """Whether a term has another type of entries than the parameters."""
        pairs = [pair for term in self.terms for pair in zip(term.buckets, self.layout.buckets, strict=True)]
        return any(tensors[0].dtype != bucket.real_dtype for tensors, bucket in pairs)

    def _factored(self) -> tuple[Scalar, Vector]:
        """Return a factor and a vector whose product is this vector: a single term without its factor."""
        (term, c), *rest = self.terms.items()
        return (1.0, self) if rest or isinstance(c, PerGroup) else (c, self._with({term: 1.0}))

    def _parts(self, k: int) -> list[tuple[list[Tensor], Scalar]]:
        """Return the entries of bucket ``k`` of each term, with their coefficients."""
        return [(term.buckets[k], self._coefficient(c, k)) for term, c in self.terms.items()]

    def _slices(self, k: int) -> Iterator[list[Tensor]]:
        """Evaluate bucket ``k`` a few tensors at a time, so that little temporary memory is needed."""
        return (combined(parts, self.layout.buckets[k].real_dtype) for parts in self._parts_of_slices(k))

    def _wide_slices(self, k: int) -> Iterator[list[Tensor]]:
        """Evaluate bucket ``k`` like :meth:`_slices`, in new memory and in float32 instead of half precision."""
        return (combined_wide(parts, self.layout.buckets[k].real_dtype) for parts in self._parts_of_slices(k))

    def _parts_of_slices(self, k: int) -> Iterator[list[tuple[list[Tensor], Scalar]]]:
        parts = self._parts(k)
        itemsize = self.layout.buckets[k].real_dtype.itemsize
        sizes = [t.numel() * itemsize for t in parts[0][0]]
        start = 0
        while start < len(sizes):
            stop = start + 1
            size = sizes[start]
            while stop < len(sizes) and size + sizes[stop] <= SLICE:
                size += sizes[stop]
                stop += 1
            yield [(x[start:stop], c) for x, c in parts]
            start = stop

    def reject(self, other: Vector) -> Vector:
        """Return the component of this vector orthogonal to ``other``."""
        return self - ratio(self.dot(other), other.norm() ** 2) * other

    def __repr__(self) -> str:
        if any(term.is_given_up for term in self.terms):
            return "Vector(given up)"
        sizes = [t.numel() for bucket in next(iter(self.terms)).buckets for t in bucket]
        return f"Vector({sum(sizes):,} entries in {len(sizes)} tensor(s))"

    def tensors(self, like: Sequence[Tensor] | None = None, *, wide: bool = False) -> list[Tensor]:
        """Return the entries in new tensors, one per parameter.

        They are real and local, unless ``like`` has complex or sharded tensors to match. With ``wide``, they are
        computed, and returned, in float32 instead of half precision.
        """
        buckets = self._wide_buckets() if wide else self._narrow(self._evaluated())
        return self.layout.join(buckets, like)

    def entries(self, like: Sequence[Tensor]) -> list[Tensor]:
        """Return the memory of this vector, a single term with the factor 1, as one tensor per parameter."""
        (term,) = self.terms
        return self.layout.join(term.buckets, like)

    @torch.no_grad()
    def add_to(self, buckets: BucketedTensors, k: int) -> None:
        """Add bucket ``k`` of this vector to ``buckets[k]``, in place."""
        y = buckets[k]
        parts = self._parts(k)
        if any(x[0].dtype != y[0].dtype for x, _ in parts):
            start = 0
            for x in self._wide_slices(k):
                torch._foreach_add_(y[start : start + len(x)], x)
                start += len(x)
            return
        for x, c in parts:
            add_scaled(y, x, c)

    @torch.no_grad()
    def materialize_(self) -> BucketedTensors:
        """Return the entries, written over the first scratch term that is not reused; else in new memory."""
        target = next((term for term in self.terms if term.scratch and not term.reused), None)
        return self._narrow(self._evaluated()) if target is None else self._written_over(target)

    @torch.no_grad()
    def store_(self, target: Term | None) -> None:
        """Make this vector a single term with the factor 1, written over ``target`` if given, else in new memory.

        ``target`` is a term of this vector that nothing else needs: it is given up. If it is observed, the result is in
        new memory, but everything computed from it is the same, bit for bit.
        """
        if target is None or target.observed:
            reused = target is not None and target.reused
            self.terms = {Term(self._evaluated(), True, reused=reused): 1.0}
            return
        first, c = next(iter(self.terms.items()))
        if target is first and not isinstance(c, PerGroup) and is_one(c):
            self._written_over(target)
        else:  # the sum begins with something else
            for k, bucket in enumerate(target.buckets):
                start = 0
                for x in self._slices(k):
                    torch._foreach_copy_(bucket[start : start + len(x)], x)
                    start += len(x)
        self.terms = {Term(target.buckets, True, reused=target.reused): 1.0}
        target.give_up(BY_KEEP)

    def _written_over(self, target: Term) -> BucketedTensors:
        rest = self._with({term: c for term, c in self.terms.items() if term is not target})
        for k in range(len(self.layout.buckets)):
            c = self._coefficient(self.terms[target], k)
            if self.layout.buckets[k].dtype == torch.float16:
                torch._foreach_copy_(target.buckets[k], scaled(target.buckets[k], c))
            elif not is_one(c):
                torch._foreach_mul_(target.buckets[k], c)
            rest.add_to(target.buckets, k)
        target.cached_norm = None
        return target.buckets

    @torch.no_grad()
    def _evaluated(self) -> BucketedTensors:
        """Return the entries in new memory; in float32 if a term is."""
        buckets = []
        for k, bucket in enumerate(self.layout.buckets):
            parts = self._parts(k)
            x = combined(parts, bucket.real_dtype)
            buckets.append([t.clone() for t in x] if x is parts[0][0] else x)
        return buckets

    def _narrow_bucket(self, tensors: list[Tensor], k: int) -> list[Tensor]:
        """Return entries of bucket ``k`` in the type of its parameters."""
        dtype = self.layout.buckets[k].real_dtype
        return tensors if tensors[0].dtype == dtype else [t.to(dtype) for t in tensors]

    def _narrow(self, buckets: BucketedTensors) -> BucketedTensors:
        return [self._narrow_bucket(tensors, k) for k, tensors in enumerate(buckets)]

    def _wide_buckets(self) -> BucketedTensors:
        """Return the entries in new memory, in float32 instead of half precision."""
        if all(bucket.real_dtype.itemsize >= 4 for bucket in self.layout.buckets):
            return self._evaluated()
        with torch.no_grad():
            return [[t for x in self._wide_slices(k) for t in x] for k in range(len(self.layout.buckets))]

    def _coefficient(self, c: Coefficient, k: int) -> Scalar:
        bucket = self.layout.buckets[k]
        factor = c[bucket.group] if isinstance(c, PerGroup) else c
        if isinstance(factor, Tensor):
            if bucket.device.type != "cpu":
                return factor.to(bucket.device)
            factor = factor.item()  # a number is cheaper, and item() does not wait
        # foreach operations convert a number to the type of the entries, which it may exceed, but not a 0-dim tensor
        return torch.tensor(factor, device=bucket.device) if abs(factor) > torch.finfo(bucket.dtype).max else factor


@torch.no_grad()
def store(wanted: Collection[Vector], others: Collection[Vector] = (), *, over_reused: bool = False) -> None:
    """Give each of these vectors memory of its own: a single term with the factor 1 that no other vector needs.

    If possible, it is the memory of one of its terms. The vectors in ``others`` are needed, too. Memory that is reused
    in the next step is overwritten only with ``over_reused``.
    """
    while True:
        needed = Counter(term for v in dict.fromkeys([*wanted, *others]) for term in v.terms)
        usable = {t for t, n in needed.items() if n == 1 and t.scratch and (over_reused or not t.reused)}
        pending = [v for v in wanted if not (v.is_term and usable.issuperset(v.terms))]
        if not pending:
            return
        free = [(v, term) for v in pending for term in v.terms if term in usable]
        v, target = free[0] if free else (pending[0], None)
        v.store_(None if v.is_mixed else target)


def map_scalars(op: Callable[..., Scalar], *coefficients: Coefficient) -> Coefficient:
    """Apply ``op`` to scalars; group by group if one of them is a :class:`PerGroup`."""
    groups = max((len(c) for c in coefficients if isinstance(c, PerGroup)), default=0)
    if not groups:
        return op(*coefficients)
    columns = (c if isinstance(c, PerGroup) else (c,) * groups for c in coefficients)
    return PerGroup(op(*row) for row in zip(*columns, strict=True))


def _product(a: Scalar, b: Scalar) -> Scalar:
    return b if is_one(a) else a if is_one(b) else a * b
