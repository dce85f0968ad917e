"""The modules that the closure calls, whether the optimizer trains them or not."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..common.errors import BsamValueError
from .ddp import find_ddp
from .layout import sharding


class CalledModules:
    """All modules that the closure calls; during a step, it freezes parameters that the optimizer does not have.

    The first module is the trained one. Parameters of the other modules are frozen during a step unless the optimizer
    has them: their gradients are not computed, and ``p.grad`` stays as it was. If DDP's reducer waits for these
    gradients, or FSDP shards them, they are computed, and ``p.grad`` is restored afterwards.

    Args:
        modules: the modules, the trained one first; may be empty.
        known: the parameters of the optimizer.
    """

    def __init__(self, modules: Sequence[nn.Module], known: Collection[Tensor]) -> None:
        self.all, self._known = modules, known
        self._frozen: list[Tensor] = []
        self._grads: list[tuple[Tensor, Tensor | None]] = []

    def freeze_others(self) -> None:
        """Freeze the parameters that the optimizer does not have. Call this before the first pass."""
        for module in self.all[1:]:
            reduced = find_ddp(module) is not None
            for p in module.parameters():
                if not p.requires_grad or p in self._known:
                    continue
                if reduced or sharding(p) is not None:
                    # a view may belong to DDP's buckets, which the passes overwrite
                    kept = p.grad.clone() if p.grad is not None and p.grad._is_view() else p.grad
                    self._grads.append((p, kept))
                    p.grad = None
                else:
                    self._frozen.append(p)
                    p.requires_grad_(False)

    def restore(self) -> None:
        """Restore ``requires_grad`` and ``p.grad``. Calling it again has no effect."""
        for p in self._frozen:
            p.requires_grad_(True)
        for p, g in self._grads:
            p.grad = g


def refuse_batch_norm(called: nn.Module) -> None:
    """Raise if a module is batch norm, which would be updated in every pass because the optimizer has no model."""
    # calls inside a compiled module are not seen
    for module in called.modules() if hasattr(called, "_orig_mod") else (called,):
        if isinstance(module, _BatchNorm) and module.training and module.track_running_stats:
            raise BsamValueError(
                "the closure runs batch norm, whose statistics would be updated in every pass because model is None: "
                "pass the network, as in BSAM(base, model=network)"
            )
