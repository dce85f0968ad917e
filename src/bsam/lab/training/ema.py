"""The exponential moving average of a network's weights."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


class WeightAverage:
    r"""A copy of a network that holds the average of its weights after all steps so far.

    After step :math:`t`, the average is :math:`\sum_i \beta^{t-i} w_i / \sum_i \beta^{t-i}` with :math:`i = 1 \dots t`,
    so the initial weights have no part in it. Floating-point buffers, such as the statistics of batch norm, are
    averaged in the same way; other buffers are copied.

    Args:
        network: the network that is trained.
        decay: the factor :math:`\beta`, between 0 and 1.

    Example:
        >>> layer = nn.Linear(1, 1)
        >>> average = WeightAverage(layer, decay=0.5)
        >>> for value in (3.0, 6.0):
        ...     _ = nn.init.constant_(layer.weight, value)
        ...     average.update()
        >>> average.network.weight.item()  # (0.5 * 3 + 6) / 1.5
        5.0
    """

    def __init__(self, network: nn.Module, decay: float) -> None:
        self.network = copy.deepcopy(network)
        self._source = network
        self._decay = decay
        self._steps = 0

    @torch.no_grad()
    def update(self) -> None:
        """Add the weights after a step. This does not wait for the device."""
        self._steps += 1
        pairs = list(zip(_tensors(self.network), _tensors(self._source), strict=True))
        # the first step is copied: lerp gives NaN if a range still starts at infinity
        averaged = [(mean, new) for mean, new in pairs if self._steps > 1 and new.dtype.is_floating_point]
        copied = [(mean, new) for mean, new in pairs if self._steps == 1 or not new.dtype.is_floating_point]
        if averaged:
            weight = (1 - self._decay) / (1 - self._decay**self._steps)
            torch._foreach_lerp_([mean for mean, _ in averaged], [new for _, new in averaged], weight)
        for mean, new in copied:
            mean.copy_(new)

    def state_dict(self) -> dict[str, Any]:
        """Return the average and the number of steps."""
        return {"network": self.network.state_dict(), "steps": self._steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state from :meth:`state_dict`."""
        self.network.load_state_dict(state["network"])
        self._steps = state["steps"]


def _tensors(network: nn.Module) -> list[Tensor]:
    return [*network.parameters(), *network.buffers()]
