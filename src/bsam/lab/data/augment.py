"""Random crops, flips and Cutout for whole batches, on the device of the images."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ...common.errors import BsamValueError
from .resized_crop import draw_boxes, resize_boxes

RESIZED_CROP = "resized-crop-flip"
_STREAM, _CROP_STREAM = 0xA46, 0x2C0  # make these random numbers independent of others from (seed, epoch)


@dataclass(frozen=True)
class Augment:
    """Zero padding and a random crop, a random flip, normalisation, and a hole of zeros (Cutout).

    :meth:`draws` returns six numbers for each image: the row and the column of the padded image where the crop begins,
    the steps between its rows (1) and between its columns (1, or -1 for a mirrored image), and the row and the column
    of the hole's top left corner, which lies outside the image if there is no hole. Values stay on the device and
    shapes do not depend on them, so a call can be captured in a CUDA graph after a first call outside it.

    Args:
        pad: width of the border of zeros that is added before the image is cropped to its original size; 0: no crop.
        flip: whether half of the images are mirrored.
        cutout: side of the hole, which is clipped at the border of the image; 0: no hole.
        cutout_p: fraction of the images with a hole.
        mean, std: mean and standard deviation of the pixels per channel.

    Example:
        >>> augment = Augment(mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25))
        >>> images = torch.full((2, 3, 32, 32), 255, dtype=torch.uint8)
        >>> augment(
        ...     images, augment.draws(2, seed=0, epoch=0, side=32)
        ... ).unique().tolist()  # padding, hole, image
        [-2.0, 0.0, 2.0]
    """

    pad: int = 4
    flip: bool = True
    cutout: int = 16
    cutout_p: float = 0.5
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)

    def draws(self, n: int, seed: int, epoch: int, side: int) -> Tensor:
        """Draw random numbers for ``n`` images of ``side`` x ``side`` pixels, a function of the seed and the epoch.

        The crop is shifted by 0 to ``2 * pad`` pixels; the corner of the hole lies between ``-(cutout // 2)`` and
        ``side - cutout // 2 - 1``.
        """
        random = np.random.default_rng((seed, epoch, _STREAM))
        begin = random.integers(0, 2 * self.pad + 1, (n, 2))
        mirrored = random.integers(0, 2, n) * self.flip
        begin[:, 1] += mirrored * (side - 1)  # from the right edge to the left
        step = np.stack([np.ones_like(mirrored), 1 - 2 * mirrored], axis=1)
        corner = random.integers(-(self.cutout // 2), side - self.cutout // 2, (n, 2))
        corner[random.random(n) >= self.cutout_p] = side
        return torch.from_numpy(np.concatenate([begin, step, corner], axis=1))

    def __call__(self, x: Tensor, draws: Tensor) -> Tensor:
        """Augment a batch.

        Args:
            x: images (n, channels, side, side), as bytes or as floating-point numbers.
            draws: (n, 6), the rows of these images.

        Returns:
            float32 images in the channels_last memory format.
        """
        x = normalise(self.moved(x, draws), self.mean, self.std)
        if self.cutout:
            depth = torch.arange(x.shape[-1], device=x.device) - draws[:, 4:6, None]
            inside = depth == depth.clamp(0, self.cutout - 1)
            x.masked_fill_((inside[:, 0, :, None] & inside[:, 1, None, :])[:, None], 0)
        return x

    def moved(self, x: Tensor, draws: Tensor) -> Tensor:
        """Return cropped and mirrored images, before normalisation."""
        if not (self.pad or self.flip):
            return x
        begin, step = draws[:, :4, None].split(2, dim=1)
        source = torch.addcmul(begin, step, torch.arange(x.shape[-1], device=x.device))
        image = torch.arange(len(x), device=x.device)[:, None, None]
        padded = F.pad(x, (self.pad,) * 4).permute(0, 2, 3, 1)
        return padded[image, source[:, 0, :, None], source[:, 1, None, :]].permute(0, 3, 1, 2)


@dataclass(frozen=True)
class ResizedCrop:
    """Normalisation, a crop of random size and shape that is resized (RandomResizedCrop), and a random flip.

    Called as :class:`Augment` is. :meth:`draws` returns five numbers for each image: top, left, height and width of the
    crop, and whether it is mirrored.

    Args:
        size: side of the resized crops; 0: that of the images.
        cubic: bicubic instead of bilinear interpolation, both with antialiasing.
        scale: smallest and largest share of the image's area.
        ratio: smallest and largest ratio of width to height.
        mean, std: mean and standard deviation of the pixels per channel.

    Example:
        >>> augment = ResizedCrop(size=24)
        >>> images = torch.zeros(2, 3, 32, 32, dtype=torch.uint8)
        >>> augment(images, augment.draws(2, seed=0, epoch=0, side=32)).shape
        torch.Size([2, 3, 24, 24])
    """

    size: int = 0
    cubic: bool = False
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)

    def draws(self, n: int, seed: int, epoch: int, side: int) -> Tensor:
        """Draw random numbers for ``n`` images of ``side`` x ``side`` pixels, a function of the seed and the epoch."""
        random = np.random.default_rng((seed, epoch, _CROP_STREAM))
        boxes = draw_boxes(n, side, self.scale, self.ratio, random)
        return torch.from_numpy(np.concatenate([boxes, random.integers(0, 2, (n, 1))], axis=1))

    def __call__(self, x: Tensor, draws: Tensor) -> Tensor:
        """Augment a batch, given the rows of :meth:`draws` for these images; see :class:`Augment`."""
        return resize_boxes(normalise(x, self.mean, self.std), draws, self.size or x.shape[-1], self.cubic)


def normalise(x: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """Subtract the mean and divide by the standard deviation, per channel.

    Args:
        x: images (n, channels, height, width), floating-point numbers, or bytes, which are divided by 255 first.
        mean, std: one per channel, or one for all.

    Returns:
        A new float32 tensor in the channels_last memory format.

    Example:
        >>> normalise(
        ...     torch.full((1, 1, 1, 2), 255, dtype=torch.uint8), mean=(0.5,), std=(0.25,)
        ... ).flatten()
        tensor([2., 2.])
    """
    unit = 1.0 if x.is_floating_point() else 255.0
    shift = on_device(tuple(unit * m for m in mean), torch.float32, x.device).view(-1, 1, 1)
    scale = on_device(tuple(1 / (unit * s) for s in std), torch.float32, x.device).view(-1, 1, 1)
    return (x.contiguous(memory_format=torch.channels_last) - shift).mul_(scale)


@cache
def on_device(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return constants as a tensor, copied to the device only once: a copy per batch could not be captured."""
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=dtype, device=device)


AUGMENTATIONS: dict[str, Augment | ResizedCrop] = {
    "none": Augment(pad=0, flip=False, cutout=0),
    "crop-flip": Augment(cutout=0),
    "crop-flip-cutout": Augment(),
    RESIZED_CROP: ResizedCrop(),
}


def augmentation(name: str, mean: tuple[float, ...], std: tuple[float, ...]) -> Augment | ResizedCrop:
    """Return one of :data:`AUGMENTATIONS` with this normalisation.

    Example:
        >>> augmentation("flip-crop", mean=(0.0,), std=(1.0,))
        Traceback (most recent call last):
        ...
        bsam.common.errors.BsamValueError: augmentation must be one of none, crop-flip, ...; got 'flip-crop'
    """
    if name not in AUGMENTATIONS:
        raise BsamValueError(f"augmentation must be one of {', '.join(AUGMENTATIONS)}; got {name!r}")
    return replace(AUGMENTATIONS[name], mean=mean, std=std)
