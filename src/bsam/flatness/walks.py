"""Whether data gives the same samples each time it is walked."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..core.refusal import Refusal

Mark: TypeAlias = Tensor  # three sums, and below them those of the absolute values
Shapes: TypeAlias = tuple[tuple[bool, torch.Size], ...]  # of each tensor: whether it is by sample, and the shape of a sample or else its own

SAME = 1e-9  # relative to the sums of absolute values: far above the rounding of float64, far below what one sample among a million changes
GOLDEN = (5**0.5 - 1) / 2


@dataclass
class Walk:
    """What is known of a walk: its marks, and which shapes inputs and targets came in."""

    marks: list[Mark] = field(default_factory=list)
    shapes: tuple[set[Shapes], set[Shapes]] = field(default_factory=lambda: (set(), set()))

    def comparable(self) -> Tensor:
        """Of the three sums: where shapes differ from batch to batch, padding may depend on who is in a batch, and the sums with it."""
        inputs, targets = (len(shapes) <= 1 for shapes in self.shapes)
        return torch.tensor([inputs, targets, inputs and targets])


class Walks:
    """Compares each walk with the first one, by a few sums over the numbers of its samples: no batch is stored, and the host waits once a walk.

    The sums are those of the inputs, of the targets, and of their products sample by sample, each number weighed by its place in the sample: flipped images and
    swapped labels change them. Where samples may come in any order, inputs or targets whose shapes differ within a walk are left out.

    Args:
        by_batch: whether the batches must be the same, too; else samples may come in any order.
    """

    def __init__(self, by_batch: bool) -> None:
        self.by_batch = by_batch
        self._first: tuple[Tensor, Tensor] | None = None  # its marks, and which of the sums can be compared
        self._weights: dict[torch.device, Tensor] = {}

    @torch.no_grad()
    def note(self, walk: Walk, x: Any, y: Any, n: int) -> None:
        """Add a batch of ``n`` samples to a walk; a batch without tensors says nothing."""
        leaves = [[leaf for leaf in tree_leaves(part) if _has_numbers(leaf)] for part in (x, y)]
        tensors = [leaf for part in leaves for leaf in part]
        if not tensors:
            return
        for shapes, part in zip(walk.shapes, leaves, strict=True):
            shapes.add(tuple((by := _by_sample(leaf, n), leaf.shape[by:]) for leaf in part))
        device = tensors[0].device
        start = torch.zeros(2, n, dtype=torch.float64, device=device)
        inputs, targets = (sum((self._rows(leaf, n).to(device) for leaf in part), start) for part in leaves)
        mark = torch.stack([inputs, targets, inputs * targets], dim=1).sum(2)
        if self.by_batch or not walk.marks:
            walk.marks.append(mark)
        else:
            walk.marks[0] += mark

    def _rows(self, leaf: Tensor, n: int) -> Tensor:
        """For each sample the weighted sum of its numbers and the sum of their absolute values; what is not by sample belongs to each of them."""
        numbers = (torch.view_as_real(leaf) if leaf.is_complex() else leaf).double()
        rows = numbers.reshape(n if _by_sample(leaf, n) else 1, -1).nan_to_num(1.0, 2.0, 3.0)
        weights = self._weights.get(leaf.device)
        if weights is None or len(weights) < rows.shape[1]:
            places = torch.arange(1, rows.shape[1] + 1, dtype=torch.float64, device=leaf.device)
            self._weights[leaf.device] = weights = places.mul_(GOLDEN).frac_()  # between 0 and 1
        return torch.stack([rows @ weights[: rows.shape[1]], torch.linalg.vector_norm(rows, ord=1, dim=1)])

    def compare(self, walk: Walk) -> None:
        """A walk has come to its end: refuse it if it is not like the first one."""
        marks = torch.stack(walk.marks).cpu() if walk.marks else torch.zeros(0, 2, 3)
        comparable = torch.ones(3, dtype=torch.bool) if self.by_batch else walk.comparable()
        if self._first is None:
            self._first = marks, comparable
            return
        first, before = self._first
        if marks.shape != first.shape or bool((((marks - first)[:, 0].abs() > SAME * first[:, 1]) & comparable & before).any()):
            what = "batches" if self.by_batch else "samples"
            raise Refusal(
                f"data gives other {what} on each walk: take shuffle=False, drop_last=False and no random augmentation. "
                "Or does the model change its inputs in place?"
            )


def _by_sample(leaf: Tensor, n: int) -> bool:
    return leaf.dim() > 0 and len(leaf) == n


def _has_numbers(leaf: Any) -> bool:
    if not isinstance(leaf, Tensor) or leaf.layout != torch.strided or leaf.is_nested or leaf.is_quantized:
        return False
    return leaf.numel() > 0 and leaf.device.type != "mps"  # no float64
