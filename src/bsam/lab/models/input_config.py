"""The image preprocessing that networks expect."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...common.timm_import import import_timm
from . import model_entry
from .timm_networks import check_timm_name, timm_name


@dataclass(frozen=True)
class InputConfig:
    """Preprocessing of the images that pretrained weights were trained with.

    Args:
        size: side of the image, in pixels.
        mean, std: mean and standard deviation of the red, green and blue channels, for pixels between 0 and 1.
        interpolation: how images are resized, such as ``bilinear`` or ``bicubic``.
        crop: side of the centre crop used in evaluation, relative to the shorter side of the image.
    """

    size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str
    crop: float


# He et al. use pixels between 0 and 255, not divided by std: tools/convert_weights.py multiplies the stem by 255 * std.
RESNET50 = InputConfig(
    224, (123.68 / 255, 116.779 / 255, 103.939 / 255), (0.229, 0.224, 0.225), interpolation="bilinear", crop=0.875
)


def input_config(name: str) -> InputConfig | None:
    """Return the preprocessing that a network expects; None if it uses that of the data set.

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
    weights = import_timm().get_pretrained_cfg(check_timm_name(timm), allow_unregistered=True)
    config = import_timm().data.resolve_data_config(pretrained_cfg={} if weights is None else weights.to_dict())
    size = min(config["input_size"][1:])
    return InputConfig(size, tuple(config["mean"]), tuple(config["std"]), config["interpolation"], config["crop_pct"])
