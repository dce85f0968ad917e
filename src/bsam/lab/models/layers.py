"""Building blocks for networks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn


def conv(width_in: int, width: int, size: int = 3, stride: int = 1, groups: int = 1) -> nn.Conv2d:
    """Return a convolution without bias, padded to keep the image size, with the initialization of He et al. (2015).

    Example:
        >>> conv(3, 16, stride=2)(torch.zeros(1, 3, 8, 8)).shape
        torch.Size([1, 16, 4, 4])
    """
    layer = nn.Conv2d(width_in, width, size, stride, padding=size // 2, groups=groups, bias=False)
    nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    with torch.no_grad():
        layer.weight.mul_(groups**0.5)  # torch's fan-out counts the channels of all groups together
    return layer


def stages(
    block: Callable[[int, int, int], nn.Module], width_in: int, widths: Sequence[Sequence[int]]
) -> nn.Sequential:
    """Return stages of residual blocks; every stage except the first halves the image size in its first block.

    Args:
        block: function that builds a block from its input width, output width and stride.
        width_in: number of input channels.
        widths: for each stage, the output widths of its blocks.

    Example:
        >>> sequence = stages(
        ...     lambda width_in, width, stride: conv(width_in, width, stride=stride),
        ...     4,
        ...     [[8, 8], [16]],
        ... )
        >>> [
        ...     (layer.in_channels, layer.out_channels, layer.stride[0])
        ...     for stage in sequence
        ...     for layer in stage
        ... ]
        [(4, 8, 1), (8, 8, 1), (8, 16, 2)]
    """
    sequence = []
    for stage, outs in enumerate(widths):
        ins = [width_in, *outs]
        strides = [2 if stage > 0 else 1] + [1] * (len(outs) - 1)
        sequence.append(nn.Sequential(*map(block, ins, outs, strides)))
        width_in = outs[-1]
    return nn.Sequential(*sequence)
