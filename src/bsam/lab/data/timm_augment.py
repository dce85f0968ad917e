"""timm's RandAugment, Mixup and CutMix, after random crops and flips."""

from __future__ import annotations

import contextlib
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...common.checks import check_number
from ...common.errors import BsamValueError
from ...common.timm_import import import_timm
from .augment import Augment
from .rand_augment import RandAugment, copied

PREFIX = "timm:"
EXAMPLE = f"{PREFIX}aa=rand-m9-mstd0.5-inc1,mixup=0.8,cutmix=1"
# the sections of timm's names of RandAugment, after "rand"
_SECTION = re.compile(r"(m|mmax|inc)\d+|n[1-9]\d*|(p|mstd)\d+(\.\d+)?|t(weights|3aw|3a)")
_RAND_STREAM, _MIX_STREAM = 0xAA, 0x313  # make these random numbers independent of others from (seed, epoch)


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
        for pair in name.removeprefix(PREFIX).split(","):
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
        """Whether images of a batch are mixed."""
        return self.mixup > 0 or self.cutmix > 0

    def draws(self, n: int, seed: int, epoch: int, side: int) -> Tensor:
        """Return the numbers of :class:`Augment`, and a seed for each image in a seventh column."""
        seeds = np.random.default_rng((seed, epoch, _RAND_STREAM)).integers(0, 2**32, (n, 1))
        return torch.cat([super().draws(n, seed, epoch, side), torch.from_numpy(seeds)], dim=1)

    def moved(self, x: Tensor, draws: Tensor) -> Tensor:
        """Return cropped, mirrored and randomly changed images."""
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


def is_timm(name: str | None) -> bool:
    """Return whether a name of an augmentation is for timm's."""
    return name is not None and name.startswith(PREFIX)
