"""Networks for small images: DigitsNet, ResNet, Wide ResNet, PyramidNet and MobileNetV1."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...common.errors import BsamValueError


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


class DigitsNet(nn.Sequential):
    """Two convolutions with batch norm and a linear layer, for images of 8 x 8 pixels; 10 thousand parameters.

    The initialization is torch's default. A pass takes about a millisecond on one CPU thread.

    Example:
        >>> import torch
        >>> DigitsNet()(torch.zeros(2, 1, 8, 8)).shape
        torch.Size([2, 10])
    """

    def __init__(self, classes: int = 10, width: int = 16, channels: int = 1) -> None:
        super().__init__(
            nn.Conv2d(channels, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(2 * width * 4 * 4, classes),
        )


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
        self.conv1 = conv(width_in, width, stride=stride)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = conv(width, width)
        self.bn2 = nn.BatchNorm2d(width)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or width_in != width:
            self.shortcut = nn.Sequential(conv(width_in, width, size=1, stride=stride), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
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
        self.conv = conv(channels, widths[0])
        self.bn = nn.BatchNorm2d(widths[0])
        self.stages = stages(BasicBlock, widths[0], [[width] * blocks for width in widths])
        self.linear = nn.Linear(widths[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn(self.conv(x)))
        return self.linear(self.stages(x).mean((2, 3)))


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
        self.bn1 = nn.BatchNorm2d(width_in)
        self.conv1 = conv(width_in, width, stride=stride)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv2 = conv(width, width)
        self.projection = None if stride == 1 and width_in == width else conv(width_in, width, size=1, stride=stride)

    def forward(self, x: Tensor) -> Tensor:
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
        x = F.relu(self.bn(self.stages(self.conv(x))))
        return self.linear(x.mean((2, 3)))


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
        self.bn1 = nn.BatchNorm2d(width_in)
        self.conv1 = conv(width_in, width, stride=stride)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv2 = conv(width, width)
        self.bn3 = nn.BatchNorm2d(width)
        self.halves = stride == 2

    def forward(self, x: Tensor) -> Tensor:
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
        self.conv = conv(channels, 16)
        self.bn = nn.BatchNorm2d(16)
        self.stages = stages(PyramidBlock, 16, [widths[:n], widths[n : 2 * n], widths[2 * n :]])
        self.bn_last = nn.BatchNorm2d(widths[-1])
        self.linear = nn.Linear(widths[-1], classes)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stages(self.bn(self.conv(x)))
        return self.linear(F.relu(self.bn_last(x)).mean((2, 3)))


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
        self.depthwise = conv(width_in, width_in, stride=stride, groups=width_in)
        self.bn1 = nn.BatchNorm2d(width_in)
        self.pointwise = conv(width_in, width, size=1)
        self.bn2 = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.depthwise(x)))
        return F.relu(self.bn2(self.pointwise(x)))


class MobileNetV1(nn.Module):
    """MobileNetV1 with a stem for small images: a 3x3 convolution with stride 1 instead of 2.

    Four blocks halve the image size, from 32 to 2 before the global average. The initialization is that of
    :class:`~bsam.lab.models.cifar.ResNet`.

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
        self.conv = conv(channels, stem)
        self.bn = nn.BatchNorm2d(stem)
        self.blocks = nn.Sequential(*map(SeparableConv, [stem, *widths], widths, strides))
        self.linear = nn.Linear(widths[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn(self.conv(x)))
        return self.linear(self.blocks(x).mean((2, 3)))
