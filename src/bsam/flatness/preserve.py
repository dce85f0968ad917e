"""Change the modes and flags of a model, and restore the model and the random state."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from ..core.undo import Undo


def preserve(undo: Undo, model: nn.Module, mode: str) -> None:
    """Set the mode of a model; ``undo`` restores its flags, its buffers and the random state, even after an error.

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
    # an interrupt may skip the end of a block without gradients or warnings
    undo.set_grad_enabled(torch.is_grad_enabled())
    undo.catch_warnings()
    if "torch._dynamo" in sys.modules:  # otherwise nothing is compiled
        undo.callback(setattr, torch._dynamo.eval_frame, "_stance", torch._dynamo.eval_frame._stance)
        torch.compiler.set_stance("force_eager")
    undo.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
    torch.backends.mha.set_fastpath_enabled(False)
    undo.restore_random_states()  # a DataLoader draws random numbers in each pass
    _restore_tensors(undo, modules)
    undo.set_attributes((m, "training", m.training) for m in modules)
    model.eval()
    undo.set_attributes(changes)


def _restore_tensors(undo: Undo, modules: list[nn.Module]) -> None:
    """Restore buffers, and weights of embeddings with ``max_norm``: forward passes may change them in eval mode."""
    # parameters are replaced while a product is recorded
    registered = [tensors for m in modules for tensors in (m._parameters, m._buffers)]
    buffers = [t for m in modules for t in m._buffers.values() if t is not None]
    embeddings = [m for m in modules if isinstance(m, (nn.Embedding, nn.EmbeddingBag)) and m.max_norm is not None]
    tensors = buffers + [m.weight for m in embeddings]
    undo.callback(_restore_values, tensors, [t.detach().clone() for t in tensors])
    for entries in registered:
        undo.callback(entries.update, dict(entries))


@torch.no_grad()
def _restore_values(tensors: list[Tensor], values: list[Tensor]) -> None:
    for t, value in zip(tensors, values, strict=True):
        if not torch.equal(t, value):  # writing would invalidate the user's graphs that hold it
            t.copy_(value)
