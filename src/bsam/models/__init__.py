"""What is trained: the networks, and the list of them all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from ..core.checks import check_count
from ..core.errors import BsamValueError
from .digits_net import DigitsNet
from .pyramidnet import pyramidnet8, pyramidnet110
from .resnet import resnet8, resnet18, resnet20
from .wide_resnet import wide_resnet10_1, wide_resnet28_10


@dataclass(frozen=True)
class Model:
    """What the command line, the runs and the reports need to know of a network.

    Args:
        name: by which it is called on the command line.
        build: makes one from ``classes=`` and ``channels=``.
        title: its name in a table.
        parameters: how many, with 10 classes and its own ``channels``.
        images: the side of those it is meant for.
        reference: authors, place and year; empty for our own.
        channels: of those images.
        memory_format: of its weights.
    """

    name: str
    build: Callable[..., nn.Module]
    title: str
    parameters: int
    images: int
    reference: str = ""
    channels: int = 3
    memory_format: torch.memory_format = torch.channels_last


_RESNET = "He et al., CVPR 2016"
_WIDE = "Zagoruyko & Komodakis, BMVC 2016"
_PYRAMID = "Han et al., CVPR 2017"

MODELS: dict[str, Model] = {
    model.name: model
    for model in (
        Model(
            "digits_net", DigitsNet, "DigitsNet", 9_978, 8, channels=1, memory_format=torch.contiguous_format
        ),  # the demo's numbers, to the last bit
        Model("resnet8", resnet8, "ResNet-8", 78_042, 32, _RESNET),
        Model("resnet20", resnet20, "ResNet-20", 272_474, 32, _RESNET),
        Model("resnet18", resnet18, "ResNet-18", 11_173_962, 32, _RESNET),
        Model("wide_resnet10_1", wide_resnet10_1, "WideResNet-10-1", 77_850, 32, _WIDE),
        Model("wide_resnet28_10", wide_resnet28_10, "WideResNet-28-10", 36_479_194, 32, _WIDE),
        Model("pyramidnet8", pyramidnet8, "PyramidNet-8", 114_906, 32, _PYRAMID),
        Model("pyramidnet110", pyramidnet110, "PyramidNet-110", 28_485_477, 32, _PYRAMID),
    )
}


def build(name: str, classes: int = 10, channels: int | None = None, seed: int | None = None) -> nn.Module:
    """A network by its name, on torch's default device and in the memory format that its entry of :data:`MODELS` asks
    for.

    Args:
        name: one of :data:`MODELS`.
        classes: how many.
        channels: of the images; None: those that the network is meant for, 3 for all but ``digits_net``.
        seed: of the initial weights, which are then drawn on the CPU, the same for every device, and the caller's
            random numbers stay as they were. None draws from those.

    Example:
        >>> build("resnet8", classes=100, seed=0)(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 100])
        >>> build("resnet9")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        bsam.core.errors.BsamValueError: model must be one of digits_net, resnet8, ...; got 'resnet9'
    """
    if name not in MODELS:
        raise BsamValueError(f"model must be one of {', '.join(MODELS)}; got {name!r}")
    entry = MODELS[name]
    channels = entry.channels if channels is None else channels
    if seed is None:
        model = entry.build(classes=classes, channels=channels)
    else:
        check_count("seed", seed, low=0)
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.default_generator.manual_seed(seed)  # torch.manual_seed would reseed the GPUs too
            model = entry.build(classes=classes, channels=channels)
    return model.to(torch.get_default_device(), memory_format=entry.memory_format)  # type: ignore[call-overload]
