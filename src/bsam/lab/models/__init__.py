"""Networks, and the registry :data:`MODELS`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from ...common.checks import check_count
from ...common.errors import BsamError, BsamRuntimeError, BsamTypeError, BsamValueError
from ...common.timm_import import import_timm
from ..common.names import call_with, describe_error, find_function, is_own, suggestion
from .cifar import DigitsNet, MobileNetV1, PyramidNet, ResNet, WideResNet
from .simcc import simcc_resnet8, simcc_resnet50
from .timm_networks import RESNET50, TIMM_NETWORK, InputConfig, check_timm_name, resnet50, timm_network, vit


@dataclass(frozen=True)
class ModelEntry:
    """Description of a network, for the command line, the runs and the reports.

    Args:
        name: name on the command line.
        build: function that builds the network from ``classes=`` and ``channels=``, for pose also ``side=`` and ``k=``.
        title: name in tables.
        parameters: number of parameters, with 10 classes or joints and ``channels`` image channels.
        images: side of the images it was designed for, in pixels.
        reference: authors, venue and year; empty for our own networks.
        channels: number of channels of those images.
        memory_format: memory format of the weights.
        backbone: for a pose network, the name of its backbone, whose weights can be loaded; None for the others.
        resizable: whether it can be built for images of another size, with ``image_size=``.
        needs_size: whether it is always built with ``image_size=``: a function of the user may ask for it.
        timm: its name in timm, for networks called ``timm:NAME``; None for the others.
    """

    name: str
    build: Callable[..., nn.Module]
    title: str
    parameters: int
    images: int
    reference: str = ""
    channels: int = 3
    memory_format: torch.memory_format = torch.channels_last
    backbone: str | None = None
    resizable: bool = False
    needs_size: bool = False
    timm: str | None = None


_RESNET = "He et al., CVPR 2016"
_WIDE_RESNET = "Zagoruyko & Komodakis, BMVC 2016"
_PYRAMID = "Han et al., CVPR 2017"
_MOBILE = "Howard et al., 2017"
_SIMCC = "Li et al., ECCV 2022"
_VIT = "Dosovitskiy et al., ICLR 2021"
# widths of the stages
_FOR_CIFAR = (16, 32, 64)
_FOR_IMAGENET = (64, 128, 256, 512)
_SMALL_MOBILE = partial(MobileNetV1, stem=8, widths=(16, 32, 32, 64), strides=(1, 2, 1, 2))

MODELS: dict[str, ModelEntry] = {
    entry.name: entry
    for entry in (
        # contiguous: other formats change the last bits of the demo's numbers
        ModelEntry("digits_net", DigitsNet, "DigitsNet", 9_978, 8, channels=1, memory_format=torch.contiguous_format),
        ModelEntry("resnet8", partial(ResNet, _FOR_CIFAR, 1), "ResNet-8", 78_042, 32, _RESNET),
        ModelEntry("resnet20", partial(ResNet, _FOR_CIFAR, 3), "ResNet-20", 272_474, 32, _RESNET),
        ModelEntry("resnet18", partial(ResNet, _FOR_IMAGENET, 2), "ResNet-18", 11_173_962, 32, _RESNET),
        ModelEntry("resnet50", resnet50, "ResNet-50", 23_528_522, 224, _RESNET),
        ModelEntry("wide_resnet10_1", partial(WideResNet, 10, 1), "WideResNet-10-1", 77_850, 32, _WIDE_RESNET),
        ModelEntry("wide_resnet28_10", partial(WideResNet, 28, 10), "WideResNet-28-10", 36_479_194, 32, _WIDE_RESNET),
        ModelEntry("pyramidnet8", partial(PyramidNet, 8, 48), "PyramidNet-8", 114_906, 32, _PYRAMID),
        ModelEntry("pyramidnet110", partial(PyramidNet, 110, 270), "PyramidNet-110", 28_485_477, 32, _PYRAMID),
        ModelEntry("mobilenet_v1_small", _SMALL_MOBILE, "MobileNetV1, small", 5_850, 32, _MOBILE),
        ModelEntry("mobilenet_v1", MobileNetV1, "MobileNetV1", 3_217_226, 32, _MOBILE),
        ModelEntry("vit-nano", partial(vit, 2, 64, 2, 2), "ViT-nano", 105_290, 16, _VIT, 1, resizable=True),
        ModelEntry("vit-tiny", partial(vit, 4, 192, 12, 3), "ViT-Ti", 5_362_762, 32, _VIT, resizable=True),
        ModelEntry("vit-small", partial(vit, 4, 384, 12, 6), "ViT-S", 21_342_346, 32, _VIT, resizable=True),
        ModelEntry("simcc_resnet8", simcc_resnet8, "SimCC, ResNet-8", 143_834, 64, _SIMCC, backbone="resnet8"),
        ModelEntry("simcc_resnet50", simcc_resnet50, "SimCC, ResNet-50", 23_595_082, 256, _SIMCC, backbone="resnet50"),
    )
}


def model_entry(name: str) -> ModelEntry:
    """Return the entry of a network: one from :data:`MODELS`, or a new one for a timm network called ``timm:NAME``, or
    for a function of the user, ``MODULE:FUNCTION``, which is imported when the network is built.

    Entries for timm have ``parameters`` and ``images`` set to 0, since neither is known before the network is built;
    :func:`input_config` returns the image size.

    Example:
        >>> model_entry("resnet8").title, model_entry("timm:resnet18d").title
        ('ResNet-8', 'resnet18d')
        >>> model_entry("resnet9")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        bsam.common.errors.BsamValueError: model must be one of ... got 'resnet9'. Did you mean 'resnet8'?
    """
    if name in MODELS:
        return MODELS[name]
    if name.startswith(TIMM_NETWORK):
        timm = name.removeprefix(TIMM_NETWORK)
        build = partial(timm_network, timm)
        return ModelEntry(name, build, title=timm, parameters=0, images=0, reference="timm", resizable=True, timm=timm)
    if is_own(name):
        build = partial(own_network, name)
        return ModelEntry(name, build, name, 0, OWN_NETWORK_SIDE, memory_format=torch.preserve_format, needs_size=True)
    hint = suggestion(name, MODELS)
    raise BsamValueError(
        f"model must be one of {', '.join(MODELS)}, {TIMM_NETWORK}NAME or MODULE:FUNCTION; got {name!r}{hint}"
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
    entry = model_entry(name)
    if entry.timm is None:
        return replace(RESNET50, size=entry.images) if "resnet50" in (entry.name, entry.backbone) else None
    weights = import_timm().get_pretrained_cfg(check_timm_name(entry.timm), allow_unregistered=True)
    config = import_timm().data.resolve_data_config(pretrained_cfg={} if weights is None else weights.to_dict())
    size = min(config["input_size"][1:])
    return InputConfig(size, tuple(config["mean"]), tuple(config["std"]), config["interpolation"], config["crop_pct"])


def build(
    name: str, classes: int = 10, channels: int | None = None, seed: int | None = None, **settings: Any
) -> nn.Module:
    """Build a network on torch's default device, in the memory format of its entry.

    Args:
        name: one of ``MODELS``, ``timm:NAME`` for any timm network, with random weights, or ``MODULE:FUNCTION``.
        classes: number of classes or joints.
        channels: number of image channels; None uses that of the entry (1 for ``digits_net``, 3 for the others).
        seed: seed of the initial weights. They are drawn on the CPU, so they are the same for every device, and the
            global generators do not change. None draws from the global generators.
        settings: further arguments of the network, such as ``side`` and ``k`` of SimCC, or ``image_size`` of
            vision transformers.

    Example:
        >>> build("resnet8", classes=100, seed=0)(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 100])
        >>> build("timm:test_vit", classes=5, seed=0)(torch.zeros(2, 3, 160, 160)).shape
        torch.Size([2, 5])
        >>> build("simcc_resnet8", classes=14, seed=0, side=32)(
        ...     torch.zeros(2, 3, 32, 32)
        ... ).shape
        torch.Size([2, 14, 2, 64])
    """
    entry = model_entry(name)
    check_count("classes", classes)
    channels = entry.channels if channels is None else check_count("channels", channels)
    if seed is None:
        model = entry.build(classes=classes, channels=channels, **settings)
    else:
        check_count("seed", seed, low=0)
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.default_generator.manual_seed(seed)  # torch.manual_seed would reseed the GPUs too
            model = entry.build(classes=classes, channels=channels, **settings)
    return model.to(torch.get_default_device(), memory_format=entry.memory_format)  # type: ignore[call-overload]


OWN_NETWORK_SIDE = 224  # pixels a side of image files, unless the run has another image size


def own_network(name: str, classes: int, channels: int, image_size: int | None = None) -> nn.Module:
    """Import a function or a class, and return the network that it makes.

    Args:
        name: ``MODULE:FUNCTION``. It gets those of the other arguments, and of ``input_shape`` (channels, side, side),
            that its signature names.
    """
    function = find_function(name, "model")
    offered = {
        "classes": classes,
        "channels": channels,
        "image_size": image_size,
        "input_shape": None if image_size is None else (channels, image_size, image_size),
    }
    try:
        network = call_with(function, offered, name)
    except BsamError:
        raise
    except Exception as error:
        described = describe_error(error, name.partition(":")[0])
        raise BsamRuntimeError(f"{name} raised {described}: correct the function") from error
    check_network(network, name)
    return network


def check_network(network: object, name: str) -> None:
    """Raise unless a function of the user returned a network whose weights all have their shapes."""
    if not isinstance(network, nn.Module):
        raise BsamTypeError(f"{name} must return a torch.nn.Module, got {type(network).__name__}")
    for layer, module in network.named_modules():
        if isinstance(module, LazyModuleMixin):
            raise BsamValueError(
                f"{name} has the lazy layer {layer or type(module).__name__}, whose weights have no shape yet: give "
                "its sizes, or call the network once on zeros before you return it"
            )
