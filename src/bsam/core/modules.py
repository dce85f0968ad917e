"""The state of the modules that the closure runs, during a step."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from .layout import sharding
from .ranks import find_ddp


class TracksStatistics(nn.Module):
    """A module that keeps statistics of what it sees in training mode, as batch norm does; a base class.

    Its forward pass updates them where ``training`` and ``track_running_stats`` are both True. A sharpness-aware step
    sets ``track_running_stats`` to False after the first pass, and back at its end, also after an exception.
    """

    def __init__(self) -> None:
        super().__init__()
        self.track_running_stats = True


class Modules:
    """Freezes the statistics of modules after the first pass, and parameters that are not the optimizer's.

    The statistics are those of batch norm and of :class:`TracksStatistics`.

    The first module is the one that is trained. Parameters of the others that the optimizer does not have are frozen
    during a step: their gradients stay as they were, and are not computed. Where that is not possible, because DDP's
    reducer waits for these gradients or FSDP shards them, they are computed, and ``p.grad`` is restored afterwards.

    Args:
        modules: the modules; empty where the closure has no batch norm.
        known: the parameters of the optimizer.
    """

    def __init__(self, modules: Sequence[nn.Module], known: Collection[Tensor]) -> None:
        self._modules, self._known = modules, known
        self._tracking: list[_BatchNorm | TracksStatistics] = []
        self._statistics_frozen = False
        self._frozen: list[Tensor] = []
        self._grads: list[tuple[Tensor, Tensor | None]] = []

    def freeze_others(self) -> None:
        """Freeze the parameters that are not the optimizer's. Call before the first pass."""
        for module in self._modules[1:]:
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

    def freeze_statistics(self) -> None:
        """Stop updates of the running statistics. Call after the first pass."""
        if self._statistics_frozen:
            return
        self._statistics_frozen = True
        for module in (m for root in self._modules for m in root.modules()):
            if isinstance(module, (_BatchNorm, TracksStatistics)) and module.track_running_stats:
                self._tracking.append(module)
                vars(module)["track_running_stats"] = False  # nn.Module.__setattr__ takes ten times as long

    def restore(self) -> None:
        """Restore everything. Calling it again has no effect."""
        for module in self._tracking:
            vars(module)["track_running_stats"] = True
        for p in self._frozen:
            p.requires_grad_(True)
        for p, g in self._grads:
            p.grad = g
