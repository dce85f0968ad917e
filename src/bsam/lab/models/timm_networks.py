"""Networks from timm, the original ResNet-50, and the preprocessing that pretrained networks expect."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from ...common.errors import BsamValueError
from ...common.timm_import import import_timm

TIMM_NETWORK = "timm:"  # and the name in timm


def check_timm_name(name: str) -> str:
    """Return ``name``, which may have a weights tag; raise if timm has no such network.

    Example:
        >>> check_timm_name("resnet18d.ra2_in1k")
        'resnet18d.ra2_in1k'
        >>> check_timm_name("resnet8")
        Traceback (most recent call last):
        ...
        bsam.common.errors.BsamValueError: timm has no network 'resnet8': see timm.list_models()
    """
    timm = import_timm()
    architecture, _, tag = name.partition(".")
    if timm.is_model(architecture) and (not tag or name in timm.list_pretrained(f"{architecture}.*")):
        return name
    raise BsamValueError(f"timm has no network {name!r}: see timm.list_models()")


def timm_network(
    name: str, classes: int = 10, channels: int = 3, image_size: int | None = None, **settings: int | bool
) -> nn.Module:
    """Return a timm network with random weights.

    Args:
        image_size: side of the images, for networks that are built for one size, such as vision transformers; others
            take images of many sizes and ignore it.

    Example:
        >>> import torch
        >>> timm_network("test_resnet", classes=7)(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 7])
        >>> timm_network("vit_tiny_patch16_224", image_size=64)(
        ...     torch.zeros(2, 3, 64, 64)
        ... ).shape
        torch.Size([2, 10])
    """
    timm = import_timm()
    known = check_timm_name(name)
    sizes = {"num_classes": classes, "in_chans": channels}
    config = timm.get_pretrained_cfg(known, allow_unregistered=True)
    if image_size is not None and config is not None and config.fixed_input_size:
        sizes["img_size"] = image_size
    network: nn.Module = timm.create_model(known, **sizes, **settings)
    return network


def vit(
    patch: int, width: int, depth: int, heads: int, classes: int = 10, channels: int = 3, image_size: int | None = None
) -> nn.Module:
    """Return timm's vision transformer for small images, with random weights.

    Args:
        patch: side of the patches, in pixels.
        width: length of the vector of a patch.
        depth: number of blocks.
        heads: number of attention heads.
        classes: number of classes.
        channels: number of image channels.
        image_size: side of the images; None means 8 patches.

    Example:
        >>> import torch
        >>> vit(4, 16, 2, 2, image_size=28, channels=1)(torch.zeros(2, 1, 28, 28)).shape
        torch.Size([2, 10])

    Reference: Dosovitskiy et al., An Image is Worth 16x16 Words, ICLR 2021.
    """
    shape = {"patch_size": patch, "embed_dim": width, "depth": depth, "num_heads": heads}
    return timm_network("vit_tiny_patch16_224", classes, channels, image_size or 8 * patch, **shape)


def resnet50(classes: int = 10, channels: int = 3) -> nn.Module:
    """Return the original ResNet-50, whose blocks halve the image size in the first 1x1 convolution.

    timm's ``resnet50`` halves it in the 3x3 convolution (ResNet v1.5), and its batch norms have an epsilon of 1e-5
    instead of 1e-3. The names and shapes of the weights are the same. Here the weights of all batch norms start at 1;
    in timm's network those of the last norm in each block start at 0.

    Reference: He, Zhang, Ren, Sun: Deep Residual Learning for Image Recognition, CVPR 2016.
    """
    network = timm_network("resnet50", classes, channels, zero_init_last=False)
    for stage in (network.layer2, network.layer3, network.layer4):
        block = stage[0]  # type: ignore[index]
        block.conv1.stride, block.conv2.stride = block.conv2.stride, block.conv1.stride  # type: ignore[union-attr]
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eps = 1e-3
    return network


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
