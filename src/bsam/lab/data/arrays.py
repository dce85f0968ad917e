"""Check a user's images and labels, and convert them to the tensors that training uses."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...common.errors import BsamTypeError, BsamValueError

Array: TypeAlias = NDArray[np.generic] | Tensor
CHUNK = 1024  # images that are converted to float64 at a time, for the mean and the variance


def as_images(name: str, images: Array) -> Tensor:
    """Return images as a tensor (n, channels, side, side) of bytes or of float32.

    Args:
        name: for error messages.
        images: (n, side, side), (n, side, side, channels) or (n, channels, side, side).

    Example:
        >>> as_images("train", np.zeros((2, 8, 8, 3), np.uint8)).shape
        torch.Size([2, 3, 8, 8])
    """
    x, shape = _as_tensor(name, "images", images), tuple(images.shape)
    if not (x.dtype == torch.uint8 or x.is_floating_point()):
        raise BsamTypeError(f"{name} images must be uint8 (0 to 255) or floating-point numbers, got {x.dtype}")
    if 0 in shape:
        raise BsamValueError(f"{name} has no images, or images without pixels: got the shape {shape}")
    if x.ndim == 3:
        x = x[:, None]
    elif x.ndim == 4 and x.shape[2] != x.shape[3]:
        x = x.permute(0, 3, 1, 2)
    if x.ndim != 4 or x.shape[2] != x.shape[3]:
        raise BsamValueError(
            f"{name} images must be square, of the shape (n, side, side), (n, side, side, channels) or (n, channels, "
            f"side, side), got {shape}: crop, pad or resize them"
        )
    if x.is_floating_point():
        x = x.float()
        if not x.isfinite().all():
            raise BsamValueError(f"{name} images must be finite: they hold NaN or infinite pixels")
    return x.contiguous()


def as_labels(name: str, labels: Array, n: int) -> Tensor:
    """Return ``n`` labels, counted from 0, as an int64 tensor."""
    y = _as_tensor(name, "labels", labels)
    if y.shape != (n,):
        raise BsamValueError(f"{name} labels must have the shape ({n},), one for each image, got {tuple(y.shape)}")
    if y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
        raise BsamTypeError(f"{name} labels must be whole numbers, got {y.dtype}: convert them, as with .astype(int)")
    y = y.long()
    if y.min() < 0:
        raise BsamValueError(f"{name} labels must count from 0, got {int(y.min())}")
    return y


def check_labels(name: str, y: Tensor, classes: int) -> None:
    """Raise unless labels are below the number of classes."""
    if int(y.max()) >= classes:
        raise BsamValueError(f"{name} labels must be between 0 and {classes - 1}, got {int(y.max())}")


def count_classes(y: Tensor) -> int:
    """Return the number of classes in the training labels; raise unless every class occurs."""
    counts = y.bincount()
    if not counts.all():
        missing = int((counts == 0).nonzero()[0])
        raise BsamValueError(
            f"no train label is {missing}, and the largest is {len(counts) - 1}: number the classes from 0 without "
            "gaps, or pass class_names"
        )
    return len(counts)


def mean_and_std(x: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the mean and the standard deviation of each channel, after dividing bytes by 255.

    The standard deviation of a constant channel is returned as 1.

    Example:
        >>> mean_and_std(torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1))
        ((0.5,), (0.5,))
    """
    unit = 1.0 if x.is_floating_point() else 255.0
    total = sum((part.double() / unit).sum((0, 2, 3)) for part in x.split(CHUNK))
    mean = torch.as_tensor(total) / (x.numel() / x.shape[1])
    centred = (part.double() / unit - mean[:, None, None] for part in x.split(CHUNK))
    variance = torch.as_tensor(sum(part.square().sum((0, 2, 3)) for part in centred)) / (x.numel() / x.shape[1])
    return tuple(mean.tolist()), tuple(value or 1.0 for value in variance.sqrt().tolist())


def _as_tensor(name: str, kind: str, values: Array) -> Tensor:
    if isinstance(values, Tensor):
        return values.detach().cpu()
    if not isinstance(values, np.ndarray):
        raise BsamTypeError(f"{name} {kind} must be a numpy array or a tensor, got {type(values).__name__}")
    try:
        return torch.from_numpy(np.require(values, requirements=["C", "W"]))
    except (TypeError, ValueError) as error:  # strings and objects; numbers in the byte order of other machines
        raise BsamTypeError(
            f"{name} {kind} must be numbers in native byte order, got an array of {values.dtype}"
        ) from error
