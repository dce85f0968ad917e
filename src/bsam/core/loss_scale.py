"""The scale of a ``GradScaler`` in one step."""

from __future__ import annotations

import torch
from torch import Tensor

from .vector import Vector
from .weights import Weights


class LossScale:
    """Scale losses, unscale gradients, and note whether one of them overflowed."""

    def __init__(self, scaler: torch.amp.GradScaler, weights: Weights) -> None:
        device = weights.params[0].device
        self._scaler = scaler
        self._factor = scaler.scale(torch.ones((), dtype=weights.layout.scalar_dtype, device=device))
        self._device = device
        self.restart()

    def restart(self) -> None:
        """Forget the gradients so far."""
        self._overflowed = torch.zeros((), dtype=torch.bool, device=self._device)  # whether one was non-finite

    def scale(self, loss: Tensor) -> Tensor:
        """Return the scaled loss."""
        return self._scaler.scale(loss)

    def unscale(self, gradient: Vector) -> Vector:
        """Return the gradient of the loss, given that of the scaled loss."""
        self._overflowed = self._overflowed | ~torch.isfinite(gradient.norm())
        return gradient / self._factor

    def overflowed(self) -> bool:
        """Return whether a scaled gradient was non-finite, so that the scaler will skip the step.

        This synchronizes with the host, except while a CUDA graph is captured: the answer is then False.
        """
        if self._overflowed.is_cuda and torch.cuda.is_current_stream_capturing():
            return False
        return bool(self._overflowed)

    def scale_direction(self, direction: Vector) -> Vector:
        """Return the scaled direction: NaN if the gradient of any pass was non-finite, so that the step is skipped."""
        return direction * torch.where(self._overflowed, torch.nan, self._factor)
