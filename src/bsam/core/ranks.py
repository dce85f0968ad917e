"""Data parallelism: find the DDP wrapper and average gradients over ranks."""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..common.ddp import average_, find_ddp, mean, several_ranks
from ..common.errors import BsamRuntimeError
from ..common.module_calls import calls_seen


class Ranks:
    """Averages gradients, losses and directions over the ranks of DDP, and finds the DDP wrapper of the model.

    DDP and FSDP average the gradients of every pass, so that each rank perturbs along the gradient of the whole batch.
    With ``m_sharpness`` each rank perturbs along its own gradient instead, and only the direction is averaged.

    The wrapper may be created after the optimizer. It is then found when the closure calls it, or when ``backward``
    runs inside its forward, as in some frameworks. In the second case DDP's reducer does not see the passes,
    so this class averages their gradients.
    """

    def __init__(self, model: nn.Module | None, m_sharpness: bool) -> None:
        self.m_sharpness = m_sharpness
        self.needs_sync = False  # p.grad holds directions of only this rank, from calls under the user's no_sync
        self.inside_ddp_forward = False  # whether this backward runs inside the wrapper's forward
        self._ddp_from_model = find_ddp(model)
        self._ddp_from_closure: weakref.ref[Any] | None = None  # weakly: a model may be wrapped again
        self._may_be_wrapped = self._warned = False
        if m_sharpness and self.ddp is None:
            raise BsamRuntimeError(
                "m_sharpness=True perturbs each rank separately, so model must be a DistributedDataParallel wrapper or "
                "contain one"
            )

    @property
    def ddp(self) -> Any:
        """The DDP wrapper, as far as it is known."""
        if self._ddp_from_model is not None or self._ddp_from_closure is None:
            return self._ddp_from_model
        return self._ddp_from_closure()

    def use(self, wrapper: nn.Module) -> None:
        """Use this DDP wrapper, through which a framework calls the model, also outside the closure."""
        self._ddp_from_closure = weakref.ref(wrapper)

    def begin(self, sharded: bool, params: Sequence[Tensor]) -> None:
        """Begin a backward: find out whether it runs inside a DDP wrapper, or may call one that is not known yet."""
        several = several_ranks() and not sharded
        active = nn.parallel.DistributedDataParallel._get_active_ddp_module() if several else None
        self.inside_ddp_forward = active is not None and find_ddp(active, set(params)) is not None
        if self.inside_ddp_forward and self._ddp_from_model is None:
            self._ddp_from_closure = weakref.ref(active)
        self._may_be_wrapped = several and self.ddp is None

    def warn_if_not_wrapped(self) -> None:
        """Warn once if there are several ranks and no DDP wrapper was found: their weights would diverge."""
        if self._may_be_wrapped and self.ddp is None and not self._warned:
            self._warned = True
            warnings.warn(
                f"torch.distributed has {dist.get_world_size()} ranks, and the closure called no "
                "DistributedDataParallel or FSDP wrapper of the parameters, so gradients are not averaged and the "
                "ranks' weights will diverge. If the model is wrapped, pass the wrapper as model",
                stacklevel=3,
            )

    def pass_context(self, without_reducer: bool, params: Sequence[Tensor]) -> contextlib.AbstractContextManager[Any]:
        """Return the context of a pass; with ``m_sharpness``, or ``without_reducer``, it turns DDP's reducer off.

        If no DDP wrapper is known and there may be one, the context finds the one that the closure calls.
        """
        if self.ddp is not None:
            return self._ddp_no_sync() if self.m_sharpness or without_reducer else contextlib.nullcontext()
        return self._find_ddp_in_closure(without_reducer, params) if self._may_be_wrapped else contextlib.nullcontext()

    def _ddp_no_sync(self) -> contextlib.AbstractContextManager[Any]:
        if self.ddp.static_graph:
            raise BsamRuntimeError(
                "this method runs passes under DistributedDataParallel.no_sync, which does not work with "
                "static_graph=True: build the wrapper with static_graph=False"
            )
        return self.ddp.no_sync()

    @contextlib.contextmanager
    def _find_ddp_in_closure(self, without_reducer: bool, params: Sequence[Tensor]) -> Iterator[None]:
        """Find the DDP wrapper of ``params`` when it is called, in time to turn its reducer off for this pass."""
        ours = set(params)

        def find_wrapper(module: nn.Module) -> None:
            if self.ddp is not None:
                return
            compiled = hasattr(module, "_orig_mod")  # no hook sees what is called inside
            may_contain_ddp = compiled or isinstance(module, nn.parallel.DistributedDataParallel)
            ddp = find_ddp(module, ours) if may_contain_ddp else None
            if ddp is not None:
                self._ddp_from_closure = weakref.ref(ddp)
                if without_reducer:
                    stack.enter_context(self._ddp_no_sync())

        with contextlib.ExitStack() as stack, calls_seen(find_wrapper):
            yield

    def mean(self, number: float) -> float:
        """Return the mean of a number over ranks if the user is inside DDP's ``no_sync``; otherwise return it unchanged
        (it is then equal on all ranks).
        """
        return mean([number], [self.ddp.process_group], self.ddp.device)[0] if self.under_no_sync else number

    def mean_losses(self, losses: list[float], mesh: Any) -> list[float]:
        """Average losses as gradients are averaged: over ``mesh`` under FSDP, over DDP's ranks where it reduces."""
        if mesh is not None:
            return mean(losses, mesh.get_all_groups(), mesh.device_type)
        return mean(losses, [self.ddp.process_group], self.ddp.device) if self.reduces_each_pass else losses

    @property
    def reduces_each_pass(self) -> bool:
        """Whether DDP averages the gradients of each pass: neither with ``m_sharpness`` nor under ``no_sync``."""
        return self.ddp is not None and not self.m_sharpness and self.ddp.require_backward_grad_sync

    @property
    def under_no_sync(self) -> bool:
        """Whether the user's ``no_sync`` keeps this rank's gradients apart; False with ``m_sharpness``, as intended."""
        return self.ddp is not None and not self.m_sharpness and not self.ddp.require_backward_grad_sync

    @property
    def records_used_parameters(self) -> bool:
        """Whether DDP notes which parameters a ``backward`` reaches, also without its reducer.

        The next pass with the reducer would expect a gradient of each of them, so the others must not call
        ``backward``.
        """
        return self.ddp is not None and self.ddp.find_unused_parameters and not self.m_sharpness

    def average_pass(self, gradient: list[Tensor]) -> None:
        """Average a gradient that was computed without DDP's reducer, if the reducer would have averaged it."""
        if self.reduces_each_pass:
            self.average_(gradient)

    def has_grad_on_any_rank(self, has_grad: list[bool]) -> list[bool]:
        """Return which parameters got a gradient on any rank. Where DDP reduces every pass, this is known already."""
        if self.ddp is None or not (self.m_sharpness and self.ddp.find_unused_parameters):
            return has_grad
        flags = torch.tensor(has_grad, dtype=torch.int32, device=self.ddp.device)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self.ddp.process_group)
        return [bool(flag) for flag in flags.tolist()]

    def sync(self, accumulated: list[Tensor], direction: list[Tensor]) -> None:
        """Average what differs between ranks, in place; under the user's ``no_sync`` only note that a later call must.

        Args:
            accumulated: ``p.grad`` of earlier calls, which differs after calls under ``no_sync``.
            direction: the direction of this call, which differs with ``m_sharpness``.
        """
        if self.ddp is None:
            return
        if not self.ddp.require_backward_grad_sync:  # the user's no_sync: a later call will average
            self.needs_sync = True
            return
        self.average_((accumulated if self.needs_sync else []) + (direction if self.m_sharpness else []))
        self.needs_sync = False

    def average_(self, tensors: list[Tensor]) -> list[Tensor]:
        """Average tensors over the ranks of DDP, in place."""
        average_(tensors, self.ddp.process_group)
        return tensors
