"""Augmentation of whole batches, on the device of the images.

Crops, flips and Cutout; crops that are resized to one size (RandomResizedCrop); timm's RandAugment, Mixup and CutMix.
"""

from __future__ import annotations

import contextlib
import math
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from ...common.checks import check_number
from ...common.errors import BsamValueError
from ...common.timm_import import import_timm
from .rand_augment import RandAugment, copied

RESIZED_CROP = "resized-crop-flip"
# make these random numbers independent of others from (seed, epoch)
_SHIFT_STREAM = 0xA46
_CROP_STREAM = 0x2C0


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
        random = np.random.default_rng((seed, epoch, _SHIFT_STREAM))
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


def augmentation(name: str) -> Augment | ResizedCrop:
    """Return one of :data:`AUGMENTATIONS`, or timm's for names that begin with ``timm:``. Mean and standard deviation
    are not set.

    Example:
        >>> augmentation("flip-crop")
        Traceback (most recent call last):
        ...
        bsam.common.errors.BsamValueError: augmentation must be one of none, crop-flip, ...; got 'flip-crop'
    """
    if name.startswith(TIMM_AUGMENT):
        return TimmAugment.named(name)
    if name not in AUGMENTATIONS:
        raise BsamValueError(f"augmentation must be one of {', '.join(AUGMENTATIONS)}; got {name!r}")
    return AUGMENTATIONS[name]


TRIES = 10  # boxes drawn for an image until one fits, as in torchvision and timm


def draw_boxes(
    n: int, side: int, scale: tuple[float, float], ratio: tuple[float, float], random: np.random.Generator
) -> NDArray[np.int64]:
    """Return top, left, height and width of ``n`` random boxes, as torchvision's RandomResizedCrop draws them.

    The first of ten boxes that fits into the image is taken; if none does, the whole image.

    Args:
        scale: smallest and largest share of the image's area.
        ratio: smallest and largest ratio of width to height, which is uniform on a logarithmic scale.

    Example:
        >>> draw_boxes(2, 32, (1.0, 1.0), (1.0, 1.0), np.random.default_rng(0)).tolist()
        [[0, 0, 32, 32], [0, 0, 32, 32]]
    """
    area = side**2 * random.uniform(*scale, (n, TRIES))
    shape = np.exp(random.uniform(math.log(ratio[0]), math.log(ratio[1]), (n, TRIES)))
    heights = np.rint(np.sqrt(area / shape))
    widths = np.rint(np.sqrt(area * shape))
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
        draws: (n, 5), top, left, height and width of the box of each image, and 1 to mirror it, otherwise 0.

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


TIMM_AUGMENT = "timm:"
EXAMPLE = f"{TIMM_AUGMENT}aa=rand-m9-mstd0.5-inc1,mixup=0.8,cutmix=1"
# the sections of timm's names of RandAugment, after "rand"
_SECTION = re.compile(r"(m|mmax|inc)\d+|n[1-9]\d*|(p|mstd)\d+(\.\d+)?|t(weights|3aw|3a)")
# make these random numbers independent of others from (seed, epoch)
_RAND_STREAM = 0xAA
_MIX_STREAM = 0x313


@dataclass(frozen=True)
class TimmAugment(Augment):
    """Crop and flip, then RandAugment on each image, and Mixup or CutMix on pairs of images of a batch.

    The random numbers of RandAugment are a function of seed, epoch and image, those of Mixup and CutMix of seed, epoch
    and the first image of the batch. Calls take draws in host memory, for images on any device.

    Args:
        aa: timm's name of the RandAugment, such as ``rand-m9-mstd0.5-inc1``; empty: none.
        mixup, cutmix: alpha of Mixup and of CutMix; 0: none. With both, half of the batches get CutMix.
        pad, flip, cutout, cutout_p, mean, std: as in :class:`Augment`; there are no holes.

    Example:
        >>> augment = TimmAugment.named("timm:aa=rand-m9,mixup=0.8")
        >>> augment.aa, augment.mixup, augment.cutmix
        ('rand-m9', 0.8, 0.0)
    """

    cutout: int = 0
    aa: str = ""
    mixup: float = 0.0
    cutmix: float = 0.0

    @classmethod
    def named(cls, name: str) -> TimmAugment:
        """Return the augmentation with a name such as ``timm:aa=rand-m9-mstd0.5-inc1,mixup=0.8,cutmix=1``."""
        given: dict[str, Any] = {}
        for pair in name.removeprefix(TIMM_AUGMENT).split(","):
            key, _, value = pair.partition("=")
            if key not in ("aa", "mixup", "cutmix") or key in given or not value:
                raise BsamValueError(f"augment must be like {EXAMPLE}, with one or more of the three; got {name!r}")
            given[key] = value if key == "aa" else _alpha(key, value)
        if "aa" in given:
            first, *sections = given["aa"].split("-")
            if first != "rand" or not all(map(_SECTION.fullmatch, sections)):
                raise BsamValueError(
                    f"aa of the augmentation must be a RandAugment of timm, such as rand-m9-mstd0.5-inc1; got "
                    f"{given['aa']!r}"
                )
        if not any(given.values()):
            raise BsamValueError(f"augment {name!r} does nothing but crop and flip: use crop-flip")
        return cls(**given)

    @property
    def mixes(self) -> bool:
        return self.mixup > 0 or self.cutmix > 0

    def draws(self, n: int, seed: int, epoch: int, side: int) -> Tensor:
        """Return the numbers of :class:`Augment`, and a seed for each image in a seventh column."""
        seeds = np.random.default_rng((seed, epoch, _RAND_STREAM)).integers(0, 2**32, (n, 1))
        return torch.cat([super().draws(n, seed, epoch, side), torch.from_numpy(seeds)], dim=1)

    def moved(self, x: Tensor, draws: Tensor) -> Tensor:
        x = super().moved(x, copied(draws[:, :6], x.device))
        return self._rand_augment(x, draws[:, 6].tolist()) if self.aa else x

    @cached_property
    def _rand_augment(self) -> RandAugment:
        return RandAugment(self.aa, tuple(min(255, round(255 * value)) for value in self.mean))

    def mix(self, x: Tensor, classes: Tensor, count: int, *key: int) -> tuple[Tensor, Tensor]:
        """Return a mixed batch, and the share of each of ``count`` classes in each image.

        Args:
            x: images, which are overwritten.
            classes: their classes.
            count: number of classes.
            key: seed, epoch and the number of the first image.
        """
        if len(x) % 2:
            raise BsamValueError(f"mixup and cutmix need batches of an even size in each process, got {len(x)}")
        import_timm()
        from timm.data.mixup import Mixup

        mixup = Mixup(self.mixup, self.cutmix, label_smoothing=0.0, num_classes=count)
        with _restored_generators():
            np.random.seed(int(np.random.default_rng((*key, _MIX_STREAM)).integers(2**32)))
            mixed, shares = mixup(x, classes)
        return mixed, shares


def _alpha(name: str, text: str) -> float:
    try:
        return float(check_number(name, float(text), low=0))
    except ValueError as error:
        raise BsamValueError(f"{name} of the augmentation must be a finite number from 0, got {text!r}") from error


@contextlib.contextmanager
def _restored_generators() -> Iterator[None]:
    """Restore the global generators that timm draws from."""
    states = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
