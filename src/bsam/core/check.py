"""Examine a training loop for what would be silently wrong; behind ``optimizer.check``."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .closure import Closure
from .errors import BsamError, BsamRuntimeError
from .graph_check import GraphCheck
from .method_info import Need
from .module_calls import calls_seen
from .objective import Objective
from .ranks import find_ddp, several_ranks
from .rng import RngReplay
from .vector import Vector

if TYPE_CHECKING:
    from .optimizer import SharpnessAware

# What kernels that are not deterministic may change, in bfloat16 too; another batch changes more.
LOSS_RTOL, GRADIENT_RTOL = 1e-4, 1e-2


def examine(optimizer: SharpnessAware, closure: Closure) -> list[str]:
    """Return a sentence for each mistake; see :meth:`SharpnessAware.check`."""
    if optimizer._step_state.phase == "in_backward":
        raise BsamRuntimeError("check was called from inside the closure: call it before training")
    optimizer._weights.refresh(optimizer.param_groups)
    params, phase = optimizer.params, optimizer._step_state.phase
    held = [p.grad for p in params]
    seen = _Seen({m for root in optimizer._modules() for m in root.modules()}, set(params))
    own_rng, optimizer._rng = optimizer._rng, RngReplay(enabled=True)  # the same draws, also with same_draws=False
    L = optimizer._objective(closure, graph_check=GraphCheck(params, on_leaf=seen.note_parameter))
    cuda = sorted({p.device.index for p in params if p.is_cuda})
    with torch.random.fork_rng(devices=cuda), calls_seen(seen.note):
        try:
            optimizer._step_state.phase = "in_backward"
            for p in params:
                p.grad = None
            findings = [*_evaluations(L, Need.PER_SAMPLE_LOSSES in optimizer.needs), *seen.moved_buffers()]
            findings += _parameters(optimizer, L.has_grad, seen.leaves) if L.loss is not None else []
            findings += _wrappers(optimizer, seen.modules)
        finally:
            L.close(failed=True)
            seen.restore()
            optimizer._rng, optimizer._step_state.phase = own_rng, phase
            for p, g in zip(params, held, strict=True):
                p.grad = g
    return findings


class _Seen:
    """The modules that the closure calls; what it changes in those that the optimizer does not know is restored."""

    def __init__(self, known: set[nn.Module], params: set[Tensor]) -> None:
        self.modules: dict[nn.Module, None] = {}
        self._known, self._params = known, params
        self._buffers: list[tuple[nn.Module, str, Tensor, Tensor]] = []  # and the value before the first call
        self._grads: dict[Tensor, Tensor | None] = {}
        self.leaves: dict[Tensor, None] = {}  # of the loss

    def note(self, module: nn.Module) -> None:
        """Note a module before its forward pass."""
        if module in self.modules:
            return
        self.modules[module] = None
        if module in self._known:
            return
        self._buffers += [(module, name, t, t.detach().clone()) for name, t in module._buffers.items() if t is not None]
        for p in module.parameters(recurse=False):
            self._keep_grad(p)

    def note_parameter(self, p: Tensor) -> None:
        """Note a leaf of the loss, before it gets its gradient."""
        self.leaves[p] = None
        self._keep_grad(p)

    def _keep_grad(self, p: Tensor) -> None:
        if p not in self._params and p not in self._grads:
            self._grads[p], p.grad = p.grad, None

    def moved_buffers(self) -> list[str]:
        """Say which modules move their buffers in every pass."""
        moved = {m: None for m, name, t, old in self._buffers if m._buffers[name] is not t or not torch.equal(t, old)}
        if not moved:
            return []
        return [
            f"buffers of {_some(type(m).__name__ for m in moved)} move in every pass, as model does not contain "
            "these modules: pass a list of all modules that the closure calls, model=[network, other], or call eval() "
            "on the others"
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Restore buffers and gradients."""
        for module, name, t, old in self._buffers:
            module._buffers[name] = t
            t.copy_(old)
        for p, g in self._grads.items():
            p.grad = g


def _evaluations(L: Objective, per_sample: bool) -> list[str]:
    """Evaluate the closure twice at ``w`` and compare."""
    try:
        loss, g = L.value_and_grad()
        if per_sample:
            L.value(subset=torch.arange(len(L.sample_losses), device=loss.device))
        again, g_again = L.value_and_grad()
    except BsamError as error:
        return [str(error)]
    except RuntimeError as error:  # torch's, of a closure that runs backward itself
        if "backward through the graph a second time" not in str(error):
            raise
        return [
            "a part of the loss was computed outside the closure, so it is not computed at the perturbed weights: "
            "compute the whole loss inside the closure, or detach the parts that are meant to stay constant"
        ]
    first, second = float(loss), float(again)
    if not (math.isfinite(first) and math.isfinite(second)):
        return [f"the loss is not finite ({first:g}): look for NaN or inf in the batch and in the weights"]
    off = _distance(g, g_again)
    if abs(first - second) <= LOSS_RTOL * abs(first) and off <= GRADIENT_RTOL:
        return []
    return [
        f"two evaluations of the closure at the same weights give the losses {first:.6g} and {second:.6g}, and "
        f"gradients that differ by {off:.1%}: take the batch, and draw from NumPy or Python's random, outside the "
        "closure, before it is called"
    ]


def _distance(a: Vector, b: Vector) -> float:
    length, difference = float(a.norm()), float((a - b).norm())
    return difference / length if length else math.inf if difference else 0.0


def _parameters(optimizer: SharpnessAware, has_grad: list[bool], leaves: Iterable[Tensor]) -> list[str]:
    """Compare the parameters that get a gradient with those of ``base``."""
    names = {p: name for root in optimizer._modules() for name, p in root.named_parameters()}
    known = {p for group in optimizer.param_groups for p in group["params"]}
    foreign = [p for p in leaves if p not in known]
    without = [p for p, has in zip(optimizer.params, has_grad, strict=True) if not has]
    findings = []
    if foreign:
        findings.append(
            f"{len(foreign)} parameter(s) get a gradient and are not in base ({_names(foreign, names)}), so they are "
            "not trained: give them to base, or call requires_grad_(False) on them"
        )
    if without:
        findings.append(
            f"{len(without)} parameter(s) of base get no gradient ({_names(without, names)}): call the modules that "
            "base was built on in the closure, or call requires_grad_(False) on parameters that it does not use"
        )
    return findings


def _wrappers(optimizer: SharpnessAware, called: Iterable[nn.Module]) -> list[str]:
    ranks = optimizer._ranks
    if ranks.ddp is not None:
        if ranks.inside_ddp_forward or any(find_ddp(module) is ranks.ddp for module in called):
            return []
        return [
            "the closure does not call the DistributedDataParallel wrapper, so gradients are not averaged over ranks: "
            "call the wrapper, not the network in it"
        ]
    if several_ranks() and not optimizer._weights.sharded:
        return [
            "there are several ranks, and the closure calls no DistributedDataParallel or FSDP wrapper, so the ranks' "
            "weights will diverge: wrap the network, and call the wrapper in the closure"
        ]
    return []


def _names(params: Iterable[Tensor], names: dict[Any, str]) -> str:
    return _some(names.get(p, f"one of shape {tuple(p.shape)}") for p in params)


def _some(names: Iterable[str]) -> str:
    distinct = list(dict.fromkeys(names))
    return ", ".join(distinct[:3]) + (", ..." if len(distinct) > 3 else "")
