"""Whether data gives the same samples each time it is walked."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..core.refusal import Refusal

Mark: TypeAlias = Tensor  # three sums, and below them those of the absolute values
Walk: TypeAlias = list[Mark]

SAME = 1e-9  # relative to the sums of absolute values: far above the rounding of float64, far below what one sample among a million changes
GOLDEN = (5**0.5 - 1) / 2


class Walks:
    """Compares each walk with the first one, by a few sums over the numbers of its samples: no batch is stored, and the host waits once a walk.

    The sums are those of the inputs, of the targets, and of their products sample by sample, each number weighed by its place in the sample: flipped images and
    swapped labels change them.

    Args:
        by_batch: whether the batches must be the same, too; else samples may come in any order.
    """

    def __init__(self, by_batch: bool) -> None:
        self.by_batch = by_batch
        self._first: Tensor | None = None
        self._weights: dict[torch.device, Tensor] = {}

    @torch.no_grad()
    def note(self, walk: Walk, x: Any, y: Any, n: int) -> None:
        """Add a batch of ``n`` samples to a walk; a batch without tensors says nothing."""
        leaves = [[leaf for leaf in tree_leaves(part) if _has_numbers(leaf)] for part in (x, y)]
        tensors = [leaf for part in leaves for leaf in part]
        if not tensors:
            return
        device = tensors[0].device
        start = torch.zeros(2, n, dtype=torch.float64, device=device)
        inputs, targets = (sum((self._rows(leaf, n).to(device) for leaf in part), start) for part in leaves)
        mark = torch.stack([inputs, targets, inputs * targets], dim=1).sum(2)
        if self.by_batch or not walk:
            walk.append(mark)
        else:
            walk[0] += mark

    def _rows(self, leaf: Tensor, n: int) -> Tensor:
        """For each sample the weighted sum of its numbers and the sum of their absolute values; what is not by sample belongs to each of them."""
        numbers = (torch.view_as_real(leaf) if leaf.is_complex() else leaf).double()
        rows = numbers.reshape(n if leaf.dim() and len(leaf) == n else 1, -1).nan_to_num(1.0, 2.0, 3.0)
        weights = self._weights.get(leaf.device)
        if weights is None or len(weights) < rows.shape[1]:
            places = torch.arange(1, rows.shape[1] + 1, dtype=torch.float64, device=leaf.device)
            self._weights[leaf.device] = weights = places.mul_(GOLDEN).frac_()  # between 0 and 1
        return torch.stack([rows @ weights[: rows.shape[1]], torch.linalg.vector_norm(rows, ord=1, dim=1)])

    def compare(self, walk: Walk) -> None:
        """A walk has come to its end: refuse it if it is not like the first one."""
        marks = torch.stack(walk).cpu() if walk else torch.zeros(0, 2, 3)
        if self._first is None:
            self._first = marks
        elif marks.shape != self._first.shape or bool(((marks - self._first)[:, 0].abs() > SAME * self._first[:, 1]).any()):
            what = "batches" if self.by_batch else "samples"
            raise Refusal(
                f"data gives other {what} on each walk: take shuffle=False, drop_last=False and no random augmentation. "
                "Or does the model change its inputs in place?"
            )


def _has_numbers(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.layout == torch.strided and not leaf.is_nested and leaf.numel() > 0 and leaf.device.type != "mps"  # no float64
