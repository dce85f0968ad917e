"""Data parallelism: finding the DDP wrapper, and averaging over ranks."""

from __future__ import annotations

import warnings
import weakref
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..common.errors import BsamRuntimeError
from .calls import observe_calls
from .undo import Undo


def several_ranks() -> bool:
    """Whether torch.distributed connects this process with others."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def find_ddp(module: nn.Module | None, params: set[Tensor] | None = None) -> Any:
    """Return the DDP wrapper that ``module`` is or contains (the one of ``params``, if given), or None."""
    if module is None or not dist.is_available():
        return None
    from torch.nn.parallel import DistributedDataParallel

    wrappers = (m for m in module.modules() if isinstance(m, DistributedDataParallel))
    return next((m for m in wrappers if params is None or any(p in params for p in m.parameters())), None)


def average_(tensors: list[Tensor], group: Any) -> None:
    """Average tensors over the ranks of a process group, in place."""
    buckets: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for t in tensors:
        buckets[t.device, t.dtype].append(t)
    for bucket in buckets.values():
        flat = torch.cat([t.reshape(-1) for t in bucket]).div_(group.size())
        dist.all_reduce(flat, group=group)
        pieces = flat.split([t.numel() for t in bucket])
        torch._foreach_copy_(bucket, [piece.view(t.shape) for piece, t in zip(pieces, bucket, strict=True)])


def mean(numbers: list[float], groups: Sequence[Any], device: torch.device | str) -> list[float]:
    """Return the means of numbers over the ranks of process groups, one group after another."""
    means = torch.tensor(numbers, dtype=torch.float64, device=device)
    for group in groups:
        dist.all_reduce(means, group=group)
        means /= group.size()
    return means.tolist()


class Ranks:
    """Find the model's DDP wrapper, and average gradients, losses and directions over its ranks.

    DDP and FSDP average the gradients of every pass, so that each rank perturbs along the gradient of the whole batch.
    With ``m_sharpness`` each rank perturbs along its own gradient instead, and only the direction is averaged.

    If the wrapper is created after the optimizer, it is found when the closure calls it, or when ``backward`` runs
    inside its forward, as in some frameworks. In the second case DDP's reducer does not see the passes, so this class
    averages their gradients.
    """

    def __init__(self, model: nn.Module | None, m_sharpness: bool) -> None:
        self.m_sharpness = m_sharpness
        self.needs_sync = False  # p.grad holds directions of this rank only, from calls under the user's no_sync
        self.inside_ddp_forward = False  # whether this backward runs inside the wrapper's forward
        self._ddp: weakref.ref[Any] | None = None  # weak: the model may be wrapped again
        self._may_be_wrapped = False
        self._warned = False
        if (wrapper := find_ddp(model)) is not None:
            self.use(wrapper)
        if m_sharpness and self.ddp is None:
            raise BsamRuntimeError(
                "m_sharpness=True perturbs each DDP rank separately: pass a model that is, or contains, a "
                "DistributedDataParallel wrapper"
            )

    @property
    def ddp(self) -> Any:
        """The DDP wrapper, if it is known."""
        return None if self._ddp is None else self._ddp()

    def use(self, wrapper: nn.Module) -> None:
        """Use this DDP wrapper: that of the model, or one through which a framework calls it."""
        self._ddp = weakref.ref(wrapper)

    def begin(self, sharded: bool, params: Sequence[Tensor]) -> None:
        """Begin a backward: detect whether it runs inside a DDP wrapper, or may call one that is not known yet."""
        several = several_ranks() and not sharded
        active = nn.parallel.DistributedDataParallel._get_active_ddp_module() if several else None
        self.inside_ddp_forward = active is not None and find_ddp(active, set(params)) is not None
        if active is not None and self.inside_ddp_forward:
            self.use(active)
        self._may_be_wrapped = several and self.ddp is None

    def begin_pass(self, undo: Undo, without_reducer: bool, params: Sequence[Tensor]) -> None:
        """Begin a pass, which ``undo`` ends. With ``m_sharpness`` or ``without_reducer``, turn DDP's reducer off.

        If there may be a DDP wrapper that is not known yet, find the one that the closure calls.
        """
        if self.ddp is not None:
            if self.m_sharpness or without_reducer:
                self._turn_reducer_off(undo)
        elif self._may_be_wrapped:
            self._find_ddp_in_closure(undo, without_reducer, params)

    def _turn_reducer_off(self, undo: Undo) -> None:
        if self.ddp.static_graph:
            raise BsamRuntimeError(
                "this method runs passes under DistributedDataParallel.no_sync, which does not support "
                "static_graph=True: build the wrapper with static_graph=False"
            )
        undo.set_attributes([(self.ddp, "require_backward_grad_sync", False)])  # what its no_sync does

    def _find_ddp_in_closure(self, undo: Undo, without_reducer: bool, params: Sequence[Tensor]) -> None:
        """Find the DDP wrapper of ``params`` when it is called, in time to turn off its reducer for this pass."""
        trained = set(params)

        def find_wrapper(module: nn.Module) -> None:
            if self.ddp is not None:
                return
            compiled = hasattr(module, "_orig_mod")  # hooks do not see calls inside it
            may_contain_ddp = compiled or isinstance(module, nn.parallel.DistributedDataParallel)
            ddp = find_ddp(module, trained) if may_contain_ddp else None
            if ddp is not None:
                self.use(ddp)
                if without_reducer:
                    self._turn_reducer_off(undo)

        observe_calls(undo, find_wrapper)

    def mean(self, number: float) -> float:
        """Return the mean of a number over ranks under the user's ``no_sync``; otherwise the number itself."""
        return mean([number], [self.ddp.process_group], self.ddp.device)[0] if self.under_no_sync else number

    def mean_losses(self, losses: list[float], mesh: Any) -> list[float]:
        """Average losses like gradients: over ``mesh`` with FSDP, over the ranks of DDP if it reduces this pass."""
        if mesh is not None:
            return mean(losses, mesh.get_all_groups(), mesh.device_type)
        return mean(losses, [self.ddp.process_group], self.ddp.device) if self.reduces_each_pass else losses

    @property
    def reduces_each_pass(self) -> bool:
        """Whether DDP averages the gradients of every pass: not with ``m_sharpness`` or under ``no_sync``."""
        return self.ddp is not None and not self.m_sharpness and self.ddp.require_backward_grad_sync

    @property
    def under_no_sync(self) -> bool:
        """Whether the user's ``no_sync`` keeps this rank's gradients separate. False with ``m_sharpness``."""
        return self.ddp is not None and not self.m_sharpness and not self.ddp.require_backward_grad_sync

    def average_pass(self, gradient: list[Tensor]) -> None:
        """Average a gradient that was computed without DDP's reducer, if the reducer would have averaged it."""
        if self.reduces_each_pass:
            self.average_(gradient)

    def has_grad_on_any_rank(self, has_grad: list[bool]) -> list[bool]:
        """Return which parameters got a gradient on any rank. If DDP reduces every pass, this is already known."""
        return has_grad if self.reduces_each_pass else self.on_any_rank(has_grad)

    def on_any_rank(self, flags: list[bool]) -> list[bool]:
        """Return which flags are set on any DDP rank; without ``find_unused_parameters``, all ranks have the same."""
        if self.ddp is None or not self.ddp.find_unused_parameters:
            return flags
        reduced = torch.tensor(flags, dtype=torch.int32, device=self.ddp.device)
        dist.all_reduce(reduced, op=dist.ReduceOp.MAX, group=self.ddp.process_group)
        return [bool(flag) for flag in reduced.tolist()]

    def sync(self, accumulated: list[Tensor], direction: list[Tensor]) -> None:
        """Average tensors that differ between ranks, in place; under the user's ``no_sync``, leave it to a later call.

        Args:
            accumulated: ``p.grad`` of earlier calls; differs between ranks after calls under ``no_sync``.
            direction: the direction of this call; differs between ranks with ``m_sharpness``.
        """
        if self.ddp is None:
            self._warn_if_not_wrapped()
            return
        if not self.ddp.require_backward_grad_sync:  # under the user's no_sync
            self.needs_sync = True
            return
        self.average_((accumulated if self.needs_sync else []) + (direction if self.m_sharpness else []))
        self.needs_sync = False

    def average_(self, tensors: list[Tensor]) -> list[Tensor]:
        """Average tensors over the DDP ranks, in place."""
        average_(tensors, self.ddp.process_group)
        return tensors

    def _warn_if_not_wrapped(self) -> None:
        """Warn once if there are several ranks but no DDP wrapper: their weights would diverge."""
        if self._may_be_wrapped and not self._warned:
            self._warned = True
            warnings.warn(
                f"torch.distributed has {dist.get_world_size()} ranks, and the closure called no "
                "DistributedDataParallel or FSDP wrapper, so gradients are not averaged and the ranks' weights will "
                "diverge: wrap the network, call the wrapper in the closure, and pass it as model",
                stacklevel=8,
            )
