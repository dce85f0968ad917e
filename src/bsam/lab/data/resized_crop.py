"""Random crops that are resized to one size (RandomResizedCrop), for whole batches on the device of the images."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

TRIES = 10  # boxes drawn for an image until one fits, as in torchvision and timm


def draw_boxes(
    n: int, side: int, scale: tuple[float, float], ratio: tuple[float, float], random: np.random.Generator
) -> NDArray[np.int64]:
    """Return top, left, height and width of ``n`` random boxes, as torchvision's RandomResizedCrop draws them.

    The first of ten boxes that fits into the image is taken; if none does, the whole image.

    Args:
        n: number of boxes.
        side: side of the images, in pixels.
        scale: smallest and largest share of the image's area.
        ratio: smallest and largest ratio of width to height, which is uniform on a logarithmic scale.
        random: the random numbers.

    Example:
        >>> draw_boxes(2, 32, (1.0, 1.0), (1.0, 1.0), np.random.default_rng(0)).tolist()
        [[0, 0, 32, 32], [0, 0, 32, 32]]
    """
    area = side**2 * random.uniform(*scale, (n, TRIES))
    shape = np.exp(random.uniform(math.log(ratio[0]), math.log(ratio[1]), (n, TRIES)))
    heights, widths = np.rint(np.sqrt(area / shape)), np.rint(np.sqrt(area * shape))
    fits = (np.minimum(heights, widths) > 0) & (np.maximum(heights, widths) <= side)
    first = np.arange(n), fits.argmax(axis=1)
    sizes = np.where(fits[first], [heights[first], widths[first]], side).astype(np.int64)
    corners = random.integers(0, side - sizes + 1)
    return np.concatenate([corners, sizes]).T


def resize_boxes(x: Tensor, draws: Tensor, size: int, cubic: bool) -> Tensor:
    """Cut boxes out of images and resize them, with antialiasing where they become smaller.

    The result is that of ``torch.nn.functional.interpolate`` with ``antialias=True`` on each box alone, up to rounding.
    Interpolation is a product with one matrix for the rows and one for the columns of each image. Values stay on the
    device and shapes do not depend on them, so a call can be captured in a CUDA graph.

    Args:
        x: float32 images (n, channels, side, side).
        draws: (n, 5), top, left, height and width of the box of each image, and 1 to mirror it, otherwise 0.
        size: side of the result.
        cubic: bicubic instead of bilinear interpolation.

    Returns:
        Images (n, channels, size, size) in the channels_last memory format.

    Example:
        >>> image, draws = torch.arange(16.0).view(1, 1, 4, 4), torch.tensor([[0, 0, 4, 4, 1]])
        >>> mirrored = resize_boxes(image, draws, 4, cubic=False)
        >>> mirrored[0, 0, 0].tolist()
        [3.0, 2.0, 1.0, 0.0]
    """
    n, channels, height, width = x.shape
    top, left, box_height, box_width, mirrored = draws.unbind(1)
    rows = _weights(top, box_height, torch.zeros_like(mirrored), height, size, cubic)
    columns = _weights(left, box_width, mirrored, width, size, cubic)
    with torch.autocast(x.device.type, enabled=False):  # pixels keep their precision
        x = torch.bmm(rows, x.permute(0, 2, 3, 1).reshape(n, height, width * channels))
        x = x.view(n, size, width, channels).permute(0, 3, 1, 2).reshape(n, channels * size, width)
        x = torch.bmm(x, columns.mT).view(n, channels, size, size)
    return x.contiguous(memory_format=torch.channels_last)


def _weights(begin: Tensor, length: Tensor, mirrored: Tensor, side: int, size: int, cubic: bool) -> Tensor:
    """Return the weight of each of ``side`` pixels in each of ``size`` new ones, for each image."""
    new = torch.arange(size, device=begin.device)
    pixel = torch.arange(side, device=begin.device)
    begin, length, mirrored = (values[:, None] for values in (begin, length, mirrored))
    new = new + mirrored * (size - 1 - 2 * new)
    step = length / size  # pixels for each new one
    centre = begin + (new + 0.5) * step
    distance = ((pixel + 0.5 - centre[:, :, None]) / step.clamp(min=1)[:, :, None]).abs()
    if cubic:  # Pillow's and torch's coefficient with antialiasing, -0.5
        near = (1.5 * distance - 2.5) * distance.square() + 1
        far = ((-0.5 * distance + 2.5) * distance - 4) * distance + 2
        weights = torch.where(distance < 1, near, far.masked_fill(distance >= 2, 0))
    else:
        weights = (1 - distance).clamp(min=0)
    outside = (pixel < begin) | (pixel >= begin + length)
    weights = weights.masked_fill(outside[:, None], 0)
    return weights / weights.sum(2, keepdim=True)
