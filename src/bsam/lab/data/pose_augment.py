"""Random scales, rotations and flips of persons and their joints, and the affine maps they are made of.

They work on whole batches, on the device of the images.

A map is a (2, 3) matrix that takes a point (x, y) to ``m[:, :2] @ (x, y) + m[:, 2]``. The centre of the first pixel is
(0, 0) and the centre of the last one (width - 1, height - 1); an image extends half a pixel beyond. In these
coordinates ``torch.nn.functional.grid_sample`` with ``align_corners=False`` takes ``(2 * x + 1) / width - 1``.

Maps are float64 on all devices, for points of any type: in float32, image coordinates in the thousands would lose 1e-4
pixels, and autocast does not touch float64. Nothing here waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .augment import normalise, on_device


def crop_map(boxes: Tensor, margin: float, side: int) -> Tensor:
    """Return the maps from images to square crops of ``side`` pixels.

    A crop is centred on its box; its extent in the image is ``margin`` times the longer side of the box.

    Args:
        boxes: (n, 4): left, top, right and bottom in image pixels.
        margin: extent of the crop, relative to the longer side of the box.

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
    scale = scale.double()
    angle = angle.double()
    cos = scale * angle.cos()
    sin = scale * angle.sin()
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
        maps: (n, 2, 3), from the pixels of the images to those of the result.

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


_POSE_STREAM = 0x905E  # makes these random numbers independent of others that are drawn from (seed, epoch)


@dataclass(frozen=True)
class PoseAugment:
    """A random scale, rotation and flip, a crop at the centre, and normalisation.

    A row of the draws is the magnification, the angle in radians, and 1 for a mirrored image, else 0.

    Each image is transformed by one affine map with one bilinear interpolation; it is black beyond the stored crop.
    Values stay on the device and shapes do not depend on them, so a call can be captured in a CUDA graph after a first
    call outside it.

    The ranges are the usual ones for MPII (a scale factor of 0.25, and a rotation factor of 30 degrees for 60 % of the
    images). Numbers are uniform in these ranges; other implementations draw from normal distributions, with angles up
    to twice as large.

    Args:
        side: side of the result, in pixels.
        mirrored: for each joint of a mirrored person, the joint that it was before; see
            :class:`bsam.lab.data.persons.Skeleton`.
        scale: magnifications are uniform in 1 - scale to 1 + scale.
        rotation: angles are uniform in -rotation to rotation degrees.
        rotation_p: fraction of the images that are rotated.
        flip: whether half of the images are mirrored.
        mean, std: mean and standard deviation of the pixels per channel.

    Example:
        >>> from bsam.lab.data.stick_figures import stick_figures
        >>> data = stick_figures(4)
        >>> augment, persons = PoseAugment(data.side, data.skeleton.mirrored), data.train
        >>> x, y, to_image = augment(
        ...     persons.x, persons.y, persons.to_image, augment.draws(4, seed=0, epoch=0)
        ... )
        >>> x.shape, y.shape, to_image.shape
        (torch.Size([4, 3, 64, 64]), torch.Size([4, 14, 3]), torch.Size([4, 2, 3]))
    """

    side: int
    mirrored: tuple[int, ...]
    scale: float = 0.25
    rotation: float = 30.0
    rotation_p: float = 0.6
    flip: bool = True
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)

    def draws(self, n: int, seed: int, epoch: int) -> Tensor:
        """Draw random numbers for ``n`` images, a function of the seed and the epoch."""
        random = np.random.default_rng((seed, epoch, _POSE_STREAM))
        scale = 1 + self.scale * random.uniform(-1, 1, n)
        angle = math.radians(self.rotation) * random.uniform(-1, 1, n) * (random.random(n) < self.rotation_p)
        mirrored = random.integers(0, 2, n) * self.flip
        return torch.from_numpy(np.stack([scale, angle, mirrored], axis=1))

    def __call__(
        self, x: Tensor, y: Tensor, to_image: Tensor, draws: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Augment a batch, or cut out the centre for evaluation.

        Args:
            x: stored crops (n, 3, side, side), as bytes or as floating-point numbers.
            y: joints (n, J, 3): x and y in pixels of the crop, and 1 if the joint is labelled, else 0.
            to_image: (n, 2, 3), the maps from pixels of the crop to pixels of the image.
            draws: (n, 3), the rows of these images; None: the centre.

        Returns:
            The network's inputs, float32 in the channels_last memory format; the joints in pixels of the inputs, with
            those outside marked as not labelled; and the maps from pixels of the inputs to pixels of the images.
        """
        if draws is None:
            draws = torch.tensor([[1.0, 0.0, 0.0]], dtype=torch.float64, device=x.device).expand(len(x), 3)
        scale, angle, mirrored = draws.unbind(dim=1)
        maps = centre_map(x.shape[-1], self.side, scale, angle, mirrored)
        unit = 1.0 if x.is_floating_point() else 255.0
        mean = tuple(unit * value for value in self.mean)
        std = tuple(unit * value for value in self.std)
        pixels = normalise(warp(x, maps, self.side), mean, std)
        exchanged = y.index_select(1, on_device(self.mirrored, torch.int64, y.device))
        y = torch.where(mirrored[:, None, None] > 0, exchanged, y)
        positions = apply(maps, y[:, :, :2])
        inside = ((positions >= -0.5) & (positions < self.side - 0.5)).all(dim=2, keepdim=True)
        return pixels, torch.cat([positions, y[:, :, 2:] * inside], dim=2), compose(to_image, inverse(maps))


#: settings of :class:`PoseAugment` by name
POSE_AUGMENTATIONS: Mapping[str, Mapping[str, Any]] = {
    "none": {"scale": 0.0, "rotation": 0.0, "flip": False},
    "scale-rotate": {"flip": False},
    "scale-rotate-flip": {},
}
