"""Affine maps of image coordinates, one per image of a batch, and their application to images.

A map is a (2, 3) matrix that takes a point (x, y) to ``m[:, :2] @ (x, y) + m[:, 2]``. The centre of the first pixel is
(0, 0) and the centre of the last one (width - 1, height - 1); an image extends half a pixel beyond. In these
coordinates ``torch.nn.functional.grid_sample`` with ``align_corners=False`` takes ``(2 * x + 1) / width - 1``.

Maps are float64 on all devices, for points of any type: in float32, image coordinates in the thousands would lose 1e-4
pixels, and autocast does not touch float64. Nothing here waits for the device.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def crop_map(boxes: Tensor, margin: float, side: int) -> Tensor:
    """Return the maps from images to square crops of ``side`` pixels.

    A crop is centred on its box; its extent in the image is ``margin`` times the longer side of the box.

    Args:
        boxes: (n, 4): left, top, right and bottom in image pixels.
        margin: extent of the crop, relative to the longer side of the box.
        side: side of the crop, in pixels.

    Example:
        >>> crop_map(torch.tensor([[10.0, 10.0, 30.0, 50.0]]), margin=1.25, side=100)
        tensor([[[ 2.0000,  0.0000,  9.5000],
                 [ 0.0000,  2.0000, -10.5000]]], dtype=torch.float64)
    """
    begin, end = boxes.double().split(2, dim=1)
    scale = side / (margin * (end - begin).amax(dim=1))
    linear = torch.eye(2, dtype=torch.float64, device=boxes.device) * scale[:, None, None]
    offset = (side - 1) / 2 - scale[:, None] * (begin + end) / 2
    return torch.cat([linear, offset[:, :, None]], dim=2)


def centre_map(source: int, target: int, scale: Tensor, angle: Tensor, mirrored: Tensor) -> Tensor:
    """Return the maps between square images that take the centre to the centre.

    The image is magnified and rotated about its centre; then, if it is mirrored, left and right are exchanged.

    Args:
        source, target: sides of the image and of the result, in pixels.
        scale: (n,), magnification; above 1, the image becomes larger.
        angle: (n,), in radians; above 0, the image turns clockwise, since y points down.
        mirrored: (n,), whether to exchange left and right: 0 or 1.

    Example:
        >>> quarter = centre_map(
        ...     8, 8, torch.ones(1), torch.full((1,), torch.pi / 2), torch.zeros(1)
        ... )
        >>> apply(quarter, torch.tensor([[[3.5, 0.0]]])).round(
        ...     decimals=4
        ... )  # from the top to the right
        tensor([[[7.0000, 3.5000]]])
    """
    scale, angle = scale.double(), angle.double()
    cos, sin = scale * angle.cos(), scale * angle.sin()
    side = 1 - 2 * mirrored.double()
    linear = torch.stack([side * cos, -side * sin, sin, cos], dim=1).view(-1, 2, 2)
    offset = (target - 1) / 2 - linear.sum(dim=2, keepdim=True) * ((source - 1) / 2)
    return torch.cat([linear, offset], dim=2)


def inverse(maps: Tensor) -> Tensor:
    """Return the inverse maps, in closed form: a solver would wait for the device to check for singular matrices."""
    a, b, c, d = maps[:, :, :2].flatten(1).unbind(dim=1)
    linear = torch.stack([d, -b, -c, a], dim=1).view(-1, 2, 2) / (a * d - b * c)[:, None, None]
    return torch.cat([linear, -linear @ maps[:, :, 2:]], dim=2)


def compose(outer: Tensor, inner: Tensor) -> Tensor:
    """Return the maps that apply ``inner`` first and then ``outer``."""
    return outer[:, :, :2] @ inner + F.pad(outer[:, :, 2:], (2, 0))


def apply(maps: Tensor, points: Tensor) -> Tensor:
    """Return where the maps (n, 2, 3) take points (n, k, 2), in the points' floating-point type."""
    return (points.double() @ maps[:, :, :2].mT + maps[:, None, :, 2]).to(points.dtype)


def warp(images: Tensor, maps: Tensor, side: int) -> Tensor:
    """Return the images under the maps, with bilinear interpolation and zeros outside the image.

    Args:
        images: (n, channels, height, width), of any type.
        maps: (n, 2, 3), from the pixels of the images to those of the result.
        side: side of the result, in pixels.

    Returns:
        float32 images (n, channels, side, side).

    Example:
        >>> mirror = torch.tensor(
        ...     [[[-1.0, 0.0, 1.0], [0.0, 1.0, 0.0]]], dtype=torch.float64
        ... )  # x becomes 1 - x
        >>> warp(torch.tensor([[[[1, 2], [3, 4]]]]), mirror, side=2)
        tensor([[[[2., 1.],
                  [4., 3.]]]])
    """
    pixels = torch.arange(side, device=images.device, dtype=torch.float32)

    def source(row: Tensor, length: int) -> Tensor:  # no matmul: autocast and TF32 would round it
        dx = row[:, 0] * (2 / length)
        dy = row[:, 1] * (2 / length)
        offset = (2 * row[:, 2] + 1) / length - 1
        dx, dy, offset = (column.float()[:, None, None] for column in (dx, dy, offset))
        return dx * pixels + (dy * pixels[:, None] + offset)

    x_row, y_row = inverse(maps).unbind(dim=1)
    grid = torch.stack([source(x_row, images.shape[3]), source(y_row, images.shape[2])], dim=3)
    images = images.to(torch.float32, memory_format=torch.contiguous_format)  # faster here than channels_last
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
