"""Pyramidal residual networks for small images."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..core.checks import check_count
from ..core.errors import BsamValueError
from .layers import conv, stages


class PyramidBlock(nn.Module):
    """``bn(conv(relu(bn(conv(bn(x))))))`` beside a shortcut without weights: a single ReLU, and nothing after the sum.

    The shortcut is ``x``, averaged over 2x2 where the stride is 2, with channels of zeros behind its own. What is added
    to a whole channel of the sum, the next
    batch norm takes away again: while training, the gradient of the last norm's bias is 0 but for rounding.

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
        """From one feature map to the next."""
        out = self.conv1(self.bn1(x))
        out = self.bn3(self.conv2(F.relu(self.bn2(out))))
        if self.halves:
            x = F.avg_pool2d(x, 2, ceil_mode=True)  # an odd side rounds up, as the convolution's does
        known = x.shape[1]
        return torch.cat(
            [out[:, :known] + x, out[:, known:]], dim=1
        )  # F.pad(x) would do, but inductor (torch 2.13, CPU, bf16) then gives NaN gradients


class PyramidNet(nn.Module):
    r"""A PyramidNet of basic blocks, which grows by the same number of channels at every block.

    The k-th of N blocks is :math:`16 + \alpha k / N` channels wide, rounded as the authors' code does (their paper
    rounds down).
    Weights begin as in that code: convolutions normal with variance 2 / fan-out, batch norm at 1 and 0, the linear
        layer as torch draws it but for its
    bias, which is 0.

    Args:
        depth: 6n + 2, where n is the number of blocks in each of the three stages: 8, 14, 20, ..., 110, ...
        alpha: how many channels wider than the stem's 16 the last block is.
        classes: how many.
        channels: of the images.

    Example:
        >>> PyramidNet(depth=8, alpha=20)(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])

    Reference: Han, Kim, Kim: Deep Pyramidal Residual Networks, CVPR 2017.
    """

    def __init__(self, depth: int, alpha: int, classes: int = 10, channels: int = 3) -> None:
        super().__init__()
        if check_count("depth", depth, low=8) % 6 != 2:
            raise BsamValueError(f"depth must be 6n + 2, such as 8, 14, 20 or 110, got {depth!r}")
        check_count("alpha", alpha, low=0)
        check_count("classes", classes)
        check_count("channels", channels)
        n = (depth - 2) // 6
        widths = [int(16 + alpha * k / (3 * n) + 0.5) for k in range(1, 3 * n + 1)]
        self.conv, self.bn = conv(channels, 16), nn.BatchNorm2d(16)
        self.stages = stages(PyramidBlock, 16, [widths[:n], widths[n : 2 * n], widths[2 * n :]])
        self.bn_last = nn.BatchNorm2d(widths[-1])
        self.linear = nn.Linear(widths[-1], classes)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """From images to logits."""
        x = self.stages(self.bn(self.conv(x)))
        return self.linear(F.relu(self.bn_last(x)).mean((2, 3)))


def pyramidnet8(classes: int = 10, channels: int = 3) -> PyramidNet:
    """PyramidNet-8 with alpha 48, 114,906 parameters: for the CPU.

    Example:
        >>> sum(p.numel() for p in pyramidnet8().parameters())
        114906
    """
    return PyramidNet(8, 48, classes, channels)


def pyramidnet110(classes: int = 10, channels: int = 3) -> PyramidNet:
    """PyramidNet-110 with alpha 270, 28,485,477 parameters.

    Example:
        >>> sum(p.numel() for p in pyramidnet110().parameters())
        28485477
    """
    return PyramidNet(110, 270, classes, channels)
