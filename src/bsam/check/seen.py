"""The modules, parameters and gradients that a closure uses."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..core.layout import sharding
from ..core.tensors import copy_keeping_versions, equal, is_writable
from .before import scale_of


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
        self._scale: float | None = None  # the factor of a loss that is already scaled

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

    def note_loss(self, loss: Tensor) -> None:
        """Record whether the loss is already scaled."""
        self._scale = self._scale or scale_of(loss)

    def scaled(self) -> list[str]:
        """Report a loss that is already scaled."""
        if self._scale is None:
            return []
        return [
            f"the closure returns a loss times {self._scale:g}, like scaler.scale(loss): return the loss itself, and "
            "call optimizer.backward(closure, scaler=scaler)"
        ]

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


def _some(names: Iterable[str]) -> str:
    distinct = list(dict.fromkeys(names))
    return ", ".join(distinct[:3]) + (", ..." if len(distinct) > 3 else "")
