"""Wide residual networks for small images."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from ...common.errors import BsamValueError
from .layers import conv, stages


class PreActivationBlock(nn.Module):
    """Residual block with batch norm and ReLU before each of two 3x3 convolutions, and nothing after the sum.

    If the shape changes, the shortcut is a 1x1 convolution of the activated input, without batch norm.

    Example:
        >>> import torch
        >>> PreActivationBlock(16, 32, stride=2)(torch.zeros(2, 16, 8, 8)).shape
        torch.Size([2, 32, 4, 4])
    """

    def __init__(self, width_in: int, width: int, stride: int = 1) -> None:
        super().__init__()
        self.bn1, self.conv1 = nn.BatchNorm2d(width_in), conv(width_in, width, stride=stride)
        self.bn2, self.conv2 = nn.BatchNorm2d(width), conv(width, width)
        self.projection = None if stride == 1 and width_in == width else conv(width_in, width, size=1, stride=stride)

    def forward(self, x: Tensor) -> Tensor:
        """Return the next feature map."""
        active = F.relu(self.bn1(x))
        out = self.conv2(F.relu(self.bn2(self.conv1(active))))
        return out + (x if self.projection is None else self.projection(active))


class WideResNet(nn.Module):
    """Wide ResNet: a stem with 16 channels and three stages of pre-activation blocks, without dropout.

    The initialization is that of the authors' code: convolutions are normal with variance 2 / fan-out, batch norm is 1
    and 0, the linear layer is torch's default with a bias of 0.

    Args:
        depth: 6n + 4, where n is the number of blocks in each stage: 10, 16, 22, 28, ...
        widen: factor by which the stage widths of 16, 32 and 64 channels are multiplied.
        classes, channels: numbers of classes and of image channels.

    Example:
        >>> import torch
        >>> WideResNet(depth=10, widen=1)(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])

    Reference: Zagoruyko, Komodakis: Wide Residual Networks, BMVC 2016.
    """

    def __init__(self, depth: int, widen: int, classes: int = 10, channels: int = 3) -> None:
        super().__init__()
        if depth % 6 != 4:
            raise BsamValueError(f"depth must be 6n + 4, such as 10, 16, 22 or 28, got {depth!r}")
        n = (depth - 4) // 6
        self.conv = conv(channels, 16)
        self.stages = stages(PreActivationBlock, 16, [[width * widen] * n for width in (16, 32, 64)])
        self.bn = nn.BatchNorm2d(64 * widen)
        self.linear = nn.Linear(64 * widen, classes)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of images."""
        x = F.relu(self.bn(self.stages(self.conv(x))))
        return self.linear(x.mean((2, 3)))
