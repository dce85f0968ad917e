"""Find silent mistakes in a training loop."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..common.ddp import find_ddp, several_ranks
from ..common.errors import BsamError, BsamTypeError
from ..common.graph_check import GraphCheck
from ..common.layout import sharding
from ..common.method_info import Need
from ..common.module_calls import calls_seen
from ..common.tensors import copy_keeping_versions, equal, is_writable

# Non-deterministic kernels cause smaller differences than these, even in bfloat16; another batch causes larger ones.
LOSS_RTOL, GRADIENT_RTOL = 1e-4, 1e-2


def check_loop(optimizer: Any, closure: Callable[..., Any]) -> list[str]:
    """Find silent mistakes in a training loop. Call this once, before training.

    The closure is evaluated twice at ``w``, with the same random draws. The check reports

    - a closure that does not compute the same loss twice (it takes a new batch, or draws from NumPy);
    - a loss, or a part of it, that was computed outside the closure;
    - batch norm and other buffers of modules that are not in ``model``;
    - parameters that get a gradient but are not in ``base``, and parameters of ``base`` that get none;
    - a DDP wrapper that the closure does not call.

    Weights, buffers, gradients and random generators are unchanged afterwards.

    Args:
        closure: as in :meth:`step`, for one batch. With several ranks, all of them must call this.

    Returns:
        One sentence per finding, which says what to do. The sentences are also printed.

    Example:
        >>> import bsam
        >>> model, batches = nn.Linear(4, 1), iter(torch.randn(8, 16, 4))
        >>> optimizer = bsam.SAM(torch.optim.SGD(model.parameters(), lr=0.1), model)
        >>> x = next(batches)
        >>> optimizer.check(lambda: model(x).square().mean())
        SAM.check: nothing found
        []
        >>> len(
        ...     optimizer.check(lambda: model(next(batches)).square().mean())
        ... )  # doctest: +ELLIPSIS
        SAM.check: two evaluations of the closure ... change nothing but buffers
        1
    """
    optimizer = optimizer.itself()
    if not callable(closure):
        raise BsamTypeError(f"closure must be a function that computes the loss, got {type(closure).__name__}")
    groups, seen = optimizer.param_groups, Seen(optimizer.called_modules)
    graph_check = partial(GraphCheck, on_leaf=seen.note_parameter)
    with _generators_restored(groups), seen.restored(), optimizer.trial(closure, graph_check) as L:
        seen.save(optimizer.params)
        with calls_seen(seen.note):
            findings, differences = _evaluate_twice(L, Need.PER_SAMPLE_LOSSES in optimizer.needs)
        if not findings:
            sharded = any(sharding(p) is not None for p in optimizer.params)
            if sharded:
                seen.leaves.clear()  # FSDP's gathered parameters
            findings = seen.moved() or differences
            findings += _parameters(seen, groups, zip(optimizer.params, L.has_grad, strict=True))
            findings += _wrappers(optimizer.ranks, sharded, seen.modules)
    print(*(f"{optimizer.method()}.check: {finding}" for finding in findings or ["nothing found"]), sep="\n")
    return findings


class Seen:
    """Record the modules, buffers, parameters and gradients that the closure uses, and restore them at the end."""

    def __init__(self, roots: Iterable[nn.Module]) -> None:
        self.modules: dict[nn.Module, None] = {}  # modules that were called
        self.leaves: dict[Tensor, None] = {}  # parameters that the loss depends on
        self.roots = list(roots)
        self._known = {m: None for root in self.roots for m in root.modules()}
        self._noted: set[nn.Module] = set()
        self._frozen: dict[Tensor, tuple[int, int]] = {}  # parameters of known modules, with their versions
        self._buffers: list[tuple[nn.Module, str, Tensor, Tensor | None]] = []  # in other modules, with their values
        self._values: list[tuple[Tensor, Tensor]] = []  # trained parameters, with their values
        self._set_once: list[tuple[nn.Module, dict[str, Tensor]]] = []  # modules with buffers_set_once
        self._grads: dict[Tensor, Tensor | None] = {}

    def save(self, params: Iterable[Tensor]) -> None:
        """Save the trained parameters, and save and clear their gradients."""
        for p in params:
            self._values.append((p, p.detach().clone()))
            self._keep_grad(p)
        for module in self._known:
            if getattr(type(module), "buffers_set_once", False):
                self._set_once.append((module, {name: t.clone() for name, t in module.state_dict().items()}))
            for p in module.parameters(recurse=False):
                if not p.requires_grad and not is_lazy(p):
                    self._frozen[p] = _state(p)

    def note(self, module: nn.Module) -> None:
        """Record a module before its forward pass, and its submodules, whose calls are not seen if it is compiled."""
        if module in self.modules:
            return
        self.modules[module] = None
        for m in module.modules():
            if m in self._known or m in self._noted:
                continue
            self._noted.add(m)
            for name, t in m._buffers.items():
                if t is not None:
                    self._buffers.append((m, name, t, t.detach().clone() if is_writable(t) else None))
            for p in m.parameters(recurse=False):
                self._keep_grad(p)

    def note_parameter(self, p: Tensor) -> None:
        """Record a leaf of the loss's graph before its gradient is computed."""
        if isinstance(p, nn.Parameter):
            self.leaves[p] = None
        self._keep_grad(p)

    def _keep_grad(self, p: Tensor) -> None:
        if p not in self._grads:
            self._grads[p], p.grad = p.grad, None

    def moved(self) -> list[str]:
        """Report state that changes in every pass because the optimizer does not restore it."""
        modules = {m: None for m, name, t, old in self._buffers if _differs(m, name, t, old)}
        frozen = [p for p, state in self._frozen.items() if _state(p) != state]
        findings = []
        if modules:
            findings.append(
                f"buffers of {_some(type(m).__name__ for m in modules)} are updated in every pass, because model does "
                "not contain these modules: pass all modules that the closure calls, as in model=[network, other], or "
                "call eval() on these"
            )
        if frozen:
            findings.append(
                f"{len(frozen)} frozen parameter(s) of model change in every pass ({self.names(frozen)}): update them "
                "after optimizer.step instead of in the forward pass"
            )
        return findings

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Return a context that restores everything that was recorded and has changed."""
        try:
            yield
        finally:
            for p, g in self._grads.items():
                p.grad = g
            with torch.no_grad():
                for p, value in self._values:
                    if not equal(p, value):
                        p.copy_(value)
                for module, state in self._set_once:
                    if any(not equal(t, state[name]) for name, t in module.state_dict().items()):
                        module.load_state_dict(state)
                for module, name, t, old in self._buffers:
                    if _differs(module, name, t, old):
                        module._buffers[name] = t
                        if old is not None:
                            copy_keeping_versions([old], into=[t])

    def names(self, params: Iterable[Tensor]) -> str:
        """Return the names of some parameters."""
        names: dict[Tensor, str] = {p: name for root in self.roots for name, p in root.named_parameters()}
        return _some(names.get(p, f"one of shape {tuple(p.shape)}") for p in params)


def _state(p: Tensor) -> tuple[int, int]:
    """Return values that change when a parameter is written in place or through ``p.data = ...``.

    The address of a sharded parameter does not count: FSDP2 may replace the memory in the first forward pass.
    """
    return p._version, 0 if sharding(p) is not None else p.data_ptr()


def _differs(module: nn.Module, name: str, t: Tensor, old: Tensor | None) -> bool:
    return module._buffers[name] is not t or (old is not None and not equal(t, old))


@contextlib.contextmanager
def _generators_restored(groups: list[dict[str, Any]]) -> Iterator[None]:
    cuda = sorted({p.device.index for group in groups for p in group["params"] if p.is_cuda})
    python_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=cuda):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


def _evaluate_twice(L: Any, per_sample: bool) -> tuple[list[str], list[str]]:
    """Evaluate the closure twice at ``w``. Return errors, and differences between the evaluations."""
    try:
        loss, g = L.value_and_grad()
        if per_sample:
            L.value(subset=torch.arange(len(L.sample_losses), device=loss.device))
        torch.clear_autocast_cache()  # in training the weights move between passes, which clears it
        again, g_again = L.value_and_grad()
    except BsamError as error:
        return [str(error)], []
    except StopIteration:
        return ["the closure takes a batch from an iterator, which has ended: take the batch before the step"], []
    except RuntimeError as error:  # a closure that runs backward itself fails before GraphCheck can raise
        if "backward through the graph a second time" not in str(error):
            raise
        return [
            "a part of the loss was computed outside the closure, and therefore not at the perturbed weights: compute "
            "the whole loss inside the closure, or detach the parts that are meant to stay constant"
        ], []
    first, second = float(loss), float(again)
    if not (math.isfinite(first) and math.isfinite(second)):
        return [f"the loss is not finite ({first:g}): look for NaN or inf in the batch and in the weights"], []
    gap = _distance(g, g_again)
    if abs(first - second) <= LOSS_RTOL * abs(first) and not gap > GRADIENT_RTOL:  # NaN if the loss scale overflows
        return [], []
    return [], [
        f"two evaluations of the closure at the same weights give the losses {first:.6g} and {second:.6g}, and "
        f"gradients that differ by {gap:.1%}: take the batch, and draw from NumPy or Python's random, before the step; "
        "the closure may change nothing but buffers"
    ]


def _distance(a: Any, b: Any) -> float:
    norm, difference = float(a.norm()), float((a - b).norm())
    return difference / norm if norm else math.inf if difference else 0.0


def _parameters(seen: Seen, groups: list[dict[str, Any]], has_grad: Iterable[tuple[Tensor, bool]]) -> list[str]:
    """Compare the parameters that get a gradient with those of ``base``."""
    known = {p for group in groups for p in group["params"]}
    foreign = [p for p in seen.leaves if p not in known]
    without = [p for p, has in has_grad if not has]
    findings = []
    if foreign:
        findings.append(
            f"{len(foreign)} parameter(s) get a gradient in every pass but are not in base ({seen.names(foreign)}): "
            "pass them to base, call requires_grad_(False) on them, or, if another optimizer trains them, pass "
            "model=[network, other]"
        )
    if without:
        findings.append(
            f"{len(without)} parameter(s) of base get no gradient ({seen.names(without)}): in the closure, call the "
            "network that base was built on, unless this batch skips them on purpose"
        )
    return findings


def _wrappers(ranks: Any, sharded: bool, called: Iterable[nn.Module]) -> list[str]:
    if ranks.ddp is not None:
        if ranks.inside_ddp_forward or any(find_ddp(module) is ranks.ddp for module in called):
            return []
        return [
            "the closure does not call the DistributedDataParallel wrapper, so gradients are not averaged over ranks: "
            "call the wrapper instead of the network inside"
        ]
    if several_ranks() and not sharded:
        return [
            "there are several ranks, but the closure calls no DistributedDataParallel or FSDP wrapper, so the ranks' "
            "weights will diverge: wrap the network, and call the wrapper in the closure"
        ]
    return []


def _some(names: Iterable[str]) -> str:
    distinct = list(dict.fromkeys(names))
    return ", ".join(distinct[:3]) + (", ..." if len(distinct) > 3 else "")
