"""Context managers that change attributes, modules and random numbers, and bring everything back."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase


@contextlib.contextmanager
def temporarily(changes: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Set attributes, given as ``(object, name, value)``, and restore them on exit."""
    changes = list(changes)
    before = [(target, name, getattr(target, name)) for target, name, _ in changes]
    try:
        for target, name, value in changes:
            setattr(target, name, value)
        yield
    finally:
        for target, name, value in reversed(before):
            setattr(target, name, value)


@contextlib.contextmanager
def preserved(model: nn.Module, mode: str) -> Iterator[None]:
    """Set the mode of a model; on exit its flags and buffers and the random numbers are as before, also after an error.

    Compiled parts run eagerly, since their graphs have no second derivative, and recurrent networks without cuDNN,
    which has no second derivative of them, and no first one in eval mode. Attention runs without torch's fast path,
    which computes another function at padded positions, and only where no gradient is wanted.
    """
    modules = list(model.modules())
    norms = [m for m in modules if isinstance(m, _NormBase)] if mode == "train" else []
    changes: list[tuple[Any, str, Any]] = [
        (m, name, value) for m in norms for name, value in (("training", True), ("track_running_stats", False))
    ]
    # instance norm would update them otherwise
    changes += [(m, name, None) for m in norms for name in ("running_mean", "running_var") if name in m._buffers]
    if any(isinstance(m, nn.RNNBase) for m in modules):
        changes.append((torch.backends.cudnn, "enabled", False))
    with contextlib.ExitStack() as stack:
        if "torch._dynamo" in sys.modules:  # nothing can be compiled before this is imported
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
        torch.backends.mha.set_fastpath_enabled(False)
        stack.enter_context(torch.random.fork_rng(devices=[]))  # a DataLoader draws from it in each pass
        stack.enter_context(_restored_tensors(modules))
        stack.enter_context(temporarily((m, "training", m.training) for m in modules))
        model.eval()
        stack.enter_context(temporarily(changes))
        yield


@contextlib.contextmanager
def _restored_tensors(modules: list[nn.Module]) -> Iterator[None]:
    """Restore buffers and weights of embeddings with ``max_norm``: forward passes in eval mode may write to them."""
    buffers = [(m._buffers, dict(m._buffers)) for m in modules]
    embeddings = [m for m in modules if isinstance(m, (nn.Embedding, nn.EmbeddingBag)) and m.max_norm is not None]
    tensors = [t for _, own in buffers for t in own.values() if t is not None] + [m.weight for m in embeddings]
    before = [t.detach().clone() for t in tensors]
    try:
        yield
    finally:
        for registered, own in buffers:
            registered.update(own)
        with torch.no_grad():
            for t, old in zip(tensors, before, strict=True):
                if not torch.equal(t, old):  # writing counts as a change for graphs of the user that hold the tensor
                    t.copy_(old)
