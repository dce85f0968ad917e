"""How the images of a run become the inputs of its network."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from ...common.errors import BsamRuntimeError
from ..common.progress import ProgressLine
from ..config import Run
from ..data import dataset_entry
from ..data.arrays import Dataset
from ..data.augment import RESIZED_CROP, normalise
from ..data.entries import ArrayData, ImageData
from ..data.images import Resize, load_images
from ..models import input_config, model_entry
from ..models.timm_networks import InputConfig
from ..models.weights import PRETRAINED, check_download, check_model

IMAGENET = InputConfig(224, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225), "bilinear", 0.875)


@dataclass(frozen=True)
class Inputs:
    """Normalisation of stored images, and their interpolation to the network's input size.

    Args:
        side: side of the stored images.
        size: side of the network's inputs.
        channels: channels of the images.
        mean, std: mean and standard deviation per channel, of bytes divided by 255.
        interpolation: Pillow's filter to decode files; stored images are resized with ``"bilinear"`` if it is that,
            otherwise with ``"bicubic"``, with antialiasing if they become smaller.
        crop: share of the shorter side that is kept when a file is decoded.
        class_names: in the order of the network's outputs.
        in_bytes: whether stored images are bytes, as in image files.

    Example:
        >>> import torch
        >>> inputs = Inputs(8, 16, 3, (0.5,) * 3, (0.5,) * 3, "bilinear", 1.0, ("cat", "dog"))
        >>> inputs(torch.zeros(2, 3, 8, 8, dtype=torch.uint8)).shape
        torch.Size([2, 3, 16, 16])
    """

    side: int
    size: int
    channels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str
    crop: float
    class_names: tuple[str, ...]
    in_bytes: bool = True

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Inputs:
        """Return the inputs from JSON values of ``dataclasses.asdict``; raise if one has another type."""
        plain: dict[str, Any] = {name: int(values[name]) for name in ("side", "size", "channels")}
        plain |= {name: tuple(map(float, values[name])) for name in ("mean", "std")}
        if not all(isinstance(name, str) for name in (*values["class_names"], values["interpolation"])):
            raise TypeError
        return cls(**{**values, **plain, "crop": float(values["crop"]), "class_names": tuple(values["class_names"])})

    def __call__(self, x: Tensor) -> Tensor:
        """Return stored images as inputs."""
        return self.resize(self.normalise(x))

    def normalise(self, x: Tensor) -> Tensor:
        """Return stored images, or augmented ones in the same unit, normalised."""
        return normalise(x, self.mean, self.std)

    def resize(self, x: Tensor) -> Tensor:
        """Return normalised images at the network's input size; larger images are reduced with antialiasing."""
        return resized(x, self.size, self.mode)

    def centre(self, x: Tensor) -> Tensor:
        """Return stored images as those that are evaluated; images for random crops are larger."""
        if x.shape[-1] == self.side:
            return x
        side = round(x.shape[-1] * self.side / self.decoding.shorter_side)
        begin = round((x.shape[-1] - side) / 2)
        x = x[:, :, begin : begin + side, begin : begin + side]
        return x if side == self.side else resized(x.float(), self.side, self.mode).round().clamp(0, 255).to(x.dtype)

    @property
    def mode(self) -> str:
        """The interpolation of torch with which stored images are resized, ``"bilinear"`` or ``"bicubic"``."""
        return self.interpolation if self.interpolation == "bilinear" else "bicubic"  # the best that torch has

    @property
    def decoding(self) -> Resize:
        """How a file becomes a stored image."""
        return Resize(self.side, self.crop, self.interpolation)

    @property
    def takes_files(self) -> bool:
        """Whether stored images are like those in image files: bytes, grey or RGB."""
        return self.in_bytes and self.channels in (1, 3)

    def stored(self, pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return decoded RGB pixels (side, side, 3) with the channels of stored images, grey as Pillow computes it."""
        if self.channels == 3:
            return pixels
        grey = (pixels.astype(np.int64) @ (19595, 38470, 7471) + 0x8000) >> 16
        return grey.astype(np.uint8)[:, :, None]


def resized(x: Tensor, size: int, mode: str) -> Tensor:
    """Return square images at another size.

    Without antialiasing, an image that becomes smaller would be sampled: of fine patterns, some pixels would remain.

    Args:
        x: floating-point images (n, channels, side, side).
        size: the new side.
        mode: ``"bilinear"`` or ``"bicubic"``.

    Example:
        >>> import torch
        >>> stripes = torch.tensor([1.0, 0.0]).repeat(4).expand(1, 1, 8, 8)
        >>> resized(stripes, 2, "bilinear")[0, 0, 0]
        tensor([0.5357, 0.4643])
    """
    if x.shape[-1] == size:
        return x
    return F.interpolate(x, size=(size, size), mode=mode, align_corners=False, antialias=size < x.shape[-1])


def load_data(run: Run, data_dir: Path | None = None, cache_dir: Path | None = None) -> tuple[Dataset, list[str]]:
    """Return the data of a run, and a sentence for each corrupt file that was left out.

    Image files are decoded once, at the network's input size, and kept in a cache; training images for random crops are
    larger.
    """
    entry = dataset_entry(run.data).resolve(data_dir)
    if isinstance(entry, ArrayData):
        return _load_arrays(entry, data_dir), []
    assert isinstance(entry, ImageData), entry
    config = input_config(run.model) or replace(IMAGENET, size=model_entry(run.model).images)
    size = run.image_size or config.size
    files = entry.image_files(data_dir)
    resize = Resize(size, config.crop, config.interpolation)
    crops_are_resized = (run.augment or entry.augmentation) == RESIZED_CROP
    with ProgressLine() as line:
        return load_images(
            files,
            resize,
            train=resize.for_random_crops if crops_are_resized else None,
            mean=config.mean,
            std=config.std,
            cache_dir=cache_dir,
            skip_corrupt=run.skip_corrupt,
            progress=functools.partial(line.reach, f"Decoding the images of {files.name}"),
        )


_load_arrays = functools.lru_cache(maxsize=1)(ArrayData.load)  # consecutive runs share a data set


def inputs_of(run: Run, data: Dataset) -> Inputs:
    """Return how the images of a data set become inputs of the run's network.

    Mean and standard deviation are those of the network's pretraining if it has one and the pixels are bytes; otherwise
    those of the data.
    """
    in_bytes = not data.train.x.is_floating_point()
    config, (channels, side) = input_config(run.model), data.test.x.shape[1:3]  # training images may be larger
    if config is None or channels != len(config.mean):  # timm networks also take images with one channel
        config = InputConfig(run.image_size or side, data.mean, data.std, IMAGENET.interpolation, IMAGENET.crop)
    elif not in_bytes:
        config = replace(config, mean=data.mean, std=data.std)
    crop = 1.0 if data.digest is None else config.crop  # images in arrays are not cropped
    size, names = run.image_size or config.size, data.class_names
    return Inputs(side, size, channels, config.mean, config.std, config.interpolation, crop, names, in_bytes)


def check_weights(run: Run, data_dir: Path | None) -> None:
    """Raise if a run's initial weights are missing or belong to another network. Call it before decoding images."""
    if run.weights == PRETRAINED:
        check_download(run.model)
    elif run.weights is not None:
        check_model(Path(find_weights(run.weights, data_dir)), run.model)


def find_weights(weights: str, data_dir: Path | None) -> str | Path:
    """Return the file with a run's initial weights, which may be in the data folder, or ``"pretrained"``."""
    if weights == PRETRAINED:
        return weights
    paths = [Path(weights), *([] if data_dir is None else [data_dir / weights])]
    if found := next(filter(Path.is_file, paths), None):
        return found
    tried = " and no ".join(map(str, paths))
    raise BsamRuntimeError(
        f"there is no {tried}: set --weights to a file, or to `{PRETRAINED}` for the weights that timm downloads"
    )
