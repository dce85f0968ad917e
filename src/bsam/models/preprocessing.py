"""What networks expect of their images."""

from __future__ import annotations

from dataclasses import dataclass, replace

from . import model_entry
from .timm_import import import_timm
from .timm_networks import check_timm_name, timm_name


@dataclass(frozen=True)
class InputConfig:
    """Size and scale of the images that pretrained weights were trained with.

    Args:
        size: side of the image, in pixels.
        mean: of the channels red, green and blue, where pixels are between 0 and 1; subtracted first.
        std: of the channels; then divided by.
        interpolation: how images are resized: ``bilinear``, ``bicubic`` ...
        crop: in evaluation, the side of the part in the middle that is used, where the shorter side of the image is 1.
    """

    size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str
    crop: float


# He et al. subtract these means, of pixels from 0 to 255, and divide by nothing: conversion folds std into the stem.
RESNET50 = InputConfig(
    224, (123.68 / 255, 116.779 / 255, 103.939 / 255), (0.229, 0.224, 0.225), interpolation="bilinear", crop=0.875
)


def input_config(name: str) -> InputConfig | None:
    """Return what a network expects of its images; None for the networks that take the data set's own.

    Example:
        >>> input_config("timm:tf_efficientnet_lite1")
        InputConfig(size=240, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5),
            interpolation='bicubic', crop=0.882)
        >>> input_config("resnet18") is None
        True
    """
    timm = timm_name(name)
    if timm is None:
        entry = model_entry(name)
        return replace(RESNET50, size=entry.images) if "resnet50" in (entry.name, entry.backbone) else None
    timm_data = import_timm().data
    found = timm_data.resolve_data_config(pretrained_cfg=_pretrained_cfg(check_timm_name(timm)))
    size = min(found["input_size"][1:])
    return InputConfig(size, tuple(found["mean"]), tuple(found["std"]), found["interpolation"], found["crop_pct"])


def _pretrained_cfg(name: str) -> dict[str, object]:
    """Return what timm knows of the weights of a network; empty if it has none."""
    found = import_timm().get_pretrained_cfg(name, allow_unregistered=True)
    return {} if found is None else found.to_dict()
