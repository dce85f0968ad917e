"""The modules that the closure runs, during a step."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..common.ddp import find_ddp
from ..common.errors import BsamValueError
from ..common.layout import sharding


class OtherModules:
    """Freezes the parameters of modules that are not the optimizer's, for a step.

    The first module is the one that is trained. Parameters of the others that the optimizer does not have are frozen
    during a step: their gradients stay as they were, and are not computed. Where that is not possible, because DDP's
    reducer waits for these gradients or FSDP shards them, they are computed, and ``p.grad`` is restored afterwards.

    Args:
        modules: those that the closure runs; empty if there is nothing to care for.
        known: the parameters of the optimizer.
    """

    def __init__(self, modules: Sequence[nn.Module], known: Collection[Tensor]) -> None:
        self.all, self._known = modules, known
        self._frozen: list[Tensor] = []
        self._grads: list[tuple[Tensor, Tensor | None]] = []

    def freeze_others(self) -> None:
        """Freeze the parameters that are not the optimizer's. Call before the first pass."""
        for module in self.all[1:]:
            reduced = find_ddp(module) is not None
            for p in module.parameters():
                if not p.requires_grad or p in self._known:
                    continue
                if reduced or sharding(p) is not None:
                    # a view may be of DDP's buckets, which the passes write to
                    kept = p.grad.clone() if p.grad is not None and p.grad._is_view() else p.grad
                    self._grads.append((p, kept))
                    p.grad = None
                else:
                    self._frozen.append(p)
                    p.requires_grad_(False)

    def restore(self) -> None:
        """Restore everything. Calling it again has no effect."""
        for p in self._frozen:
            p.requires_grad_(True)
        for p, g in self._grads:
            p.grad = g


def refuse_batch_norm(called: nn.Module) -> None:
    """Raise if a module is batch norm that would be updated in every pass, because the optimizer does not know it."""
    for module in called.modules() if hasattr(called, "_orig_mod") else (called,):  # of a compiled one no call is seen
        if isinstance(module, _BatchNorm) and module.training and module.track_running_stats:
            raise BsamValueError(
                "the closure runs batch norm, and model=None: its running statistics would move in every pass. Pass "
                "the network, as in BSAM(base, model=network)"
            )
