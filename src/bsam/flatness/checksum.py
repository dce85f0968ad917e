"""Sums that tell whether data gives the same samples in each pass over it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

GOLDEN = (5**0.5 - 1) / 2
SAME = 1e-9  # relative: far above the rounding of float64, far below what one sample among a million changes


@torch.no_grad()
def checksum(x: Any, y: Any, n: int) -> Tensor:
    """Sums over the ``n`` samples of a batch: of ``r``, ``s`` and ``r * s``, and below them of their absolute values.

    ``r`` and ``s`` are weighted sums of the numbers of a sample's inputs and targets. The weights depend on the place
    in the sample, so that a flipped image counts as another one. The order of the samples does not matter.

    Example:
        >>> x, y = torch.arange(6.0).view(3, 2), torch.tensor([0, 1, 2])
        >>> same = checksum(x[[2, 0, 1]], y[[2, 0, 1]], 3)
        >>> agree(checksum(x, y, 3), same), agree(checksum(x, y[[1, 0, 2]], 3), same)
        (True, False)
    """
    r, s = _rows(x, n), _rows(y, n)
    s = s.to(r.device)
    rows = torch.stack([r, s, r * s])
    return torch.stack([rows, rows.abs()]).sum(2)


def _rows(tree: Any, n: int) -> Tensor:
    """One number for each sample; what is not by sample belongs to each of them."""
    rows = torch.zeros(n, dtype=torch.float64)
    for k, leaf in enumerate(filter(_has_numbers, tree_leaves(tree))):
        numbers = (torch.view_as_real(leaf) if leaf.is_complex() else leaf).double().nan_to_num(1.0, 2.0, 3.0)
        numbers = numbers.reshape(n if leaf.shape[:1] == (n,) else 1, -1)
        places = torch.arange(1, numbers.shape[1] + 1, dtype=torch.float64, device=leaf.device)
        rows = rows.to(leaf.device) + numbers @ places.mul_(GOLDEN).add_(k / 7).frac_()
    return rows


def agree(a: Tensor, b: Tensor) -> bool:
    """Whether two checksums, or lists of them in one tensor, are of the same samples."""
    if a.shape != b.shape:
        return False
    return not bool(((a - b)[..., 0, :].abs() > SAME * b[..., 1, :]).any())


def _has_numbers(leaf: Any) -> bool:
    if not isinstance(leaf, Tensor) or leaf.layout != torch.strided or leaf.is_nested or leaf.is_quantized:
        return False
    return leaf.numel() > 0 and leaf.device.type != "mps"  # no float64
