"""MobileNetV1 for small images."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional as F

from .layers import conv

STRIDES = (1, 2, 1, 2, 1, 2, 1, 1, 1, 1, 1, 2, 1)  # of MobileNetV1's blocks
WIDTHS = (64, 128, 128, 256, 256, 512, 512, 512, 512, 512, 512, 1024, 1024)


class SeparableConv(nn.Module):
    """Depthwise separable convolution: ``relu(bn(conv1x1(relu(bn(depthwise conv3x3(x))))))``.

    Example:
        >>> import torch
        >>> SeparableConv(16, 32, stride=2)(torch.zeros(2, 16, 8, 8)).shape
        torch.Size([2, 32, 4, 4])
    """

    def __init__(self, width_in: int, width: int, stride: int = 1) -> None:
        super().__init__()
        self.depthwise, self.bn1 = conv(width_in, width_in, stride=stride, groups=width_in), nn.BatchNorm2d(width_in)
        self.pointwise, self.bn2 = conv(width_in, width, size=1), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the next feature map."""
        x = F.relu(self.bn1(self.depthwise(x)))
        return F.relu(self.bn2(self.pointwise(x)))


class MobileNetV1(nn.Module):
    """MobileNetV1 with a stem for small images: a 3x3 convolution with stride 1 instead of 2.

    Four blocks halve the image size, from 32 to 2 before the global average. The initialization is that of
    :class:`~bsam.lab.models.resnet.ResNet`.

    Args:
        stem: number of channels of the first convolution.
        widths: number of channels of each block.
        strides: stride of the 3x3 convolution of each block.
        classes, channels: numbers of classes and of image channels.

    Example:
        >>> import torch
        >>> MobileNetV1(8, widths=(16, 32), strides=(1, 2))(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])

    Reference: Howard et al.: MobileNets: Efficient Convolutional Neural Networks for Mobile Vision Applications, 2017.
    """

    def __init__(
        self,
        stem: int = 32,
        widths: Sequence[int] = WIDTHS,
        strides: Sequence[int] = STRIDES,
        classes: int = 10,
        channels: int = 3,
    ) -> None:
        super().__init__()
        self.conv, self.bn = conv(channels, stem), nn.BatchNorm2d(stem)
        self.blocks = nn.Sequential(*map(SeparableConv, [stem, *widths], widths, strides))
        self.linear = nn.Linear(widths[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of images."""
        x = F.relu(self.bn(self.conv(x)))
        return self.linear(self.blocks(x).mean((2, 3)))
