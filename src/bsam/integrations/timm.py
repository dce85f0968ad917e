"""Sharpness-aware training with timm.

On import, this module makes timm importable if torchvision does not fit a CPU build of torch: import it before timm.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..common.timm_import import import_timm
from ..core.objective import Closure
from ..core.optimizer import SharpnessAware

import_timm()

from timm.utils.clip_grad import dispatch_clip_grad  # noqa: E402
from timm.utils.cuda import NativeScaler  # noqa: E402


class ClosureScaler(NativeScaler):
    """timm's ``NativeScaler``, for a function that computes the loss instead of the loss.

    The function runs once per pass of the optimizer. Clipping acts on the direction of the method. The state is that of
    ``NativeScaler``.

    Example::

        loss_scaler = ClosureScaler(device="cuda")
        loss = loss_scaler(
            lambda: loss_fn(model(input), target),
            optimizer,
            clip_grad=1.0,
            parameters=model.parameters(),
        )
    """

    def __call__(  # type: ignore[override]
        self,
        closure: Closure,
        optimizer: SharpnessAware,
        clip_grad: float | None = None,
        clip_mode: str = "norm",
        parameters: Any = None,
        need_update: bool = True,
    ) -> Tensor:
        """Add the direction to ``p.grad`` and, with ``need_update``, clip it and step; return the first pass's loss."""
        loss = optimizer.backward(closure, scaler=self._scaler)
        if need_update:
            if clip_grad is not None:
                self._scaler.unscale_(optimizer)
                dispatch_clip_grad(parameters, clip_grad, mode=clip_mode)
            self._scaler.step(optimizer)
            self._scaler.update()
        return loss
