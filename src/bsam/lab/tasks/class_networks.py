"""The networks that classification trains."""

from __future__ import annotations

import torch
from torch import nn

from ...common.errors import BsamValueError
from ..models import build
from ..quantization import quantize
from .classification_settings import ClassificationSettings
from .image_inputs import Inputs
from .pretrained import freeze_backbone


def build_network(run: ClassificationSettings, inputs: Inputs, classes: int) -> nn.Module:
    """Return a run's network with random weights, in eval mode; raise if it cannot take the inputs."""
    network = build_float_network(run, inputs, classes)
    return network if run.weight_bits is None else quantized(network, run)


def build_float_network(run: ClassificationSettings, inputs: Inputs, classes: int) -> nn.Module:
    """Return the network of :func:`build_network` before quantization."""
    shape = inputs.channels, inputs.size, inputs.size
    network = build(run.model, classes, inputs.channels, run.seed).eval()
    try:
        with torch.no_grad():
            network(torch.zeros(1, *shape))
    except (RuntimeError, AssertionError) as error:  # networks of timm assert the size of an image
        size = "x".join(map(str, shape))
        raise BsamValueError(
            f"{run.model} does not take images of {size} ({run.data}): choose another network from `bsam list models`"
        ) from error
    if run.freeze_backbone:
        freeze_backbone(network)
    return network


def quantized(network: nn.Module, run: ClassificationSettings) -> nn.Module:
    """Return a quantized copy of a network, with the settings of a run.

    Example:
        >>> run = ClassificationSettings(weight_bits=4)
        >>> [type(layer).__name__ for layer in quantized(build("digits_net"), run)][::3]
        ['QuantConv2d', 'QuantConv2d', 'Flatten']
    """
    assert run.weight_bits is not None
    return quantize(
        network,
        run.weight_bits,
        run.activation_bits or run.weight_bits,
        scheme=run.quantizer,
        first_last_bits=run.first_last_bits,
        fold_batch_norm=run.fold_batch_norm,
    )
