"""The modules that the closure calls but the optimizer does not train."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import Tensor, nn

from .passes import PassPart
from .ranks import find_ddp
from .tensors import sharding
from .vector import Vector


class OtherModules(PassPart):
    """Modules that the closure calls but the optimizer does not train, such as the discriminator of a GAN.

    Their parameters are frozen during a step unless the optimizer has them: their gradients are not computed, and
    ``p.grad`` stays as it was. If DDP's reducer waits for these gradients, or FSDP shards them, they are computed, and
    ``p.grad`` is restored afterwards.

    Args:
        modules: the modules.
        trained: the parameters of the optimizer.
    """

    def __init__(self, modules: Sequence[nn.Module], trained: Collection[Tensor]) -> None:
        self._modules = modules
        self._trained = trained
        self._frozen: list[Tensor] = []
        self._grads: list[tuple[Tensor, Tensor | None]] = []

    def begin_pass(self, number: int, at: Vector | None) -> None:
        """Freeze the parameters before the first pass."""
        for module in self._modules if number == 0 else ():
            reduced = find_ddp(module) is not None
            for p in module.parameters():
                if not p.requires_grad or p in self._trained:
                    continue
                if reduced or sharding(p) is not None:
                    # a view may belong to DDP's buckets, which the passes overwrite
                    shared = p.grad is not None and p.grad._is_view()
                    self._grads.append((p, p.grad.clone() if shared else p.grad))  # type: ignore[union-attr]
                    p.grad = None
                else:
                    self._frozen.append(p)
                    p.requires_grad_(False)

    def end_step(self, failed: bool) -> None:
        """Restore ``requires_grad`` and ``p.grad``."""
        for p in self._frozen:
            p.requires_grad_(True)
        for p, g in self._grads:
            p.grad = g
