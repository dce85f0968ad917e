"""The modules, parameters and gradients that a closure uses."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..common.errors import BsamRuntimeError
from ..core.objective import OUTSIDE, LossCheck
from ..core.tensors import copy, is_writable, local, sharding


class Recorder:
    """Record the modules, buffers, parameters and gradients that the closure uses, and restore them at the end."""

    def __init__(self, roots: Iterable[nn.Module]) -> None:
        self.modules: dict[nn.Module, None] = {}  # modules that were called
        self.leaves: dict[Tensor, None] = {}  # parameters that the loss depends on
        self.roots = list(roots)
        self._known = {m: None for root in self.roots for m in root.modules()}
        self._recorded: set[nn.Module] = set()
        # parameters of known modules, with their versions, and aliases so that their addresses are not used again
        self._frozen: dict[Tensor, tuple[tuple[int, int], Tensor]] = {}
        self._buffers: list[tuple[nn.Module, str, Tensor, Tensor | None]] = []  # in other modules, with their values
        self._values: list[tuple[Tensor, Tensor]] = []  # trained parameters, with their values
        self._set_once: list[tuple[nn.Module, dict[str, Tensor]]] = []  # modules with buffers_set_once
        self._grads: dict[Tensor, Tensor | None] = {}
        self._scale: float | None = None  # the factor of a loss that is already scaled

    def save(self, params: Iterable[Tensor]) -> None:
        """Save the trained parameters, and save and clear their gradients."""
        for p in params:
            self._values.append((p, p.detach().clone()))
            self._save_grad(p)
        for module in self._known:
            if getattr(type(module), "buffers_set_once", False):
                self._set_once.append((module, {name: t.clone() for name, t in module.state_dict().items()}))
            for p in module.parameters(recurse=False):
                if not p.requires_grad and not is_lazy(p):
                    self._frozen[p] = _state(p), p.detach()

    def record_module(self, module: nn.Module) -> None:
        """Record a module before its forward pass, and its submodules, whose calls are not seen if it is compiled."""
        if module in self.modules:
            return
        self.modules[module] = None
        for m in module.modules():
            if m in self._known or m in self._recorded:
                continue
            self._recorded.add(m)
            for name, t in m._buffers.items():
                if t is not None:
                    self._buffers.append((m, name, t, t.detach().clone() if is_writable(t) else None))
            for p in m.parameters(recurse=False):
                self._save_grad(p)

    def record_parameter(self, p: Tensor) -> None:
        """Record a leaf of the loss's graph before its gradient is computed."""
        if isinstance(p, nn.Parameter):
            self.leaves[p] = None
        self._save_grad(p)

    def record_loss(self, loss: Tensor) -> None:
        """Record whether the loss is already scaled."""
        self._scale = self._scale or _scale_of(loss)

    def find_scale(self) -> list[str]:
        """Report a loss that is already scaled."""
        if self._scale is None:
            return []
        return [
            f"the closure returns a loss times {self._scale:g}, like scaler.scale(loss): return the loss itself, and "
            "call optimizer.backward(closure, scaler=scaler)"
        ]

    def _save_grad(self, p: Tensor) -> None:
        if p not in self._grads:
            self._grads[p], p.grad = p.grad, None

    def find_changes(self) -> list[str]:
        """Report state that changes in every pass because the optimizer does not restore it."""
        modules = {m: None for m, name, t, old in self._buffers if _differs(m, name, t, old)}
        frozen = [p for p, (state, _) in self._frozen.items() if _state(p) != state]
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

    @torch.no_grad()
    def restore(self) -> None:
        """Restore everything that was recorded and has changed."""
        for p, g in self._grads.items():
            p.grad = g
        for p, value in self._values:
            if not _equal(p, value):
                p.copy_(value)
        for module, state in self._set_once:
            if any(not _equal(t, state[name]) for name, t in module.state_dict().items()):
                module.load_state_dict(state)
        for module, name, t, old in self._buffers:
            if _differs(module, name, t, old):
                module._buffers[name] = t
                if old is not None:
                    copy([old], into=[t])

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
    return module._buffers[name] is not t or (old is not None and not _equal(t, old))


def _equal(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same shape and values, if sharded on this rank; NaN equals NaN."""
    if a.shape != b.shape:
        return False
    a, b = local(a), local(b)
    return bool(((a == b) | ((a != a) & (b != b))).all())


def _some(names: Iterable[str]) -> str:
    distinct = list(dict.fromkeys(names))
    return ", ".join(distinct[:3]) + (", ..." if len(distinct) > 3 else "")


class GraphCheck(LossCheck):
    """Compare all nodes of the passes' graphs, also between passes at ``w``, and record losses and their leaves."""

    def __init__(self, recorder: Recorder, params: Sequence[Tensor]) -> None:
        super().__init__()
        self._recorder = recorder
        self._params = {id(p) for p in params}

    def check(self, loss: Tensor, moved: bool, since: int) -> None:
        """Raise if the loss depends on parameters through nodes of an earlier pass."""
        self._recorder.record_loss(loss)
        root: Any = loss.grad_fn
        if root is None:
            return
        nodes = [node for node in _nodes(root) if not _is_leaf(node)]  # all passes share the leaves
        shared = (node for node in nodes if node in self.earlier)
        older = not self.earlier and root._sequence_nr() < since
        if older or any(self._params & {id(leaf) for leaf in _leaves(node)} for node in shared):
            raise BsamRuntimeError(OUTSIDE)
        self.current += nodes
        for leaf in _leaves(root):
            self._recorder.record_parameter(leaf)


def _leaves(root: Any) -> Iterator[Tensor]:
    return (node.variable for node in _nodes(root) if _is_leaf(node))


def _is_leaf(node: Any) -> bool:
    return type(node).__name__ == "AccumulateGrad"


def _nodes(root: Any) -> Iterator[Any]:
    """Iterate over the nodes of a graph."""
    visited, todo = {root}, [root]
    while todo:
        node = todo.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in visited:
                visited.add(following)
                todo.append(following)


def _scale_of(loss: Tensor) -> float | None:
    """Return the factor of a loss that was multiplied by a large power of 2, as ``scaler.scale`` does."""
    if type(loss.grad_fn).__name__ != "MulBackward0":
        return None
    try:
        factors = [loss.grad_fn._saved_self, loss.grad_fn._saved_other]  # type: ignore[union-attr]
    except RuntimeError:  # the closure ran backward, which frees them
        return None
    scales = (t for t in factors if t is not None and t.dim() == 0 and t.dtype == torch.float32)  # as a GradScaler's
    numbers = [float(t) for t in scales if not t.requires_grad]
    return next((c for c in numbers if c >= 256 and math.frexp(c)[0] == 0.5), None)
