"""Crops, flips and holes for whole batches, on the device where the images are."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ..core.errors import BsamValueError
from .examples import Dataset

_STREAM = 0xA46  # keeps these numbers apart from others that are drawn from (seed, epoch)


@dataclass(frozen=True)
class Draws:
    """What chance decides about each training image in one epoch: a function of the seed and the epoch, whatever the
    order of the images.

    Args:
        table: one row per image: in the padded image the row and the column where the crop begins, the steps that it
            then takes down and across (1, or -1 where left and right change places), and the top left corner of the
            hole, which lies outside of the image where there is no hole.

    Example:
        >>> draws = Draws.of(1000, seed=0, epoch=3)
        >>> draws[torch.tensor([7, 2])].table.equal(Draws.of(1000, seed=0, epoch=3).table[[7, 2]])
        True
    """

    table: Tensor

    @staticmethod
    def of(
        n: int,
        seed: int,
        epoch: int,
        pad: int = 4,
        side: int = 32,
        flip: bool = True,
        cutout: int = 16,
        cutout_p: float = 0.5,
    ) -> Draws:
        """Draw for ``n`` images.

        Args:
            n: how many.
            seed: of the run, not negative.
            epoch: counted from 0.
            pad: pixels around the image; the crop is shifted by 0 to ``2 * pad``.
            side: of the image.
            flip: whether half of the images are mirrored.
            cutout: side of the hole; its corner lies from ``-(cutout // 2)`` to ``side - cutout // 2 - 1``.
            cutout_p: share of the images that get one.
        """
        if min(seed, epoch) < 0:
            raise BsamValueError(f"seed and epoch must not be negative, got {seed!r} and {epoch!r}")
        random = np.random.default_rng((seed, epoch, _STREAM))
        begin = random.integers(0, 2 * pad + 1, (n, 2))
        mirrored = random.integers(0, 2, n) * flip
        begin[:, 1] += mirrored * (side - 1)  # from the right edge, and back
        step = np.stack([np.ones_like(mirrored), 1 - 2 * mirrored], axis=1)
        corner = random.integers(-(cutout // 2), side - cutout // 2, (n, 2))
        corner[random.random(n) >= cutout_p] = side
        return Draws(torch.from_numpy(np.concatenate([begin, step, corner], axis=1)))

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: Tensor | slice) -> Draws:
        return Draws(self.table[index])

    def to(self, device: torch.device | str) -> Draws:
        """The same on another device."""
        return Draws(self.table.to(device))

    @property
    def begin(self) -> Tensor:
        """Where the crop begins: (n, 2), rows before columns."""
        return self.table[:, 0:2]

    @property
    def step(self) -> Tensor:
        """From one pixel to the next: (n, 2)."""
        return self.table[:, 2:4]

    @property
    def corner(self) -> Tensor:
        """Of the hole, at its top left: (n, 2)."""
        return self.table[:, 4:6]


@dataclass(frozen=True)
class Augment:
    """Zeros around the image and a random crop; a flip; bytes to normalised numbers; and a hole of zeros (Cutout) in
    the result.

    Each image of the batch is treated by its own row of the draws, as by the usual pipeline that takes one image at a
    time. No value comes back to the host and no shape depends on one, so that it can be captured in a CUDA graph, after
    a first call outside.

    Args:
        pad: pixels of zeros around the image before it is cropped to its old size; 0 crops nothing.
        flip: whether half of the images are mirrored.
        cutout: side of the hole, which ends at the border of the image; 0 makes none.
        cutout_p: share of the images that get one.
        mean: of the pixels, per channel.
        std: their standard deviation.

    Example:
        >>> augment = Augment(mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25))
        >>> images, draws = torch.full((2, 3, 32, 32), 255, dtype=torch.uint8), augment.draws(2, seed=0, epoch=0, side=32)
        >>> augment(images, draws).unique().tolist()  # the padding, the hole, the image
        [-2.0, 0.0, 2.0]
    """

    pad: int = 4
    flip: bool = True
    cutout: int = 16
    cutout_p: float = 0.5
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)

    def __post_init__(self) -> None:
        if min(self.pad, self.cutout) < 0:
            raise BsamValueError(f"pad and cutout must not be negative, got {self.pad!r} and {self.cutout!r}")
        if not 0 <= self.cutout_p <= 1:
            raise BsamValueError(f"cutout_p must lie between 0 and 1, got {self.cutout_p!r}")

    def draws(self, n: int, seed: int, epoch: int, side: int) -> Draws:
        """The draws for ``n`` images of ``side`` x ``side`` pixels."""
        return Draws.of(n, seed, epoch, self.pad, side, self.flip, self.cutout, self.cutout_p)

    def __call__(self, x: Tensor, draws: Draws) -> Tensor:
        """Augment a batch.

        Args:
            x: images (n, channels, side, side), as bytes or as numbers.
            draws: one row for each of them.

        Returns:
            float32 in the channels_last layout.
        """
        if len(draws) != len(x):
            raise BsamValueError(f"{len(x)} images need as many draws, got {len(draws)}")
        pixels = torch.arange(x.shape[-1], device=x.device)
        if self.pad or self.flip:
            x = self._cropped(x, draws, pixels)
        x = normalise(x, self.mean, self.std)
        if self.cutout:
            depth = pixels - draws.corner[:, :, None]
            inside = depth == depth.clamp(0, self.cutout - 1)
            x.masked_fill_((inside[:, 0, :, None] & inside[:, 1, None, :])[:, None], 0)
        return x

    def _cropped(self, x: Tensor, draws: Draws, pixels: Tensor) -> Tensor:
        image = torch.arange(len(x), device=x.device)[:, None, None]
        source = torch.addcmul(draws.begin[:, :, None], draws.step[:, :, None], pixels)
        channels_last = F.pad(x, (self.pad,) * 4).permute(0, 2, 3, 1)
        return channels_last[image, source[:, 0, :, None], source[:, 1, None, :]].permute(0, 3, 1, 2)


def normalise(x: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """Subtract the mean and divide by the standard deviation, per channel.

    Args:
        x: images (n, channels, height, width): bytes, which are divided by 255 first, or numbers.
        mean: per channel, or one for all.
        std: likewise.

    Returns:
        A new float32 tensor in the channels_last layout.

    Example:
        >>> normalise(torch.full((1, 1, 1, 2), 255, dtype=torch.uint8), mean=(0.5,), std=(0.25,)).flatten()
        tensor([2., 2.])
    """
    if {len(mean), len(std)} - {1, x.shape[1]}:
        raise BsamValueError(
            f"images of {x.shape[1]} channels need as many means and standard deviations, got {mean!r} and {std!r}"
        )
    unit = 1.0 if x.is_floating_point() else 255.0
    shift, scale = (
        _constants(tuple(unit * m for m in mean), x.device),
        _constants(tuple(1 / (unit * s) for s in std), x.device),
    )
    return (x.contiguous(memory_format=torch.channels_last) - shift).mul_(scale)


_ON_DEVICE: dict[tuple[tuple[float, ...], torch.device], Tensor] = {}


def _constants(values: tuple[float, ...], device: torch.device) -> Tensor:
    """One number per channel, brought to the device once: a copy from the host would make every batch wait, and cannot
    be captured.
    """
    if (values, device) not in _ON_DEVICE:
        with torch.inference_mode(False):
            _ON_DEVICE[values, device] = torch.tensor(values, dtype=torch.float32, device=device).view(-1, 1, 1)
    return _ON_DEVICE[values, device]


AUGMENTATIONS: dict[str, Augment] = {
    "none": Augment(pad=0, flip=False, cutout=0),
    "crop-flip": Augment(cutout=0),
    "crop-flip-cutout": Augment(),
}


def augmentation(name: str, data: Dataset) -> Augment:
    """One of :data:`AUGMENTATIONS`, with the mean and the standard deviation of a data set.

    Example:
        >>> augmentation("flip-crop", None)
        Traceback (most recent call last):
        ...
        bsam.core.errors.BsamValueError: augmentation must be one of none, crop-flip, crop-flip-cutout; got 'flip-crop'
    """
    if name not in AUGMENTATIONS:
        raise BsamValueError(f"augmentation must be one of {', '.join(AUGMENTATIONS)}; got {name!r}")
    return replace(AUGMENTATIONS[name], mean=data.mean, std=data.std)
