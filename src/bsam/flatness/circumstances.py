"""What a network and its loss depend on beside the numbers in their tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .dataset_loss import DatasetLoss

_VALUES = (bool, int, float, complex, str, type(None), tuple)


class Which:
    """An object, equal to itself alone; held, so that no other one takes its place in memory."""

    def __init__(self, thing: Any) -> None:
        self.thing = thing

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Which) and self.thing is other.thing

    __hash__ = None  # type: ignore[assignment]


def circumstances(loss: DatasetLoss) -> Any:
    """The modules of the network and of the loss, their attributes and hooks, what is frozen, and autocast: equal if nothing of it has changed.

    Example:
        >>> loss = DatasetLoss(nn.Linear(2, 1), nn.CrossEntropyLoss(), [])
        >>> before = circumstances(loss)
        >>> loss.loss_fn.label_smoothing = 0.1
        >>> circumstances(loss) == before, circumstances(loss) == circumstances(loss)
        (False, True)
    """
    modules = [*loss.model.modules(), *(loss.loss_fn.modules() if isinstance(loss.loss_fn, nn.Module) else ())]
    device = loss.weights.params[0].device.type
    autocast = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
    return [(Which(m), _of(m)) for m in modules], [p.requires_grad for p in loss.model.parameters()], autocast


def _of(module: nn.Module) -> list[Any]:
    """A module's attributes: plain values as they are, of others which they are; and what is registered with it or hooked to it."""
    attributes = {name: value if isinstance(value, _VALUES) else Which(value) for name, value in vars(module).items() if name != "training"}
    registered = [(name, Which(t)) for held in (module._parameters, module._buffers) for name, t in held.items()]
    hooked = [list(value) for name, value in vars(module).items() if "hooks" in name and isinstance(value, dict)]
    return [attributes, registered, hooked]
