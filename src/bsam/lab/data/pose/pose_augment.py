"""Random scales, rotations and flips of persons and their joints, for whole batches on the device of the images."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..augment import normalise, on_device
from .affine import apply, centre_map, compose, inverse, warp

_STREAM = 0x905E  # makes these random numbers independent of others that are drawn from (seed, epoch)


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
            :class:`bsam.lab.data.pose.joints.Skeleton`.
        scale: magnifications are uniform in 1 - scale to 1 + scale.
        rotation: angles are uniform in -rotation to rotation degrees.
        rotation_p: fraction of the images that are rotated.
        flip: whether half of the images are mirrored.
        mean, std: mean and standard deviation of the pixels per channel.

    Example:
        >>> from bsam.lab.data.pose.stick_figures import stick_figures
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
        random = np.random.default_rng((seed, epoch, _STREAM))
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
        mean, std = (tuple(unit * value for value in values) for values in (self.mean, self.std))
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
