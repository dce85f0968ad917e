"""SimCC: pose networks that classify the coordinates of joints."""

from __future__ import annotations

import contextlib
from collections import OrderedDict

import torch
from torch import Tensor, nn

from ...common.errors import BsamValueError
from .cifar import ResNet
from .timm_networks import resnet50


class SimCCHead(nn.Module):
    """A 1x1 convolution to one map per joint, and two linear layers from each map to the logits of x and y.

    The joints share the linear layers. Autocast does not apply to the head: in bfloat16 several logits would tie for
    the largest.

    Args:
        channels: number of channels of the feature maps.
        joints: number of joints.
        cells: number of cells of a feature map.
        bins: number of bins per coordinate.

    Example:
        >>> SimCCHead(channels=8, joints=14, cells=16, bins=64)(torch.zeros(2, 8, 4, 4)).shape
        torch.Size([2, 14, 2, 64])
    """

    def __init__(self, channels: int, joints: int, cells: int, bins: int) -> None:
        super().__init__()
        self.maps = nn.Conv2d(channels, joints, 1)
        self.x = nn.Linear(cells, bins)
        self.y = nn.Linear(cells, bins)

    def forward(self, features: Tensor) -> Tensor:
        device = features.device.type
        has_autocast = torch.amp.is_autocast_available(device)  # "meta" has none
        with torch.autocast(device, enabled=False) if has_autocast else contextlib.nullcontext():
            dtype = self.maps.bias.dtype  # type: ignore[union-attr]  # a converted layer's weight is int8
            maps = self.maps(features.to(dtype)).flatten(2)
            return torch.stack((self.x(maps), self.y(maps)), dim=2)


class SimCC(nn.Module):
    """SimCC: two classifications per joint, for x and y, over ``side * k`` bins.

    The output has shape (n, joints, 2, bins), with the logits of x before those of y. Bin ``b`` stands for the
    coordinate ``b / k``, in pixels of the input.

    Args:
        backbone: network from images to feature maps of shape (n, channels, side / stride, side / stride).
        channels: number of channels of the feature maps.
        joints: number of joints.
        side: side of the square images; the weights of the head depend on it.
        k: bins per pixel, the splitting factor of the paper.
        stride: pixels per cell of the feature map, along a side.

    Example:
        >>> backbone = nn.Conv2d(3, 8, 4, stride=4)
        >>> SimCC(backbone, channels=8, joints=14, side=32, stride=4)(
        ...     torch.zeros(2, 3, 32, 32)
        ... ).shape
        torch.Size([2, 14, 2, 64])

    Reference: Li et al.: SimCC: a Simple Coordinate Classification Perspective for Human Pose Estimation, ECCV 2022.
    This implementation has no upsampling between backbone and head.
    """

    def __init__(
        self, backbone: nn.Module, channels: int, joints: int, side: int = 256, k: float = 2.0, stride: int = 32
    ) -> None:
        super().__init__()
        if side % stride:
            raise BsamValueError(f"side must be a multiple of {stride}, the stride of the backbone; got {side}")
        bins = side * k
        if bins < 1 or bins != int(bins):
            raise BsamValueError(f"k must make side * k, the number of bins, a whole number; got {side} * {k}")
        self.backbone = backbone
        self.head = SimCCHead(channels, joints, (side // stride) ** 2, int(bins))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x))

    def get_classifier(self) -> nn.Module:
        """Return everything except the backbone; timm's networks return their classifier with this method."""
        return self.head


def simcc_resnet50(classes: int = 16, channels: int = 3, side: int = 256, k: float = 2.0) -> SimCC:
    """Return SimCC for ``classes`` joints, whose backbone is ResNet-50 without its pooling and classifier.

    The names in the backbone are those of :func:`~bsam.lab.models.timm_networks.resnet50`.
    """
    backbone = resnet50(channels=channels)
    backbone.reset_classifier(0, "")  # type: ignore[operator]
    return SimCC(backbone, 2048, classes, side, k, stride=32)


def simcc_resnet8(classes: int = 16, channels: int = 3, side: int = 64, k: float = 2.0) -> SimCC:
    """Return SimCC for ``classes`` joints with ResNet-8 as its backbone, for small images such as stick figures.

    Example:
        >>> simcc_resnet8(classes=14)(torch.zeros(2, 3, 64, 64)).shape
        torch.Size([2, 14, 2, 128])
    """
    resnet = ResNet((16, 32, 64), 1, channels=channels)
    layers = OrderedDict(conv=resnet.conv, bn=resnet.bn, relu=nn.ReLU(), stages=resnet.stages)  # names as in ResNet
    return SimCC(nn.Sequential(layers), 64, classes, side, k, stride=4)
