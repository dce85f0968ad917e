"""Arithmetic on "one tensor per parameter".

A sharpness-aware method is a few lines of algebra on vectors in weight space, and weight space is large: what costs
there is memory traffic and fresh memory. A :class:`Vector` therefore keeps ``g + g_max - r * g_min`` as it was written,
a linear combination, and evaluates it once, in place where nobody needs the old entries. Norms and ratios never leave
their device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from .errors import BsamRuntimeError
from .foreach import Scalar, axpy_, combined, dots, is_one, norms, scale_
from .layout import Buckets, Layout

TINY = 1e-12  # added to a norm that divides


class PerGroup(tuple[Scalar, ...]):
    """One scalar per parameter group; multiplies a :class:`Vector` group by group."""


Coefficient: TypeAlias = Scalar | PerGroup


def ratio(a: Scalar, b: Scalar) -> Scalar:
    """``a / b``, and 0 where ``b`` is 0.

    Example:
        >>> ratio(1.0, 4.0), ratio(1.0, 0.0)
        (0.25, 0.0)
        >>> ratio(torch.tensor(1.0), torch.tensor(0.0))
        tensor(0.)
    """
    if isinstance(b, Tensor):
        return torch.where(b == 0, b, a / b)
    return a / b if b != 0 else 0.0 * a


class Term:
    """Stored entries. ``scratch``: nobody needs them any more once the combination they are part of is evaluated."""

    __slots__ = ("_norm", "parts", "scratch")

    def __init__(self, parts: Buckets, scratch: bool) -> None:
        self.parts, self.scratch = parts, scratch
        self._norm: Tensor | None = None

    def norm(self, layout: Layout) -> Tensor:
        """The norm, computed once."""
        if self._norm is None:
            self._norm = _norm(self.parts, layout)
        return self._norm

    def keep_in(self, parts: Buckets) -> None:
        """Move the entries into memory that outlives this step."""
        for mine, kept in zip(self.parts, parts, strict=True):
            torch._foreach_copy_(kept, mine)
        self.parts, self.scratch = parts, False


class Vector:
    """A vector in weight space: a linear combination of stored blocks, evaluated when its entries are needed.

    Args:
        tensors: one tensor per parameter; the vector refers to them and copies nothing.
        layout: how they are layout into parts (found from the tensors if not given).
        scratch: whether the tensors may be overwritten when :meth:`materialize_` uses them for the last time.

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
        self.terms: dict[Term, Coefficient] = {
            Term(self.layout.split(tensors), scratch): 1.0
        }  # in the order in which they were written

    def _with(self, terms: dict[Term, Coefficient]) -> Vector:
        new = Vector.__new__(Vector)
        new.layout, new.terms = self.layout, terms
        return new

    # Algebra: nothing here touches an entry.

    def __add__(self, other: Vector) -> Vector:
        if not isinstance(other, Vector):
            return NotImplemented
        self._check_like(other)
        terms = dict(self.terms)
        for block, c in other.terms.items():
            terms[block] = each(lambda a, b: a + b, terms[block], c) if block in terms else c
        return self._with(terms)

    def __mul__(self, c: Coefficient) -> Vector:
        if not isinstance(c, (int, float, Tensor, PerGroup)):
            return NotImplemented
        return self._with({block: each(_product, own, c) for block, own in self.terms.items()})

    __rmul__ = __mul__

    def __truediv__(self, c: Coefficient) -> Vector:
        return self * each(lambda a: 1.0 / a, c)

    def __neg__(self) -> Vector:
        return self * -1.0

    def __sub__(self, other: Vector) -> Vector:
        return self + -other if isinstance(other, Vector) else NotImplemented

    def _check_like(self, other: Vector) -> None:
        if self.layout != other.layout:
            raise BsamRuntimeError(
                "these two vectors belong to different parameters: their tensors differ in number, group, device or "
                "dtype"
            )

    # What needs the entries.

    @torch.no_grad()
    def times(self, other: Vector) -> Vector:
        """The product entry by entry, in new memory.

        Example:
            >>> Vector([torch.tensor([3.0, 4.0])]).times(Vector([torch.tensor([2.0, -1.0])])).tensors()
            [tensor([ 6., -4.])]
        """
        self._check_like(other)
        a, x = self._factored()
        b, y = other._factored()
        return self._with(
            {
                Term([list(torch._foreach_mul(s, t)) for s, t in zip(x.parts, y.parts, strict=True)], True): _product(
                    a, b
                )
            }
        )

    @torch.no_grad()
    def map(self, f: Callable[[int, Tensor], Tensor]) -> Vector:
        """``f(i, entries of parameter i)`` for every parameter; ``f`` returns new memory.

        Entries are real and those of this rank: a complex parameter shows a last dimension of two, a sharded one its
            shard.

        Example:
            >>> Vector([torch.tensor([-3.0, 1.0])]).map(lambda i, t: t.abs()).tensors()
            [tensor([3., 1.])]
        """
        parts = zip(self.layout.parts, self._evaluated(), strict=True)
        return self._with(
            {
                Term(
                    [[f(i, t) for i, t in zip(part.indices, tensors, strict=True)] for part, tensors in parts], True
                ): 1.0
            }
        )

    @torch.no_grad()
    def norm(self) -> Tensor:
        """The global L2 norm, on its device."""
        (block, c), *rest = self.terms.items()
        if not rest and not isinstance(c, PerGroup):
            return block.norm(self.layout) if is_one(c) else (block.norm(self.layout) * c).abs()
        found = self._norm_from_products() if self.layout.on_cpu else None
        if found is not None:
            return found
        if isinstance(c, (int, float)) and c != 0:  # |c B + d C| = |c| |B + d/c C|: one operation less on every entry
            shares = {other: each(lambda d: d / c, d) for other, d in rest}
            return _norm(self._with({block: 1.0, **shares})._evaluated(), self.layout) * abs(c)
        return _norm(self._evaluated(), self.layout)

    def _norm_from_products(self) -> Tensor | None:
        """``|c B + d C|^2 = c^2 |B|^2 + 2 c d <B, C> + d^2 |C|^2``: no sum is stored, and |B| and |C| are mostly known.

        None where the terms nearly cancel, and digits with them. To look at that costs nothing on the CPU.
        """
        terms = [(block, c) for block, c in self.terms.items() if not isinstance(c, PerGroup)]
        if len(terms) < len(self.terms):
            return None
        squares = torch.stack([(block.norm(self.layout) * c) ** 2 for block, c in terms]).sum()
        mixed = [
            2 * c * d * self._product(block, other) for n, (block, c) in enumerate(terms) for other, d in terms[:n]
        ]
        total = squares + torch.stack(mixed).sum()
        return total.sqrt() if total > 0.01 * squares else None

    def _product(self, a: Term, b: Term) -> Tensor:
        pairs = zip(a.parts, b.parts, strict=True)
        return self.layout.total([dots(x, y, self.layout.scalar_dtype) for x, y in pairs], torch.sum)

    @torch.no_grad()
    def dot(self, other: Vector) -> Tensor:
        """The inner product (the real part of it, for complex parameters), on its device."""
        self._check_like(other)
        a, x = self._factored()
        b, y = other._factored()
        found = x.norm(self.layout) ** 2 if x is y else self._product(x, y)
        return found if is_one(a) and is_one(b) else found * a * b

    def _factored(self) -> tuple[Scalar, Term]:
        """A number and the entries that it multiplies: one stored block as it is, several added up."""
        (block, c), *rest = self.terms.items()
        if not rest and not isinstance(c, PerGroup):
            return c, block
        return 1.0, Term(self._evaluated(), False)

    def reject(self, other: Vector) -> Vector:
        """What is left of this vector without its component along ``other``."""
        return self - ratio(self.dot(other), other.norm() ** 2) * other

    def tensors(self, like: Sequence[Tensor] | None = None) -> list[Tensor]:
        """The entries in new tensors, one per parameter; complex and sharded ones as ``like`` has them, if given, else
        real and local.
        """
        return self.layout.join(self._evaluated(copy=True), like)

    @torch.no_grad()
    def add_to(self, parts: Buckets, k: int) -> None:
        """Add part ``k`` of this vector to ``parts[k]``, in place."""
        for block, c in self.terms.items():
            axpy_(parts[k], self._coefficient(c, k), block.parts[k])

    @torch.no_grad()
    def materialize_(self) -> Buckets:
        """The entries, part by part: in place of the first scratch block of this combination, which is used up; in new
        memory if there is none.
        """
        target = next((block for block in self.terms if block.scratch), None)
        if target is None:
            return self._evaluated(copy=True)
        rest = self._with({block: c for block, c in self.terms.items() if block is not target})
        for k in range(len(self.layout.parts)):
            scale_(target.parts[k], self._coefficient(self.terms[target], k))
            rest.add_to(target.parts, k)
        target._norm = None
        return target.parts

    @torch.no_grad()
    def _evaluated(self, *, copy: bool = False) -> Buckets:
        """The entries: where they are stored, if that is all there is to it and no copy is asked for; else in new
        memory.
        """
        (block, first), *rest = self.terms.items()
        if not rest and not copy and not isinstance(first, PerGroup) and is_one(first):
            return block.parts
        terms = self.terms.items()
        return [
            combined([(self._coefficient(c, k), block.parts[k]) for block, c in terms])
            for k in range(len(self.layout.parts))
        ]

    def _coefficient(self, c: Coefficient, k: int) -> Scalar:
        part = self.layout.parts[k]
        own = c[part.group] if isinstance(c, PerGroup) else c
        if not isinstance(own, Tensor):
            return own
        return (
            own.item() if part.device.type == "cpu" else own.to(part.device)
        )  # on the CPU a number is cheaper, and nothing waits


def each(op: Callable[..., Scalar], *coefficients: Coefficient) -> Coefficient:
    """``op`` on scalars, group by group as soon as one of them differs between groups."""
    groups = max((len(c) for c in coefficients if isinstance(c, PerGroup)), default=0)
    if not groups:
        return op(*coefficients)
    columns = (c if isinstance(c, PerGroup) else (c,) * groups for c in coefficients)
    return PerGroup(op(*row) for row in zip(*columns, strict=True))


def _product(a: Scalar, b: Scalar) -> Scalar:
    return b if is_one(a) else a if is_one(b) else a * b


def _norm(parts: Buckets, layout: Layout) -> Tensor:
    return layout.total([norms(part, layout.scalar_dtype) for part in parts], torch.linalg.vector_norm)
