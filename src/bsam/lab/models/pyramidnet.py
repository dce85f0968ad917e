"""Pyramidal residual networks for small images."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...common.errors import BsamValueError
from .layers import conv, stages


class PyramidBlock(nn.Module):
    """Residual block ``bn(conv(relu(bn(conv(bn(x)))))) + shortcut(x)``, with a single ReLU and nothing after the sum.

    The shortcut has no weights: it is ``x``, averaged over 2x2 pixels if the stride is 2, with channels of zeros
    appended. The next block's batch norm cancels constants added to a channel, so in training the gradient of the last
    norm's bias is 0 up to rounding.

    Example:
        >>> PyramidBlock(16, 21, stride=2)(torch.zeros(2, 16, 8, 8)).shape
        torch.Size([2, 21, 4, 4])
    """

    def __init__(self, width_in: int, width: int, stride: int = 1) -> None:
        super().__init__()
        self.bn1, self.conv1 = nn.BatchNorm2d(width_in), conv(width_in, width, stride=stride)
        self.bn2, self.conv2 = nn.BatchNorm2d(width), conv(width, width)
        self.bn3 = nn.BatchNorm2d(width)
        self.halves = stride == 2

    def forward(self, x: Tensor) -> Tensor:
        """Return the next feature map."""
        out = self.conv1(self.bn1(x))
        out = self.bn3(self.conv2(F.relu(self.bn2(out))))
        if self.halves:
            x = F.avg_pool2d(x, 2, ceil_mode=True)  # odd sides round up, as in the convolution
        width_in = x.shape[1]  # F.pad(x) gives NaN gradients with inductor (torch 2.13, CPU, bf16)
        return torch.cat([out[:, :width_in] + x, out[:, width_in:]], dim=1)


class PyramidNet(nn.Module):
    r"""PyramidNet with basic blocks: every block adds the same number of channels.

    The k-th of N blocks has :math:`16 + \alpha k / N` channels, rounded as in the authors' code (the paper rounds
    down). The initialization is also that of their code: convolutions are normal with variance 2 / fan-out, batch norm
    is 1 and 0, the linear layer is torch's default with a bias of 0.

    Args:
        depth: 6n + 2, where n is the number of blocks in each of the three stages: 8, 14, 20, ..., 110, ...
        alpha: number of channels that the last block has in addition to the stem's 16.
        classes, channels: numbers of classes and of image channels.

    Example:
        >>> PyramidNet(depth=8, alpha=20)(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])

    Reference: Han, Kim, Kim: Deep Pyramidal Residual Networks, CVPR 2017.
    """

    def __init__(self, depth: int, alpha: int, classes: int = 10, channels: int = 3) -> None:
        super().__init__()
        if depth % 6 != 2:
            raise BsamValueError(f"depth must be 6n + 2, such as 8, 14, 20 or 110, got {depth!r}")
        n = (depth - 2) // 6
        widths = [int(16 + alpha * k / (3 * n) + 0.5) for k in range(1, 3 * n + 1)]
        self.conv, self.bn = conv(channels, 16), nn.BatchNorm2d(16)
        self.stages = stages(PyramidBlock, 16, [widths[:n], widths[n : 2 * n], widths[2 * n :]])
        self.bn_last = nn.BatchNorm2d(widths[-1])
        self.linear = nn.Linear(widths[-1], classes)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of images."""
        x = self.stages(self.bn(self.conv(x)))
        return self.linear(F.relu(self.bn_last(x)).mean((2, 3)))
