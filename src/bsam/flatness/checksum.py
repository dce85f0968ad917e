"""Checksums that tell whether data gives the same samples in each pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

GOLDEN = (5**0.5 - 1) / 2
TOLERANCE = 1e-9  # relative: far above the rounding of float64, far below what one sample among a million changes


@torch.no_grad()
def checksum(x: Any, y: Any, n: int) -> Tensor:
    """Return the sums of ``r``, ``s`` and ``r * s`` over the ``n`` samples of a batch, and of their absolute values.

    ``r`` and ``s`` are weighted sums of the entries of a sample's inputs and targets. The weights depend on the
    position in the sample, so that a flipped image has another checksum. The order of the samples does not matter.

    Example:
        >>> x, y = torch.arange(6.0).view(3, 2), torch.tensor([0, 1, 2])
        >>> same = checksum(x[[2, 0, 1]], y[[2, 0, 1]], 3)
        >>> (
        ...     same_samples(checksum(x, y, 3), same),
        ...     same_samples(checksum(x, y[[1, 0, 2]], 3), same),
        ... )
        (True, False)
    """
    r = _weighted_sums(x, n)
    s = _weighted_sums(y, n).to(r.device)
    rows = torch.stack([r, s, r * s])
    return torch.stack([rows, rows.abs()]).sum(2)


def same_samples(a: Tensor, b: Tensor) -> bool:
    """Return whether two checksums, or two stacks of them, are of the same samples."""
    return a.shape == b.shape and not bool(((a - b)[..., 0, :].abs() > TOLERANCE * b[..., 1, :]).any())


def _weighted_sums(tree: Any, n: int) -> Tensor:
    """Return one number per sample; tensors without a row per sample count for each of them."""
    sums = torch.zeros(n, dtype=torch.float64)
    for k, leaf in enumerate(filter(_is_summable, tree_leaves(tree))):
        entries = (torch.view_as_real(leaf) if leaf.is_complex() else leaf).double().nan_to_num(1.0, 2.0, 3.0)
        entries = entries.reshape(n if leaf.shape[:1] == (n,) else 1, -1)
        positions = torch.arange(1, entries.shape[1] + 1, dtype=torch.float64, device=leaf.device)
        sums = sums.to(leaf.device) + entries @ positions.mul_(GOLDEN).add_(k / 7).frac_()
    return sums


def _is_summable(leaf: Any) -> bool:
    if not isinstance(leaf, Tensor) or leaf.layout != torch.strided or leaf.is_nested or leaf.is_quantized:
        return False
    return leaf.numel() > 0 and leaf.device.type != "mps"  # which has no float64
