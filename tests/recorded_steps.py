"""A stand-in for CUDA graphs on the CPU: it records the operations of a block, and repeats them on the same memory.

It shows what a capture gets wrong on any device: a number that Python computed once, an operation that reads values or
whose shape depends on them, a tensor that the block replaces instead of writing to it. It says nothing about kernels,
streams, memory pools, random numbers and copies from the host, for which there are the tests marked ``gpu``.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bsam.core import vector
from bsam.core.tensors import Bucket
from bsam.lab.training.graphs import CapturedSteps

WAIT = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}  # operations with these wait for the device
INDEXING = {torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default}  # with masks only


def refuse(*_: object) -> None:
    raise RuntimeError("operation not permitted when stream is capturing")


class RecordedGraph(TorchDispatchMode):
    """Records operations while it is active. As with a CUDA graph, they have no effect until :meth:`replay`."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[tuple[int, Tensor]]]] = []
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage | None]] = {}

    def register_generator_state(self, generator: torch.Generator) -> None:
        raise AssertionError("a CPU has no CUDA generators")

    def pool(self) -> None: ...

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = _tensors((args, kwargs))
        by_mask = func in INDEXING and any(t.dtype in (torch.bool, torch.uint8) for t in _tensors(args[1]))
        if by_mask or (func not in INDEXING and WAIT & {*func.tags}):
            refuse()
        for t in inputs:
            storage = t.untyped_storage()
            self._before.setdefault(storage._cdata, (storage, storage.clone()))
        out = func(*args, **kwargs)
        known = {t.untyped_storage()._cdata for t in inputs}
        outputs = enumerate(_tensors(out))
        made = [(i, t) for i, t in outputs if t.untyped_storage()._cdata not in known]  # the others: views or inputs
        for _, t in made:
            self._before.setdefault(t.untyped_storage()._cdata, (t.untyped_storage(), None))
        self._calls.append((func, args, kwargs, made))
        return out

    def undo(self) -> None:
        """Give all memory that existed before the recording its values from then."""
        for storage, before in self._before.values():
            if before is not None:
                storage.copy_(before)

    @torch.no_grad()
    def replay(self) -> None:
        """Repeat the operations, with the values that their inputs have now."""
        for func, args, kwargs, made in self._calls:
            out = func(*args, **kwargs)
            outputs = [out] if isinstance(out, Tensor) or not made else _tensors(out)
            for i, old in made:
                old.copy_(outputs[i])


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


@contextlib.contextmanager
def recording(graph: RecordedGraph, **_: object) -> Iterator[None]:
    """Take the place of ``torch.cuda.graph``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        for name in ("tolist", "numpy", "cpu"):
            patch.setattr(Tensor, name, refuse)
        with graph:
            yield
    graph.undo()


def like_a_gpu(patch: pytest.MonkeyPatch) -> None:
    """Let CUDA graphs record operations on the CPU, and let vectors keep their factors in tensors, as on a GPU."""
    patch.setattr(torch.cuda, "CUDAGraph", RecordedGraph)
    patch.setattr(torch.cuda, "graph", recording)
    patch.setattr(torch.cuda, "current_stream", lambda: None)
    patch.setattr(torch.cuda, "Stream", lambda: None)
    patch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    patch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    patch.setattr(CapturedSteps, "_fits_side_by_side", lambda steps: False)
    patch.setattr(Bucket, "on_cpu", False)
    patch.setattr(vector.Vector, "_coefficient", _factor)
    patch.setattr(sys.modules["torch.optim.adam"], "_get_capturable_supported_devices", lambda **_: ["cpu"])


def _factor(v: vector.Vector, c: vector.Coefficient, k: int) -> Any:
    return c[v.layout.buckets[k].group] if isinstance(c, vector.PerGroup) else c
