"""Context managers that change attributes, modules and the random state, and restore them."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase


@contextlib.contextmanager
def set_temporarily(changes: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
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
def preserve(model: nn.Module, mode: str) -> Iterator[None]:
    """Set the mode of a model, and restore its flags, its buffers and the random state on exit, even after an error.

    Compiled parts run eagerly, because their graphs have no second derivative. Recurrent networks run without cuDNN,
    which has no second derivative and, in eval mode, no first one either. Attention runs without torch's fast path,
    which torch takes only if no gradient is needed and which gives different outputs at padded positions.
    """
    modules = list(model.modules())
    norms = [m for m in modules if isinstance(m, _NormBase)] if mode == "train" else []
    changes: list[tuple[Any, str, Any]] = [
        (m, name, value) for m in norms for name, value in (("training", True), ("track_running_stats", False))
    ]
    # otherwise instance norm would update its statistics
    changes += [(m, name, None) for m in norms for name in ("running_mean", "running_var") if name in m._buffers]
    if any(isinstance(m, nn.RNNBase) for m in modules):
        changes.append((torch.backends.cudnn, "enabled", False))
    with contextlib.ExitStack() as stack:
        if "torch._dynamo" in sys.modules:  # otherwise nothing is compiled
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
        torch.backends.mha.set_fastpath_enabled(False)
        stack.enter_context(torch.random.fork_rng(devices=[]))  # a DataLoader draws random numbers in each pass
        stack.enter_context(_restore_tensors(modules))
        stack.enter_context(set_temporarily((m, "training", m.training) for m in modules))
        model.eval()
        stack.enter_context(set_temporarily(changes))
        yield


@contextlib.contextmanager
def _restore_tensors(modules: list[nn.Module]) -> Iterator[None]:
    """Restore buffers, and weights of embeddings with ``max_norm``: forward passes may change them in eval mode."""
    buffers = [(m._buffers, dict(m._buffers)) for m in modules]
    embeddings = [m for m in modules if isinstance(m, (nn.Embedding, nn.EmbeddingBag)) and m.max_norm is not None]
    tensors = [t for _, saved in buffers for t in saved.values() if t is not None] + [m.weight for m in embeddings]
    before = [t.detach().clone() for t in tensors]
    try:
        yield
    finally:
        for registered, saved in buffers:
            registered.update(saved)
        with torch.no_grad():
            for t, old in zip(tensors, before, strict=True):
                if not torch.equal(t, old):  # writing would invalidate the user's graphs that hold it
                    t.copy_(old)
