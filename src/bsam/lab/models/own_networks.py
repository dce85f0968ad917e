"""Networks that a function of the user returns, which is given as ``MODULE:FUNCTION``."""

from __future__ import annotations

from torch import nn

from ...common.errors import BsamError, BsamRuntimeError, BsamTypeError
from ..common.names import call_with, describe_error, find_function

IMAGES = 224  # pixels a side of image files, unless the run has another image size


def own_network(name: str, classes: int, channels: int, image_size: int | None = None) -> nn.Module:
    """Import a function or a class, and return the network that it makes.

    Args:
        name: ``MODULE:FUNCTION``. It gets those of the other arguments, and of ``input_shape`` (channels, side, side),
            that its signature names.
        classes: number of classes.
        channels: number of channels of the inputs.
        image_size: side of the inputs, in pixels.
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
    if not isinstance(network, nn.Module):
        raise BsamTypeError(f"{name} must return a torch.nn.Module, got {type(network).__name__}")
    return network
