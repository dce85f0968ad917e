"""Residual networks for small images."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional as F

from .layers import conv, stages


class BasicBlock(nn.Module):
    """Residual block: ``relu(bn(conv(relu(bn(conv(x))))) + shortcut(x))``.

    The shortcut is ``x``, or a 1x1 convolution with batch norm if the shape changes.

    Example:
        >>> import torch
        >>> BasicBlock(16, 32, stride=2)(torch.zeros(2, 16, 8, 8)).shape
        torch.Size([2, 32, 4, 4])
    """

    def __init__(self, width_in: int, width: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1, self.bn1 = conv(width_in, width, stride=stride), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = conv(width, width), nn.BatchNorm2d(width)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or width_in != width:
            self.shortcut = nn.Sequential(conv(width_in, width, size=1, stride=stride), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        """Return the next feature map."""
        out = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(out)) + self.shortcut(x))


class ResNet(nn.Module):
    """ResNet with a stem for small images: a 3x3 convolution with stride 1, and no pooling before the global one.

    Shortcuts are projections if the shape changes, even in ResNet-20 and other networks for CIFAR, where He et al. pad
    with zeros.

    Convolutions are initialized as in He et al. (2015) (normal with variance 2 / fan-out), batch norm with 1 and 0, and
    the linear layer with torch's default.

    Args:
        widths: number of channels of each stage; each stage except the first halves the image size.
        blocks: number of blocks in each stage.
        classes, channels: numbers of classes and of image channels.

    Example:
        >>> import torch
        >>> ResNet(widths=(8, 16), blocks=1)(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])

    Reference: He, Zhang, Ren, Sun: Deep Residual Learning for Image Recognition, CVPR 2016.
    """

    def __init__(self, widths: Sequence[int], blocks: int, classes: int = 10, channels: int = 3) -> None:
        super().__init__()
        self.conv, self.bn = conv(channels, widths[0]), nn.BatchNorm2d(widths[0])
        self.stages = stages(BasicBlock, widths[0], [[width] * blocks for width in widths])
        self.linear = nn.Linear(widths[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of images."""
        x = F.relu(self.bn(self.conv(x)))
        return self.linear(self.stages(x).mean((2, 3)))
